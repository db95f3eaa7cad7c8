//! `mount` and `umount`.

use super::Context;
use super::args;
use super::output::span;
use super::uppers;
use crate::control::client::Client;
use crate::control::proto::{MountRequest, Reply, Request, Shape, Top, Use};
use crate::dirs::private_dir;
use crate::errors;
use crate::failure::{Failure, Kind};
use crate::mounts::{self, Target};
use crate::reader::{self, ImageReader};
use anyhow::Context as _;
use serde_json::json;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use sys::mount::UnmountFlags;

/// What the daemon handed out.
#[derive(Debug)]
pub struct Handed {
    /// The pending lease.
    pub lease: u64,
    /// The shape.
    pub shape: Shape,
    /// Why that one.
    pub why: String,
    /// Whether the superblock was there.
    pub shared: bool,
    /// How long the daemon took.
    pub took: Duration,
    /// The detached mount.
    pub mount: OwnedFd,
}

/// Asks the daemon for a detached mount.
pub fn ask(client: &mut Client, request: MountRequest) -> anyhow::Result<Handed> {
    let (reply, mut fds) = client.call(&Request::Mount(request), &[])?;
    let Reply::Mounted { lease, shape, why, shared, micros, .. } = reply else {
        anyhow::bail!("the daemon answered with something else");
    };
    let mount = fds.pop().context("the daemon sent no mount")?;
    Ok(Handed { lease, shape, why, shared, took: Duration::from_micros(micros), mount })
}

/// `mount`
pub fn mount(context: &Context, args: &args::Mount) -> anyhow::Result<()> {
    let began = Instant::now();
    let store = context.store()?;
    let (name, record) = reader::find(&store, &args.name)?;
    let target = Target::open(&args.dir)?;
    if !mounts::may_mount() {
        return user_mount(context, args, &name.to_string(), &record.index.to_hex(), &target.path, began);
    }
    let shown = target.path.to_str().with_context(|| format!("{} is not UTF-8", target.path.display()))?.to_owned();
    // Before anything is asked for: what cannot be has to leave nothing.
    let upper = match (args.rw, &args.upper) {
        (false, _) => None,
        (true, Some(id)) => Some(uppers::taken_up(context, id, &record.index.to_hex())?),
        (true, None) => Some(uppers::made(context, &name.to_string(), &record.index.to_hex())?),
    };
    let mut client = context.daemon()?;
    let request = MountRequest {
        index: record.index.to_hex(),
        image: name.to_string(),
        shape: args.shape,
        r#use: if args.rw { Use::Rw } else { Use::Mount },
        target: shown.clone(),
        suid: args.suid,
        dev: args.dev,
    };
    let Handed { lease, shape, why, shared, took, mount } = ask(&mut client, request)?;
    let mut top: Option<Top> = None;
    let mount = match &upper {
        Some(upper) => {
            let reader = ImageReader::open_index(&store, &name.to_string(), &record.index)?;
            let (dir, work) = mounts::upper_dirs(&upper.base, reader.index())?;
            let place = private_dir(&context.dirs.state.join("lower"), "state")?;
            let overlay = mounts::overlay(mount, &dir, &work, &place, &uppers::label(&upper.id)?)?;
            restrict(&overlay.mount, args.suid, args.dev)?;
            top = Some(overlay.top);
            overlay.mount
        }
        None => mount,
    };
    target.attach(mount.as_fd())?;
    let upper_text = upper.as_ref().map(|u| u.base.join("upper").display().to_string());
    let attached = Request::Attached { lease, target: shown.clone(), top, upper: upper_text.clone(), container: None };
    if let Err(e) = client.ask(&attached) {
        // Nobody knows of it, and most likely nobody serves it.
        let _ = sys::mount::unmount_fd(mount.as_fd(), UnmountFlags::DETACH);
        return Err(e);
    }
    if let Some(upper) = upper {
        upper.keep();
    }
    if context.out.json {
        context.out.object(&json!({"image": name.to_string(), "target": shown, "shape": shape, "why": why,
            "shared": shared, "upper": upper_text, "seconds": began.elapsed().as_secs_f64(),
            "daemon_seconds": took.as_secs_f64()}))?;
        return Ok(());
    }
    context.out.line(format!("{name} is mounted at {shown} ({})", span(began.elapsed())))?;
    if args.shape.is_none() {
        context.out.note(why);
    }
    if let Some(upper) = upper_text {
        context.out.line(format!("changes go to {upper}; umount keeps it"))?;
    }
    Ok(())
}

/// An overlay gets what the clone below it was restricted to.
pub fn restrict(mount: &OwnedFd, suid: bool, dev: bool) -> anyhow::Result<()> {
    use sys::mount::{MountAttrFlags, SetAttrs, set_attrs};
    let mut set = MountAttrFlags::empty();
    if !suid {
        set |= MountAttrFlags::MOUNT_ATTR_NOSUID;
    }
    if !dev {
        set |= MountAttrFlags::MOUNT_ATTR_NODEV;
    }
    set_attrs(mount.as_fd(), SetAttrs { set: set.bits().into(), ..Default::default() })
        .context("restricting the overlay")
}

/// So many random bytes, as text.
pub fn random_hex(bytes: usize) -> anyhow::Result<String> {
    let mut buf = vec![0u8; bytes];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut buf).context("/dev/urandom")?;
    Ok(buf.iter().map(|b| format!("{b:02x}")).collect())
}

/// An ordinary user's mount: the daemon serves a tree that fusermount3 mounts.
fn user_mount(
    context: &Context,
    args: &args::Mount,
    image: &str,
    index: &str,
    target: &Path,
    began: Instant,
) -> anyhow::Result<()> {
    if args.shape == Some(Shape::Erofs) {
        return Err(Failure::unavailable("--as erofs needs root (CAP_SYS_ADMIN); use --as tree, or run as root").into());
    }
    if args.rw {
        return Err(Failure::unavailable(
            "--rw needs root (CAP_SYS_ADMIN): it mounts an overlay; mount it read-only, or run as root",
        )
        .into());
    }
    let shown = target.to_str().with_context(|| format!("{} is not UTF-8", target.display()))?;
    super::doctor::user_mounts()?;
    let mut client = context.daemon()?;
    let served =
        client.ask(&Request::Serve { index: index.to_owned(), image: image.to_owned(), target: shown.to_owned() })?;
    anyhow::ensure!(matches!(served, Reply::Serving { .. }), "the daemon answered with something else");
    let why = "tree: without root only FUSE through fusermount3 is possible";
    if context.out.json {
        context.out.object(&json!({"image": image, "target": shown, "shape": Shape::Tree, "why": why,
            "seconds": began.elapsed().as_secs_f64()}))?;
        return Ok(());
    }
    context.out.line(format!("{image} is mounted at {shown} ({})", span(began.elapsed())))?;
    if args.shape.is_none() {
        context.out.note(why);
    }
    Ok(())
}

/// `umount`
pub fn umount(context: &Context, targets: &[PathBuf], lazy: bool) -> anyhow::Result<()> {
    let mut failed = None;
    // One of another root is a reason to do nothing, not to complain afterwards. One that does not answer is none: taking
    // its mounts away must be possible, and it looks for itself.
    let answers = match Client::connect_to(&context.dirs) {
        Ok(_) => true,
        Err(e) if errors::kind_of(&e) == Kind::Busy => return Err(e),
        Err(e) => {
            context.out.note(format!("lazyroot: {}", errors::message(&e)));
            false
        }
    };
    let daemon = crate::daemon::start::holder_pid(&context.dirs);
    for dir in targets {
        match mounts::unmount(dir, lazy, daemon) {
            Ok(done) => {
                let upper = done.upper.as_ref().map(|u| u.display().to_string());
                let id =
                    done.upper.as_ref().and_then(|u| Some(u.parent()?.file_name()?.to_string_lossy().into_owned()));
                if context.out.json {
                    context.out.object(&json!({"unmounted": done.path, "upper": upper, "upper_id": id}))?;
                } else if let (Some(upper), Some(id)) = (upper, id) {
                    context
                        .out
                        .line(format!("changes are kept in {upper}; `mount --rw --upper {id}` takes them up again"))?;
                }
            }
            Err(e) if targets.len() > 1 => {
                context.out.note(format!("lazyroot: {}", errors::message(&e)));
                failed.get_or_insert(e);
            }
            Err(e) => return Err(e),
        }
    }
    if answers && let Some(mut client) = context.running_daemon()? {
        client.ask(&Request::Rescan)?;
    }
    failed.map_or(Ok(()), Err)
}
