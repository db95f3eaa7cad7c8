//! `run`, `ps`, and `rm` of containers.

use super::Context;
use super::args::{Network, Run, UpperKind};
use super::mount::{ask, random_hex, restrict};
use super::output::moment;
use crate::control::client::Client;
use crate::control::proto::{MountRequest, Reply, Request, Use};
use crate::daemon::lost::{self, Lost};
use crate::failure::Failure;
use crate::mounts;
use crate::paths::{Last, walk};
use crate::reader::{self, ImageReader};
use crate::run::image_config::{ImageConfig, merge_env};
use crate::run::inroot::Root;
use crate::run::record::{self, Record, Status};
use crate::run::runtime::{self, Found, Way};
use crate::run::spec::{self, Decided};
use crate::run::timeline::{Loaded, Timeline};
use crate::run::volume::{Volume, clean_absolute};
use crate::run::{exec, seccomp, user};
use anyhow::Context as _;
use image::index::InodeKind;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use store::{ImageRecord, Store};

/// The longest user and group file that is read from an image.
const MAX_USER_FILE: u64 = 4 << 20;
/// How long a container that was told to die may take.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// `run`: a failure before the container starts has status 125, as docker has it.
pub fn run(context: &Context, args: Run) -> anyhow::Result<()> {
    let mut timeline = Timeline::begin();
    match run_container(context, &args, &mut timeline) {
        Ok(0) => Ok(()),
        Ok(code) => Err(Failure::status(code, "").into()),
        Err(e) => match crate::errors::kind_of(&e) {
            // Already a status.
            crate::failure::Kind::Status(_) => Err(e),
            _ => Err(Failure::status(125, crate::errors::message(&e)).into()),
        },
    }
}

/// Everything that is decided before anything is made.
struct Plan {
    image: String,
    record: ImageRecord,
    id: String,
    name: String,
    way: Way,
    runtime: PathBuf,
    decided: Decided,
}

fn run_container(context: &Context, args: &Run, timeline: &mut Timeline) -> anyhow::Result<u8> {
    // Before any thread exists, so that all of them leave signals to us.
    let signals = exec::take_signals()?;
    if !mounts::may_mount() {
        return Err(Failure::unavailable(
            "running containers needs root (CAP_SYS_ADMIN); `lazyroot mount` works for ordinary users",
        )
        .into());
    }
    let store = context.store()?;
    let mut plan = plan(context, args, &store, timeline)?;
    timeline.mark("runtime found", plan.way.to_string());
    let mut client = context.daemon()?;
    timeline.mark("daemon answers", format!("process {}", client.pid));
    let before = if args.timeline { counters(&mut client, &plan.record).ok() } else { None };

    let (dir, bundle) = record::make_dirs(&context.dirs, &plan.id)?;
    let me = std::process::id() as i32;
    let mut container = Record {
        version: record::VERSION,
        id: plan.id.clone(),
        name: plan.name.clone(),
        image: plan.image.clone(),
        index: plan.record.index.to_hex(),
        command: plan.decided.args.clone(),
        created: now(),
        way: plan.way,
        runtime: plan.runtime.clone(),
        state: context.dirs.state.clone(),
        rm: args.rm,
        runner: (me, record::start_time(me).unwrap_or(0)),
        ended: None,
    };
    container.write(&context.dirs)?;
    let result = start(context, args, &mut plan, &mut client, (&dir, &bundle), &signals, timeline);
    if let Ok(code) = result {
        container.ended = Some((code, now()));
    }
    let loaded = before.and_then(|before| loaded(&mut client, &plan.record, before).ok());
    let cleaned = clean_up(context, &container, &bundle, args.rm, result.is_err());
    let _ = client.ask(&Request::Rescan);
    timeline.mark(
        "cleaned up",
        if args.rm { "removed" } else { "kept; `lazyroot ps -a` shows it, `lazyroot rm` removes it" },
    );
    if args.timeline {
        if context.out.json {
            eprintln!("{}", timeline.json(loaded.as_ref()));
        } else {
            eprint!("{}", timeline.text(loaded.as_ref()));
        }
    }
    let code = result?;
    cleaned?;
    Ok(code)
}

/// Takes the container's root away, and with `--rm`, or when it never ran, all of it.
fn clean_up(context: &Context, container: &Record, bundle: &Path, rm: bool, failed: bool) -> anyhow::Result<()> {
    for point in mounts_below(bundle) {
        if let Err(e) = sys::mount::unmount(&point, sys::mount::UnmountFlags::DETACH) {
            context.out.note(format!("lazyroot: unmounting {}: {e}", point.display()));
        }
    }
    if rm || failed {
        return container.remove(&context.dirs);
    }
    container.delete_in_runtime();
    container.write(&context.dirs)?;
    mounts::remove_tree(bundle).with_context(|| format!("removing {}", bundle.display()))
}

fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    crate::procscan::mounted_below(dir).unwrap_or_default()
}

/// Decides what the container is.
fn plan(context: &Context, args: &Run, store: &Store, timeline: &mut Timeline) -> anyhow::Result<Plan> {
    let (image_name, record) = reader::find(store, &args.name)?;
    let image = image_name.to_string();
    let config = ImageConfig::from_json(&record.config);
    let command = config.command(args.entrypoint.as_deref(), &args.command);
    if command.is_empty() {
        return Err(Failure::usage(format!(
            "{image} names no command; say one: `lazyroot run {} -- COMMAND`",
            args.name
        ))
        .into());
    }
    if args.tty && !std::io::stdin().is_terminal() {
        return Err(Failure::usage("-t needs a terminal on standard input; leave it out").into());
    }
    let mut reader = ImageReader::open_index(store, &image, &record.index)?;
    let spec_user = args.user.as_deref().unwrap_or(&config.user);
    let passwd = image_file(&mut reader, "/etc/passwd")?;
    let group = image_file(&mut reader, "/etc/group")?;
    let who = user::resolve(spec_user, &passwd, &group).map_err(|e| Failure::usage(format!("{image}: {e}")))?;
    let cwd = match args.workdir.as_deref().unwrap_or(&config.workdir) {
        "" => "/".to_owned(),
        dir => clean_absolute(Path::new(dir))
            .and_then(|p| p.to_str().map(str::to_owned))
            .ok_or_else(|| Failure::usage(format!("working directory {dir:?} must be absolute and without .. (-w)")))?,
    };
    let id = random_hex(6)?;
    let name = match &args.container {
        Some(name) => checked_name(context, name)?,
        None => id.clone(),
    };
    let hostname = args.hostname.clone().unwrap_or_else(|| id.clone());
    let mut base =
        vec![format!("PATH={}", spec::DEFAULT_PATH), format!("HOSTNAME={hostname}"), format!("HOME={}", who.home)];
    if args.tty {
        base.push("TERM=xterm".to_owned());
    }
    base.extend(config.env.iter().cloned());
    let env = merge_env(&base, &args.env, |key| std::env::var(key).ok()).map_err(Failure::usage)?;
    let volumes = args.volume.iter().map(resolve_volume).collect::<anyhow::Result<Vec<_>>>()?;
    check_command(&reader, &command, &env, &cwd, &volumes)?;
    let mut capabilities: Vec<String> = spec::DEFAULT_CAPABILITIES.map(str::to_owned).to_vec();
    for name in &args.cap_add {
        let known = spec::capability(name)
            .ok_or_else(|| Failure::usage(format!("--cap-add {name}: unknown capability; see capabilities(7)")))?;
        capabilities.push(known);
    }
    capabilities.sort();
    capabilities.dedup();
    timeline.mark("image and configuration found", "");
    let found = Found::look(&context.dirs.state)?;
    if found.fresh {
        timeline.mark("runtimes tried, once", "");
    }
    let (way, path, why) = found.choose(args.runtime)?;
    // Said once; `doctor` says it any time.
    if let Some(why) = why.filter(|_| found.fresh) {
        context.out.note(why);
    }
    let mut annotations = spec::annotations(&config.labels);
    annotations.insert("org.lazyroot.image".to_owned(), image.clone());
    annotations.insert("org.lazyroot.index".to_owned(), record.index.to_hex());
    let rootfs = context.dirs.bundles().join(&id).join("rootfs");
    let decided = Decided {
        hostname,
        rootfs: rootfs.display().to_string(),
        args: command,
        env,
        cwd,
        user: who,
        terminal: args.tty,
        host_network: args.network == Network::Host,
        volumes,
        seccomp: seccomp::profile(std::env::consts::ARCH, &capabilities),
        capabilities,
        annotations,
        cgroups: way.cgroups_of(&id),
    };
    Ok(Plan { image, record, id, name, way, runtime: path, decided })
}

/// A small file of the image, empty when there is none.
fn image_file(reader: &mut ImageReader, path: &str) -> anyhow::Result<Vec<u8>> {
    match walk(reader.index(), path.as_bytes(), Last::Follow)? {
        Some(ino) if matches!(reader.index().inode(ino)?.kind, InodeKind::File { .. }) => {
            let name = reader.name().to_owned();
            reader.read_small(ino, MAX_USER_FILE).with_context(|| format!("{name}: {path}"))
        }
        _ => Ok(Vec::new()),
    }
}

fn checked_name(context: &Context, name: &str) -> anyhow::Result<String> {
    let good = !name.is_empty()
        && name.len() <= 64
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        && name.as_bytes()[0].is_ascii_alphanumeric();
    if !good {
        return Err(Failure::usage(format!(
            "container name {name:?}: use up to 64 letters, digits, '.', '_' and '-', with a letter or digit first"
        ))
        .into());
    }
    if record::all(&context.dirs)?.iter().any(|r| r.name == name || r.id == name) {
        return Err(Failure::busy(format!(
            "a container named {name} exists; `lazyroot rm --container {name}` removes it"
        ))
        .into());
    }
    Ok(name.to_owned())
}

/// A volume with its source made absolute. Symlinks of the host are the user's own and followed.
fn resolve_volume(volume: &Volume) -> anyhow::Result<Volume> {
    let source = volume.source.canonicalize().map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => anyhow::Error::new(Failure::not_found(format!(
            "-v {}: there is no such file or directory; create it first",
            volume.source.display()
        ))),
        _ => anyhow::Error::new(e).context(format!("-v {}", volume.source.display())),
    })?;
    Ok(Volume { source, ..volume.clone() })
}

/// Says at once when the image does not hold the command; with volumes, which may hold it, the runtime says so.
fn check_command(
    reader: &ImageReader,
    command: &[String],
    env: &[String],
    cwd: &str,
    volumes: &[Volume],
) -> anyhow::Result<()> {
    if !volumes.is_empty() {
        return Ok(());
    }
    let program = command[0].as_str();
    let index = reader.index();
    let candidates: Vec<String> = if program.starts_with('/') {
        vec![program.to_owned()]
    } else if program.contains('/') {
        vec![format!("{cwd}/{program}")]
    } else {
        let path = env.iter().find_map(|e| e.strip_prefix("PATH=")).unwrap_or(spec::DEFAULT_PATH);
        path.split(':').filter(|d| !d.is_empty()).map(|d| format!("{d}/{program}")).collect()
    };
    let mut denied = None;
    for candidate in &candidates {
        // Something odd on the way (a loop of links): not there.
        let Ok(Some(ino)) = walk(index, candidate.as_bytes(), Last::Follow) else { continue };
        let inode = index.inode(ino)?;
        match inode.kind {
            InodeKind::File { .. } if inode.permissions() & 0o111 != 0 => return Ok(()),
            _ => denied = Some(candidate),
        }
    }
    Err(match denied {
        Some(path) => Failure::status(126, format!("{}: {path} cannot be run: not an executable file", reader.name())),
        None => Failure::status(127, format!("{}: no command {program:?} in the image", reader.name())),
    }
    .into())
}

/// Mounts, configures, starts and looks after the container. Returns its status.
fn start(
    context: &Context,
    args: &Run,
    plan: &mut Plan,
    client: &mut Client,
    (dir, bundle): (&Path, &Path),
    signals: &sys::signal::SignalFd,
    timeline: &mut Timeline,
) -> anyhow::Result<u8> {
    let rootfs = bundle.join("rootfs");
    std::fs::create_dir(&rootfs).with_context(|| rootfs.display().to_string())?;
    // From here on every mount is this process's and its container's alone, and goes with them.
    sys::mount::enter_own_namespace().context("a mount namespace for the container")?;
    let request = MountRequest {
        index: plan.record.index.to_hex(),
        image: plan.image.clone(),
        shape: args.shape,
        r#use: Use::Run,
        target: rootfs.display().to_string(),
        suid: false,
        dev: false,
    };
    let handed = ask(client, request)?;
    let shared = if handed.shared { ", was mounted already" } else { "" };
    timeline.mark("image mounted", format!("{}{shared}", handed.shape));
    let base = match args.upper {
        UpperKind::Disk => dir.to_owned(),
        UpperKind::Memory => {
            let base = bundle.join("memory");
            std::fs::create_dir(&base)?;
            let flags = sys::mount::MountFlags::NODEV | sys::mount::MountFlags::NOSUID;
            sys::mount::mount_legacy(Path::new("lazyroot"), &base, "tmpfs", flags, "mode=700")
                .context("a tmpfs for changes")?;
            base
        }
    };
    let index = ImageReader::open_index(&context.store()?, &plan.image, &plan.record.index)?.index().clone();
    let (upper, work) = mounts::upper_dirs(&base, &index)?;
    let overlay = mounts::overlay(handed.mount, &upper, &work, &rootfs, &plan.id)?;
    // Not all ways to run have a device cgroup: a device node of an image must not open a disk of the host. What a
    // container needs is in a `/dev` that the runtime makes.
    restrict(&overlay.mount, false, false)?;
    sys::mount::attach(overlay.mount.as_fd(), sys::mount::open_target(&rootfs)?.as_fd())
        .context("attaching the container's root")?;
    client.ask(&Request::Attached {
        lease: handed.lease,
        target: rootfs.display().to_string(),
        top: Some(overlay.top),
        upper: Some(upper.display().to_string()),
        container: Some(plan.id.clone()),
    })?;
    drop(overlay.mount);
    let root = Root::open(&rootfs)?;
    root.make_dir(Path::new(&plan.decided.cwd)).context("the working directory")?;
    if plan.decided.host_network {
        for name in ["/etc/resolv.conf", "/etc/hosts"] {
            // A host without one has nothing to pass on.
            if let Ok(content) = std::fs::read(name) {
                root.replace(Path::new(name), &content)?;
            }
        }
    }
    drop(root);
    std::fs::write(bundle.join("config.json"), spec::config(&plan.decided).to_string())
        .map_err(|e| store::StoreError::io("write", bundle.join("config.json"), e))?;
    timeline.mark("writable overlay on top, configuration written", "");

    let log = bundle.join("runtime.log");
    let mut command = runtime::command(&plan.runtime, plan.way, &context.dirs.state, Some(&log));
    command.args(["run", "--bundle"]).arg(bundle).arg(&plan.id);
    if !args.interactive && !args.tty {
        command.stdin(Stdio::null());
    }
    let mut child = command.spawn().with_context(|| format!("starting {}", plan.runtime.display()))?;
    let mut first = None;
    let status = {
        let mut tell = || first = Some(timeline.elapsed());
        exec::supervise(&mut child, signals, args.timeline.then_some(&mut tell))?
    };
    let code = exec::code_of(status);
    if code != 0
        && let Some(failure) = exec::failure_in_log(&log)
    {
        // People have read it already: the runtime writes it to standard error itself.
        return Err(if context.out.json { failure } else { Failure::status(failure.kind().code(), "") }.into());
    }
    if let Some(first) = first {
        timeline.mark_at("first instruction of the command", first, plan.way.name.to_string());
    }
    timeline.mark("command ended", format!("status {code}"));
    Ok(code)
}

/// What the daemon has counted: bytes unpacked, and what was read of an image.
fn counters(client: &mut Client, record: &ImageRecord) -> anyhow::Result<Loaded> {
    let reply = client.ask(&Request::Stats)?;
    let Reply::Stats { stats } = reply else { anyhow::bail!("the daemon answered with something else") };
    let index = record.index.to_hex();
    let none = Vec::new();
    let images = stats["images"].as_array().unwrap_or(&none);
    let of = |key: &str| -> u64 {
        images.iter().filter(|i| i["index"] == *index).filter_map(|i| i[key].as_u64()).max().unwrap_or(0)
    };
    Ok(Loaded {
        files: record.files,
        bytes: record.content_bytes,
        files_read: of("files_read"),
        bytes_read: of("bytes_read"),
        bytes_filled: stats["cache"]["filled_bytes"].as_u64().unwrap_or(0),
    })
}

/// What was loaded since `before`.
fn loaded(client: &mut Client, record: &ImageRecord, before: Loaded) -> anyhow::Result<Loaded> {
    let now = counters(client, record)?;
    Ok(Loaded { bytes_filled: now.bytes_filled.saturating_sub(before.bytes_filled), ..now })
}

/// `ps`
pub fn ps(context: &Context, all: bool) -> anyhow::Result<()> {
    let leases = match context.running_daemon()? {
        Some(mut client) => match client.ask(&Request::Leases)? {
            Reply::Leases { leases } => leases,
            _ => anyhow::bail!("the daemon answered with something else"),
        },
        None => Vec::new(),
    };
    let mut rows = Vec::new();
    for lease in &leases {
        if context.out.json {
            let mut value = serde_json::to_value(lease)?;
            value["kind"] = json!("mount");
            context.out.object(&value)?;
            continue;
        }
        rows.push(vec![
            lease.image.clone(),
            lease.shape.to_string(),
            lease.r#use.to_string(),
            moment(lease.since),
            lease.pid.to_string(),
            lease.container.clone().map_or_else(|| lease.target.clone(), |c| format!("container {c}")),
        ]);
    }
    for Lost { daemon, lease } in lost::all(&context.dirs) {
        if context.out.json {
            let mut value = serde_json::to_value(&lease)?;
            value["kind"] = json!("lost");
            value["daemon"] = json!(daemon);
            context.out.object(&value)?;
            continue;
        }
        let way_out = match &lease.container {
            Some(id) => format!("container {id}; `lazyroot rm --force --container {id}` ends it"),
            None => format!("{}; `lazyroot umount --lazy` detaches it", lease.target),
        };
        rows.push(vec![
            lease.image.clone(),
            lease.shape.to_string(),
            "lost".to_owned(),
            moment(lease.since),
            lease.pid.to_string(),
            format!("{way_out}, its daemon was killed"),
        ]);
    }
    if !context.out.json {
        if rows.is_empty() && !all {
            context.out.note("nothing is mounted");
        } else if !rows.is_empty() {
            context.out.table(&["IMAGE", "SHAPE", "USE", "SINCE", "PID", "WHERE"], &rows)?;
        }
    }
    if all {
        containers(context)?;
    }
    Ok(())
}

fn containers(context: &Context) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for container in record::all(&context.dirs)? {
        let status = container.status();
        if context.out.json {
            let mut value: Value = serde_json::to_value(&container)?;
            value["kind"] = json!("container");
            value["status"] = json!(match status {
                Status::Running => "running",
                Status::Orphaned => "orphaned",
                Status::Exited(_) => "exited",
                Status::Lost => "lost",
            });
            value["upper"] = json!(container.dir(&context.dirs).join("upper"));
            context.out.object(&value)?;
            continue;
        }
        rows.push(vec![
            container.id.clone(),
            container.name.clone(),
            container.image.clone(),
            moment(container.created),
            status.to_string(),
            container.command.join(" "),
        ]);
    }
    if !context.out.json {
        if rows.is_empty() {
            context.out.note("no containers");
        } else {
            context.out.table(&["CONTAINER", "NAME", "IMAGE", "CREATED", "STATUS", "COMMAND"], &rows)?;
        }
    }
    Ok(())
}

/// Whether a container of that name or identifier exists.
pub fn exists(context: &Context, name: &str) -> bool {
    record::find(&context.dirs, name).is_ok()
}

/// Removes a container; with `force` also one that runs.
pub fn remove(context: &Context, name: &str, force: bool) -> anyhow::Result<&'static str> {
    let container = record::find(&context.dirs, name)?;
    let status = container.status();
    if matches!(status, Status::Running | Status::Orphaned) {
        if !force {
            return Err(
                Failure::busy(format!("container {name} is {status}; `lazyroot rm --force {name}` ends it")).into()
            );
        }
        // Its `lazyroot run` sees the end, and with --rm removes everything itself. The runtime may not know the
        // container yet, so it is told again.
        let until = std::time::Instant::now() + KILL_TIMEOUT;
        loop {
            container.delete_in_runtime();
            let pause = std::time::Instant::now() + Duration::from_millis(200);
            let alive = || record::start_time(container.runner.0) == Some(container.runner.1);
            while alive() && std::time::Instant::now() < pause {
                std::thread::sleep(Duration::from_millis(5));
            }
            if !alive() {
                break;
            }
            if std::time::Instant::now() >= until {
                return Err(Failure::busy(format!(
                    "container {name} does not end; its `lazyroot run` is process {}",
                    container.runner.0
                ))
                .into());
            }
        }
    }
    container.remove(&context.dirs)?;
    Ok("container")
}

/// Removes containers that were to be removed when they ended, but whose `lazyroot run` was killed.
pub fn tidy(context: &Context) -> anyhow::Result<()> {
    for container in record::all(&context.dirs)? {
        if container.rm && matches!(container.status(), Status::Lost | Status::Exited(_)) {
            container.remove(&context.dirs)?;
        }
    }
    Ok(())
}
