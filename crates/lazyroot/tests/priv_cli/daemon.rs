//! The daemon's life: started on demand, gone when idle, asked to end, killed.

use crate::lab::{Lab, eventually, finish, needs_mounts, skip_if};
use lazyroot::control::proto::{Reply, Request};
use lazyroot::control::wire;
use rustix::process::Signal;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use sys::proc::PidFd;

fn kill(pid: i32, signal: Signal) -> PidFd {
    let process = PidFd::open(pid).unwrap();
    process.signal(signal).unwrap();
    process
}

#[test]
fn priv_killed_it_is_missed_explained_and_replaced() {
    skip_if!("priv_killed_it_is_missed_explained_and_replaced", needs_mounts());
    let lab = Lab::new();
    let tree = lab.image("a");
    let (idle, used, fuse) = (lab.point("idle"), lab.point("used"), lab.point("fuse"));
    lab.run(&["mount", "a", &idle]).ok();
    lab.run(&["mount", "a", &used]).ok();
    lab.run(&["mount", "a", &fuse, "--as", "tree"]).ok();
    std::fs::read(Path::new(&used).join("small")).unwrap();
    let mut user = Command::new("sleep").arg("1000").current_dir(Path::new(&used).join("dir")).spawn().unwrap();
    let mut open = std::fs::File::open(Path::new(&fuse).join("dir/big")).unwrap();
    let pid = lab.daemon_pid();
    assert!(kill(pid, Signal::KILL).wait(Some(std::time::Duration::from_secs(30))).unwrap());

    // What was read stays, what was not fails: never zeros, never a hang.
    assert_eq!(std::fs::read(Path::new(&used).join("small")).unwrap(), b"small\n");
    let error = std::fs::read(Path::new(&used).join("dir/big")).unwrap_err();
    let expected = [rustix::io::Errno::IO, rustix::io::Errno::NOTCONN].map(|e| Some(e.raw_os_error()));
    assert!(expected.contains(&error.raw_os_error()), "{error}");
    let error = open.read(&mut [0u8; 4096]).unwrap_err();
    assert!(expected.contains(&error.raw_os_error()), "{error}");
    drop(open);

    let told = lab.run(&["ps"]).ok();
    for word in [&format!("process {pid}"), "killed", "3 mounts were lost", &idle, &used, &fuse, "sleep", "--lazy"] {
        assert!(told.err.contains(word), "no {word:?} in {}", told.err);
    }
    assert_eq!(lab.mounted(), [Path::new(&used)], "what nobody uses is gone");
    assert!(!lab.run(&["ps"]).ok().err.contains("killed"), "said once");

    lab.run(&["mount", "a", &idle]).ok();
    assert_eq!(std::fs::read(Path::new(&idle).join("dir/big")).unwrap(), std::fs::read(tree.join("dir/big")).unwrap());
    lab.run(&["umount", &used]).fails(4, &["in use"]);
    lab.run(&["umount", &used, "--lazy"]).ok();
    user.kill().unwrap();
    user.wait().unwrap();
    lab.run(&["umount", &idle]).ok();
    lab.no_leases();
}

#[test]
fn priv_a_mount_that_was_busy_when_its_daemon_died_is_not_forgotten() {
    skip_if!("priv_a_mount_that_was_busy_when_its_daemon_died_is_not_forgotten", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let (one, two, moved) = (lab.point("one"), lab.point("two"), lab.point("moved"));
    lab.run(&["mount", "a", &one]).ok();
    lab.run(&["mount", "a", &two, "--as", "tree"]).ok();
    lab.run(&["mount", "a", &moved]).ok();
    let elsewhere = lab.point("elsewhere");
    sys::mount::bind(Path::new(&moved), Path::new(&elsewhere), false).unwrap();
    sys::mount::unmount(Path::new(&moved), sys::mount::UnmountFlags::empty()).unwrap();
    let mut users = [&one, &two].map(|dir| Command::new("sleep").arg("1000").current_dir(dir).spawn().unwrap());
    let pid = lab.daemon_pid();
    kill(pid, Signal::KILL).wait(None).unwrap();
    let shown = |words: &[&str]| {
        let lost: Vec<_> = lab.leases().into_iter().filter(|l| l["kind"] == "lost").collect();
        let targets: Vec<_> = lost.iter().map(|l| l["target"].as_str().unwrap().to_owned()).collect();
        assert_eq!(targets, words);
        assert!(lost.iter().all(|l| l["daemon"].as_i64() == Some(pid.into())));
    };
    let told = lab.run(&["--json", "ps"]).ok();
    assert!(told.err.contains("\"busy\""), "{}", told.err);
    shown(&[&one, &two, &moved]);
    let listed = lab.run(&["ps"]).ok();
    assert!(!listed.err.contains("killed"), "said once: {}", listed.err);
    for word in [&one, "lost", "--lazy"] {
        assert!(listed.out.contains(word), "no {word} in {}", listed.out);
    }
    let doctor = lab.run(&["doctor"]).out;
    assert!(doctor.contains("3 mounts have lost their daemon") && doctor.contains(&two), "{doctor}");
    // A new daemon changes nothing about them, and they nothing about it.
    let fresh = lab.point("fresh");
    lab.run(&["mount", "a", &fresh]).ok();
    shown(&[&one, &two, &moved]);
    lab.run(&["umount", &fresh]).ok();

    // The user is gone: the next command takes it away, and says so.
    users[0].kill().unwrap();
    users[0].wait().unwrap();
    let told = lab.run(&["ps"]).ok().err;
    assert!(told.contains(&one) && told.contains("unmounted, nobody uses it any more"), "{told}");
    shown(&[&two, &moved]);
    // Or somebody takes it away.
    lab.run(&["umount", &two]).fails(4, &["in use", "sleep"]);
    lab.run(&["umount", &two, "--lazy"]).ok();
    shown(&[&moved]);
    lab.run(&["umount", &elsewhere]).ok();
    shown(&[]);
    assert!(!lab.state.join("lost.json").exists());
    assert!(lab.mounted().is_empty());
    users[1].kill().unwrap();
    users[1].wait().unwrap();
}

#[test]
fn priv_a_daemon_of_another_root_is_left_alone() {
    skip_if!("priv_a_daemon_of_another_root_is_left_alone", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let point = lab.point("m");
    lab.run(&["mount", "a", &point]).ok();
    let other = lab.path("other-root");
    let with_other = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lazyroot"));
        command.arg("--root").arg(&other).arg("--state").arg(&lab.state).args(args);
        finish(command)
    };
    let (served, wanted) = (lab.root.to_str().unwrap(), other.to_str().unwrap());
    for args in [&["ps"][..], &["stats"], &["daemon", "stop", "--force"], &["umount", &point]] {
        with_other(args).fails(4, &[served, wanted, "--state", &lab.daemon_pid().to_string()]);
        assert_eq!(lab.mounted(), [Path::new(&point)], "{args:?}: it did it all the same");
    }
    assert_eq!(lab.leases().len(), 1);
}

#[test]
fn priv_a_daemon_that_cannot_be_talked_to_does_not_keep_its_mounts() {
    skip_if!("priv_a_daemon_that_cannot_be_talked_to_does_not_keep_its_mounts", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let point = lab.point("m");
    lab.run(&["mount", "a", &point]).ok();
    // In the place of its socket somebody who speaks another version.
    let (socket, aside) = (lab.state.join("control.sock"), lab.state.join("aside"));
    std::fs::rename(&socket, &aside).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let other = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        wire::recv::<Request>(&stream).unwrap();
        wire::send(&stream, &Reply::Hello { version: 99, pid: 1, root: None }, &[]).unwrap();
    });
    let done = lab.run(&["umount", &point]).ok();
    assert!(done.err.contains("protocol 99"), "{}", done.err);
    assert!(lab.mounted().is_empty());
    other.join().unwrap();
    std::fs::rename(&aside, &socket).unwrap();
    lab.no_leases();
}

#[test]
fn priv_killed_with_nothing_mounted_it_is_just_replaced() {
    skip_if!("priv_killed_with_nothing_mounted_it_is_just_replaced", needs_mounts());
    // On a root that has never been used.
    let lab = Lab::new();
    lab.run(&["daemon", "start"]).ok();
    let pid = lab.daemon_pid();
    kill(pid, Signal::KILL).wait(None).unwrap();
    let done = lab.run(&["daemon", "start"]).ok();
    assert!(done.err.contains("nothing was mounted"), "{}", done.err);
    assert_ne!(lab.daemon_pid(), pid);
}

#[test]
fn priv_asked_to_end_it_serves_until_the_last_mount_is_gone() {
    skip_if!("priv_asked_to_end_it_serves_until_the_last_mount_is_gone", needs_mounts());
    let lab = Lab::new();
    let tree = lab.image("a");
    let point = lab.point("m");
    lab.run(&["mount", "a", &point]).ok();
    let mut user = Command::new("sleep").arg("1000").current_dir(&point).spawn().unwrap();
    let process = kill(lab.daemon_pid(), Signal::TERM);
    eventually("the log names the user", || {
        let log = lab.run(&["logs"]).ok().out;
        log.contains("1 mounts are in use") && log.contains(&format!("{} (sleep, cwd)", user.id()))
    });
    let log = lab.run(&["logs"]).ok().out;
    let named = log.lines().find(|l| l.contains("is used by")).unwrap();
    assert!(!named.contains(&format!("{} (", lab.daemon_pid())), "it names itself: {named}");
    assert_eq!(std::fs::read(Path::new(&point).join("dir/big")).unwrap(), std::fs::read(tree.join("dir/big")).unwrap());
    lab.run(&["daemon", "stop"]).fails(4, &[&point, "--force"]);
    user.kill().unwrap();
    user.wait().unwrap();
    assert!(!process.has_ended().unwrap());
    lab.run(&["umount", &point]).ok();
    assert!(process.wait(Some(std::time::Duration::from_secs(30))).unwrap());
    assert!(!lab.daemon_lives());
    assert!(!lab.state.join("leases.json").exists(), "a clean end leaves no record");
}

#[test]
fn priv_stop_force_unmounts_everything() {
    skip_if!("priv_stop_force_unmounts_everything", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let (one, two, rw) = (lab.point("one"), lab.point("two"), lab.point("rw"));
    lab.run(&["mount", "a", &one]).ok();
    lab.run(&["mount", "a", &two, "--as", "tree"]).ok();
    lab.run(&["mount", "a", &rw, "--rw"]).ok();
    let mut user = Command::new("sleep").arg("1000").current_dir(&one).spawn().unwrap();
    lab.run(&["daemon", "stop", "--force"]).ok();
    assert!(lab.mounted().is_empty(), "{:?}", lab.mounted());
    assert!(!lab.daemon_lives());
    assert!(!lab.run(&["ps"]).ok().err.contains("killed"));
    user.kill().unwrap();
    user.wait().unwrap();
}

#[test]
fn priv_idle_it_ends_by_itself_but_not_under_a_mount() {
    skip_if!("priv_idle_it_ends_by_itself_but_not_under_a_mount", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let point = lab.point("m");
    lab.run(&["daemon", "start", "--idle", "1"]).ok();
    lab.run(&["mount", "a", &point]).ok();
    let process = PidFd::open(lab.daemon_pid()).unwrap();
    assert!(!process.wait(Some(std::time::Duration::from_millis(2500))).unwrap(), "it is in use");
    lab.run(&["umount", &point]).ok();
    assert!(process.wait(Some(std::time::Duration::from_secs(30))).unwrap());
    assert!(lab.run(&["logs"]).ok().out.contains("idle for 1 s"));
}

#[test]
fn priv_a_mount_that_no_namespace_shows_keeps_it() {
    skip_if!("priv_a_mount_that_no_namespace_shows_keeps_it", needs_mounts());
    let lab = Lab::new();
    let tree = lab.image("a");
    let point = lab.point("m");
    for shape in ["erofs", "tree"] {
        lab.run(&["daemon", "start", "--idle", "1"]).ok();
        lab.run(&["mount", "a", &point, "--as", shape]).ok();
        let process = PidFd::open(lab.daemon_pid()).unwrap();
        let open = std::fs::File::open(Path::new(&point).join("dir/big")).unwrap();
        lab.run(&["umount", &point, "--lazy"]).ok();
        assert!(!process.wait(Some(std::time::Duration::from_millis(2500))).unwrap(), "{shape}: a file is open");
        let mut content = Vec::new();
        (&open).read_to_end(&mut content).unwrap();
        assert_eq!(content, std::fs::read(tree.join("dir/big")).unwrap(), "{shape}");
        drop(open);
        assert!(process.wait(Some(std::time::Duration::from_secs(30))).unwrap(), "{shape}: nothing keeps it");
    }
}

#[test]
fn priv_it_keeps_to_itself() {
    skip_if!("priv_it_keeps_to_itself", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    lab.run(&["daemon", "start"]).ok();
    let pid = lab.daemon_pid();
    let mode = |p: &Path| std::fs::symlink_metadata(p).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&lab.root), mode(&lab.state), mode(&lab.state.join("control.sock"))), (0o700, 0o700, 0o600));
    assert_eq!(std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), Path::new("/"));
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session: i32 = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(3).unwrap().parse().unwrap();
    assert_eq!(session, pid, "a session of its own");
    assert_ne!(
        std::fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap(),
        std::fs::read_link("/proc/self/ns/mnt").unwrap()
    );
    let point = lab.point("m");
    lab.run(&["mount", "a", &point]).ok();
    let mut daemons = sys::mountinfo::of(pid).unwrap().into_iter();
    assert!(daemons.any(|e| e.fstype == "erofs" && e.mount_point.starts_with(lab.state.join("ns"))));
    // A second one for the same root, with another state directory, is refused.
    let mut command = Command::new(env!("CARGO_BIN_EXE_lazyroot"));
    command.arg("--root").arg(&lab.root).arg("--state").arg(lab.path("state2")).args(["daemon", "start"]);
    finish(command).fails(4, &["another daemon", &pid.to_string()]);
}

#[test]
fn priv_odd_clients_do_no_harm() {
    skip_if!("priv_odd_clients_do_no_harm", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    lab.run(&["daemon", "start"]).ok();
    let connect = || UnixStream::connect(lab.state.join("control.sock")).unwrap();
    // Another version: told which one is spoken, then the door is closed.
    let stream = connect();
    wire::send(&stream, &Request::Hello { version: 99 }, &[]).unwrap();
    let (reply, _): (Reply, _) = wire::recv(&stream).unwrap();
    assert!(matches!(reply, Reply::Hello { version: 1, .. }));
    assert!(wire::recv::<Reply>(&stream).is_err());
    // No hello.
    let stream = connect();
    wire::send(&stream, &Request::Status, &[]).unwrap();
    assert!(wire::recv::<Reply>(&stream).unwrap().0.ok().is_err());
    // A request that does not exist, and one with a bad digest, are answered; the connection goes on.
    let stream = connect();
    wire::send(&stream, &Request::Hello { version: 1 }, &[]).unwrap();
    wire::recv::<Reply>(&stream).unwrap();
    wire::send(&stream, &serde_json::json!({"type": "fly"}), &[]).unwrap();
    assert!(wire::recv::<Reply>(&stream).unwrap().0.ok().is_err());
    wire::send(&stream, &Request::DropCaches { index: Some("zz".into()) }, &[]).unwrap();
    assert!(wire::recv::<Reply>(&stream).unwrap().0.ok().is_err());
    wire::send(&stream, &Request::Status, &[]).unwrap();
    assert!(matches!(wire::recv::<Reply>(&stream).unwrap().0, Reply::Status(_)));
    // Rubbish.
    std::io::Write::write_all(&mut &connect(), &[0xff; 64]).unwrap();
    // A client that asks for a mount and goes away leaves nothing.
    let index = lab.run(&["--json", "images"]).ok().json()[0]["index"].as_str().unwrap().to_owned();
    let request = lazyroot::control::proto::MountRequest {
        index,
        image: "a".into(),
        shape: None,
        r#use: lazyroot::control::proto::Use::Mount,
        target: "/nowhere".into(),
        suid: false,
        dev: false,
    };
    wire::send(&stream, &Request::Mount(request), &[]).unwrap();
    let (reply, fds): (Reply, _) = wire::recv(&stream).unwrap();
    assert!(matches!(reply, Reply::Mounted { .. }));
    assert_eq!(fds.len(), 1);
    drop((stream, fds));
    eventually("the pending lease ends", || lab.run(&["logs"]).ok().out.contains("went away before attaching"));
    lab.no_leases();
}

#[test]
fn priv_it_runs_in_the_foreground_for_systemd() {
    skip_if!("priv_it_runs_in_the_foreground_for_systemd", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let manager = lab.path("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&manager).unwrap();
    socket.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
    let said = || {
        let mut buf = [0u8; 64];
        let n = socket.recv(&mut buf).unwrap();
        String::from_utf8_lossy(&buf[..n]).into_owned()
    };
    let mut command = lab.command(&["daemon", "run", "--idle", "0"]);
    command.env("NOTIFY_SOCKET", &manager);
    let child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    assert_eq!(said(), "READY=1");
    assert_eq!(lab.daemon_pid(), child.id() as i32);
    lab.run(&["daemon", "run"]).fails(4, &["runs already"]);
    kill(child.id() as i32, Signal::TERM);
    assert_eq!(said(), "STOPPING=1");
    let done = crate::lab::collect(child).ok();
    assert!(done.err.contains("ended"), "{}", done.err);
}

#[test]
fn priv_caches_are_dropped_and_filled_again() {
    skip_if!("priv_caches_are_dropped_and_filled_again", needs_mounts());
    let lab = Lab::new();
    let tree = lab.image("a");
    let point = lab.point("m");
    let big = || std::fs::read(Path::new(&point).join("dir/big")).unwrap();
    let want = std::fs::read(tree.join("dir/big")).unwrap();
    lab.run(&["mount", "a", &point]).ok();
    assert_eq!(big(), want);
    let resident = || lab.run(&["--json", "stats"]).ok().json()[0]["images"][0]["resident_bytes"].as_u64().unwrap();
    assert!(resident() > 6 << 20);
    lab.run(&["umount", &point]).ok();
    lab.run(&["daemon", "drop-caches", "a"]).ok();
    lab.run(&["mount", "a", &point, "--as", "tree"]).ok();
    assert!(
        lab.run(&["--json", "stats"]).ok().json()[0]["images"]
            .as_array()
            .unwrap()
            .iter()
            .all(|i| i["resident_bytes"] == 0)
    );
    assert_eq!(big(), want);
    // All images' also means one that is mounted and has lost its name.
    assert!(resident() > 6 << 20);
    lab.run(&["rm", "a"]).ok();
    lab.run(&["daemon", "drop-caches"]).ok();
    assert_eq!(resident(), 0);
    std::fs::File::open(Path::new(&point).join("dir/big")).unwrap().read_exact(&mut [0; 4096]).unwrap();
}
