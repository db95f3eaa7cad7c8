//! `run`, `ps -a`, `rm`.

use crate::lab::{Done, Lab, collect, eventually, needs_runtime, skip_if};
use rustix::process::Signal;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use sys::proc::PidFd;

fn sh(lab: &Lab, options: &[&str], script: &str) -> Done {
    let mut args = vec!["run", "--rm"];
    args.extend(options);
    args.extend(["sys", "--", "sh", "-c", script]);
    lab.run(&args)
}

/// Nothing of any container is left.
fn nothing_left(lab: &Lab) {
    for dir in [lab.root.join("containers"), lab.state.join("containers")] {
        let left: Vec<_> = std::fs::read_dir(&dir).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
        assert!(left.is_empty(), "{left:?}");
    }
    assert!(lab.mounted().is_empty(), "{:?}", lab.mounted());
    lab.no_leases();
}

#[test]
fn priv_a_command_runs_with_what_it_was_given() {
    skip_if!("priv_a_command_runs_with_what_it_was_given", needs_runtime());
    let lab = Lab::new();
    let tree = lab.system("sys");
    sh(&lab, &[], "exit 42").fails(42, &[]);
    assert_eq!(sh(&lab, &[], "echo out; echo err >&2").ok().out, "out\n");
    sh(&lab, &[], "sh -c 'kill -9 $$'; exit $?").fails(137, &[]);

    let mut child = lab.command(&["run", "--rm", "-i", "sys", "--", "cat"]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"through stdin").unwrap();
    assert_eq!(collect(child).ok().out, "through stdin");
    assert_eq!(sh(&lab, &[], "cat").ok().out, "", "without -i there is nothing to read");

    let env = sh(&lab, &["-e", "A=1 2", "-e", "PATH=/bin", "--hostname", "box"], "env").ok().out;
    for line in ["A=1 2", "PATH=/bin", "HOSTNAME=box", "HOME=/root"] {
        assert!(env.lines().any(|l| l == line), "no {line} in {env}");
    }
    assert_eq!(sh(&lab, &["-u", "web"], "id -u; id -g; id -G; echo $HOME").ok().out, "33\n34\n34 4\n/var/work\n");
    assert_eq!(sh(&lab, &["-u", "7:logs"], "id -u; id -g").ok().out, "7\n4\n");
    sh(&lab, &["-u", "nobody"], "id").fails(125, &["no user", "/etc/passwd"]);
    assert_eq!(sh(&lab, &["-w", "/var/work"], "pwd").ok().out, "/var/work\n");
    assert_eq!(sh(&lab, &["-w", "/made/for/it"], "pwd").ok().out, "/made/for/it\n");
    assert_eq!(
        lab.run(&["run", "--rm", "--entrypoint", "/bin/sh", "sys", "--", "-c", "echo $0"]).ok().out,
        "/bin/sh\n"
    );

    // Changes are made above the image, and gone with the container.
    assert_eq!(sh(&lab, &[], "echo x > /etc/passwd; cat /etc/passwd; echo y > /new").ok().out, "x\n");
    assert!(std::fs::read_to_string(tree.join("etc/passwd")).unwrap().starts_with("root:"));
    sh(&lab, &[], "test ! -e /new").ok();
    assert_eq!(sh(&lab, &["--upper", "memory"], "echo x > /new; cat /new").ok().out, "x\n");
    assert_eq!(sh(&lab, &["--as", "tree"], "cat /etc/group").ok().out.lines().count(), 3);
    nothing_left(&lab);
}

#[test]
fn priv_a_container_is_confined() {
    skip_if!("priv_a_container_is_confined", needs_runtime());
    let lab = Lab::new();
    lab.system("sys");
    let status = sh(&lab, &[], "cat /proc/self/status").ok().out;
    let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim().to_owned();
    assert_eq!(field("NoNewPrivs:"), "1");
    assert_eq!(field("Seccomp:"), "2");
    // CAP_AUDIT_WRITE (29), CAP_NET_BIND_SERVICE (10), CAP_KILL (5).
    assert_eq!(u64::from_str_radix(&field("CapEff:"), 16).unwrap(), 1 << 29 | 1 << 10 | 1 << 5);
    let more = sh(&lab, &["--cap-add", "chown"], "cat /proc/self/status").ok().out;
    let caps = more.lines().find_map(|l| l.strip_prefix("CapEff:")).unwrap().trim().to_owned();
    assert_eq!(u64::from_str_radix(&caps, 16).unwrap() & 1, 1);
    let devices = sh(&lab, &[], "cat /proc/net/dev").ok().out;
    let names: Vec<&str> = devices.lines().skip(2).filter_map(|l| l.split(':').next()).map(str::trim).collect();
    assert_eq!(names, ["lo"]);
    assert_eq!(sh(&lab, &[], "cat /sys/class/net/lo/flags").ok().out, "0x9\n", "loopback is up");
    sh(&lab, &[], "echo 1 > /proc/sys/kernel/panic").fails(2, &["ead-only"]);
    sh(&lab, &[], "cat /proc/kcore | { read -r x; test -z \"$x\"; }").ok();
    // Device nodes and set-user-id programs of the image are of no use, whatever its device cgroup says.
    let mounts = sh(&lab, &[], "cat /proc/self/mountinfo").ok().out;
    let root = mounts.lines().find(|l| l.split(' ').nth(4) == Some("/")).unwrap();
    assert!(root.contains("nosuid,nodev"), "{root}");
    // One process tree of its own.
    assert_eq!(sh(&lab, &[], "echo $$").ok().out, "1\n");
    nothing_left(&lab);
}

#[test]
fn priv_volumes_are_bound() {
    skip_if!("priv_volumes_are_bound", needs_runtime());
    let lab = Lab::new();
    lab.system("sys");
    let dir = lab.path("shared");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("in"), b"in\n").unwrap();
    let rw = format!("{}:/data/here", dir.display());
    sh(&lab, &["-v", &rw], "cat /data/here/in && echo out > /data/here/out").ok();
    assert_eq!(std::fs::read(dir.join("out")).unwrap(), b"out\n");
    let ro = format!("{}:/data:ro", dir.display());
    sh(&lab, &["-v", &ro], "cat /data/in; echo x > /data/no").fails(2, &["ead-only"]);
    let file = format!("{}:/etc/group:ro", dir.join("in").display());
    assert_eq!(sh(&lab, &["-v", &file], "cat /etc/group").ok().out, "in\n");
    sh(&lab, &["-v", "/no/such/place:/x"], "true").fails(125, &["/no/such/place", "create it"]);
    nothing_left(&lab);
}

#[test]
fn priv_what_cannot_start_says_so_and_leaves_nothing() {
    skip_if!("priv_what_cannot_start_says_so_and_leaves_nothing", needs_runtime());
    let lab = Lab::new();
    lab.system("sys");
    let run = |args: &[&str]| {
        let mut all = vec!["run", "sys"];
        all.extend(args);
        lab.run(&all)
    };
    run(&["--", "no-such-command"]).fails(127, &["no-such-command"]);
    run(&["--", "/etc/passwd"]).fails(126, &["/etc/passwd"]);
    run(&["--", "/etc"]).fails(126, &["/etc"]);
    run(&[]).fails(125, &["names no command"]);
    // With a volume the runtime itself looks.
    let volume = format!("{}:/data", lab.dir.display());
    run(&["-v", &volume, "--", "no-such-command"]).fails(127, &["no-such-command"]);
    run(&["-t", "--", "sh"]).fails(125, &["terminal"]);
    lab.run(&["run", "nothing", "--", "sh"]).fails(125, &["nothing"]);
    nothing_left(&lab);
}

#[test]
fn priv_what_stays_is_listed_and_removed() {
    skip_if!("priv_what_stays_is_listed_and_removed", needs_runtime());
    let lab = Lab::new();
    lab.system("sys");
    lab.run(&["run", "--name", "kept", "sys", "--", "sh", "-c", "echo kept > /kept; exit 3"]).fails(3, &[]);
    let listed = lab.run(&["--json", "ps", "-a"]).ok().json();
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0]["status"].as_str(), listed[0]["name"].as_str()), (Some("exited"), Some("kept")));
    assert_eq!(listed[0]["ended"][0], 3);
    let upper = Path::new(listed[0]["upper"].as_str().unwrap());
    assert_eq!(std::fs::read(upper.join("kept")).unwrap(), b"kept\n");
    assert!(lab.run(&["ps", "-a"]).ok().out.contains("exited (3)"));
    lab.run(&["run", "--name", "kept", "sys", "--", "sh"]).fails(125, &["exists"]);
    let uppers = lab.run(&["--json", "ps", "--uppers"]).ok().json();
    assert_eq!((uppers.len(), uppers[0]["container"].as_str()), (1, Some("kept")));
    assert!(uppers[0]["bytes"].as_u64().unwrap() > 0);
    lab.run(&["rm", "--upper", uppers[0]["id"].as_str().unwrap()]).fails(3, &[]);
    lab.run(&["rm", "kept"]).ok();
    nothing_left(&lab);

    let here = lab.path("here");
    std::fs::create_dir(&here).unwrap();
    let volume = format!("{}:/here", here.display());
    let script = "echo > /here/ready; sleep 1000";
    let mut command = lab.command(&["run", "--name", "long", "-v", &volume, "sys", "--", "sh", "-c", script]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("it runs", || here.join("ready").exists());
    eventually("it is listed", || {
        let all = lab.run(&["--json", "ps", "-a"]).ok().json();
        all.iter().any(|c| c["kind"] == "mount" && c["use"] == "run") && all.iter().any(|c| c["status"] == "running")
    });
    lab.run(&["rm", "long"]).fails(4, &["running", "--force"]);
    lab.run(&["rm", "--force", "long"]).ok();
    assert_eq!(collect(child).code, 137);
    nothing_left(&lab);
}

#[test]
fn priv_signals_reach_the_command() {
    skip_if!("priv_signals_reach_the_command", needs_runtime());
    let lab = Lab::new();
    lab.system("sys");
    let script = "trap 'echo got it; exit 9' TERM; echo ready > /ready/here; while :; do sleep 0.05; done";
    let ready = lab.path("ready");
    std::fs::create_dir(&ready).unwrap();
    let volume = format!("{}:/ready", ready.display());
    let mut command = lab.command(&["run", "--rm", "-v", &volume, "sys", "--", "sh", "-c", script]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("it is ready", || ready.join("here").exists());
    PidFd::open(child.id() as i32).unwrap().signal(Signal::TERM).unwrap();
    let done = collect(child);
    assert_eq!((done.code, done.out.as_str()), (9, "got it\n"), "{}", done.err);
    nothing_left(&lab);
}

#[test]
fn priv_a_killed_run_leaves_what_can_be_cleaned_up() {
    skip_if!("priv_a_killed_run_leaves_what_can_be_cleaned_up", needs_runtime());
    let lab = Lab::new();
    lab.system("sys");
    let mut command = lab.command(&["run", "--rm", "--name", "orphan", "sys", "--", "sleep", "1000"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("it runs", || lab.leases().iter().any(|l| l["use"] == "run"));
    eventually("the runtime knows it", || {
        std::fs::read_dir(lab.state.join("runtime")).is_ok_and(|d| d.flatten().next().is_some())
    });
    child.kill().unwrap();
    child.wait().unwrap();
    // It goes on, and so does its image: it is the container that is mounted, not its caller.
    let status = || {
        lab.run(&["--json", "ps", "-a"])
            .ok()
            .json()
            .iter()
            .find(|c| c["kind"] == "container")
            .map(|c| c["status"].clone())
    };
    let now = status();
    assert!(now == Some("orphaned".into()) || now == Some("lost".into()), "{now:?}");
    if now == Some("orphaned".into()) {
        assert_eq!(lab.leases().len(), 1);
    }
    lab.run(&["rm", "--force", "orphan"]).ok();
    eventually("its lease ends", || lab.leases().is_empty());
    nothing_left(&lab);
}

#[test]
fn priv_no_file_is_followed_out_of_a_container() {
    skip_if!("priv_no_file_is_followed_out_of_a_container", needs_runtime());
    let lab = Lab::new();
    let tree = lab.system("sys");
    let outside = lab.path("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("resolv.conf"), b"untouched").unwrap();
    // resolv.conf itself leads out: the link is replaced, not followed.
    std::os::unix::fs::symlink(outside.join("resolv.conf"), tree.join("etc/resolv.conf")).unwrap();
    lab.import(&tree, "sys");
    let host = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    if !host.is_empty() {
        assert_eq!(sh(&lab, &["--network", "host"], "cat /etc/resolv.conf").ok().out, host);
    }
    // The working directory leads out.
    std::os::unix::fs::symlink(&outside, tree.join("way")).unwrap();
    std::os::unix::fs::symlink("../../../../../../..", tree.join("up")).unwrap();
    lab.import(&tree, "sys");
    let out = outside.display().to_string();
    sh(&lab, &["-w", "/way/made"], "true").fails(125, &["working directory"]);
    let up = format!("/up{out}/made");
    assert_eq!(sh(&lab, &["-w", &up], "pwd -P").ok().out, format!("{out}/made\n"), "inside of the container");
    // All of /etc leads out.
    std::fs::rename(tree.join("etc"), tree.join("etc2")).unwrap();
    std::os::unix::fs::symlink(&outside, tree.join("etc")).unwrap();
    lab.import(&tree, "sys");
    sh(&lab, &["--network", "host"], "true").fails(125, &["dangling"]);
    // A volume's target as well; the runtime resolves it.
    let volume = format!("{}:/way/mounted", lab.path("tree-sys").display());
    sh(&lab, &["-v", &volume], "true");
    let names: Vec<_> = std::fs::read_dir(&outside).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(names, ["resolv.conf"]);
    assert_eq!(std::fs::read(outside.join("resolv.conf")).unwrap(), b"untouched");
    nothing_left(&lab);
}

#[test]
fn priv_a_terminal_is_passed_through() {
    let script = lazyroot::run::runtime::in_path("script");
    let missing = script.is_none().then(|| "script(1) is not installed".to_owned());
    skip_if!("priv_a_terminal_is_passed_through", needs_runtime().or(missing));
    let lab = Lab::new();
    lab.system("sys");
    let program = lab.command(&[
        "run",
        "--rm",
        "-it",
        "sys",
        "--",
        "sh",
        "-c",
        "test -t 0 && test -t 1 && echo a terminal; exit 5",
    ]);
    let line: Vec<String> = std::iter::once(program.get_program())
        .chain(program.get_args())
        .map(|w| format!("'{}'", w.to_str().unwrap()))
        .collect();
    let mut command = std::process::Command::new("script");
    command.args(["-qec", &line.join(" "), "/dev/null"]).stdin(Stdio::null());
    let done = crate::lab::finish(command);
    assert!(done.out.contains("a terminal"), "{} {}", done.out, done.err);
    assert_eq!(done.code, 5);
    nothing_left(&lab);
}

#[test]
fn priv_the_timeline_tells_the_first_instruction() {
    skip_if!("priv_the_timeline_tells_the_first_instruction", needs_runtime());
    let lab = Lab::new();
    lab.system("sys");
    let done = lab.run(&["run", "--rm", "--json", "--timeline", "sys", "--", "sh", "-c", "sleep 0.2"]).ok();
    let line = done.err.lines().find(|l| l.contains("\"timeline\"")).unwrap_or_else(|| panic!("{}", done.err));
    let value: serde_json::Value = serde_json::from_str(line).unwrap();
    let at = |what: &str| {
        let marks = value["marks"].as_array().unwrap();
        marks.iter().find(|m| m["what"].as_str().unwrap().contains(what)).unwrap_or_else(|| panic!("no {what}"))["seconds"].as_f64().unwrap()
    };
    assert!(at("mounted") < at("first instruction"));
    assert!(at("command ended") - at("first instruction") >= 0.2, "{value}");
    let marks = |value: &serde_json::Value| -> Vec<String> {
        value["marks"].as_array().unwrap().iter().map(|m| m["what"].as_str().unwrap().to_owned()).collect()
    };
    let all = [
        "image and configuration found",
        "runtimes tried, once",
        "runtime found",
        "daemon answers",
        "image mounted",
        "writable overlay on top, configuration written",
        "first instruction of the command",
        "command ended",
        "cleaned up",
    ];
    assert_eq!(marks(&value), all);
    let seconds: Vec<f64> = value["marks"].as_array().unwrap().iter().map(|m| m["seconds"].as_f64().unwrap()).collect();
    assert!(seconds.is_sorted(), "{seconds:?}");
    let again = lab.run(&["run", "--rm", "--json", "--timeline", "sys", "--", "sh", "-c", ":"]).ok();
    let line = again.err.lines().find(|l| l.contains("\"timeline\"")).unwrap();
    let again = marks(&serde_json::from_str(line).unwrap());
    assert_eq!(again, all.into_iter().filter(|m| *m != all[1]).collect::<Vec<_>>(), "tried once only");
    let loaded = &value["loaded"];
    assert!(loaded["files_read"].as_u64().unwrap() > 0 && loaded["files_read"].as_u64() <= loaded["files"].as_u64());
}
