//! How sessions begin and end.

use crate::common::*;
use lazyroot::front::{Context, TreeOptions, TreeSession};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn priv_an_unmounted_session_notices() {
    if skip("priv_an_unmounted_session_notices") {
        return;
    }
    let (tree, gate) = gated(1 << 20);
    let (mut session, root) = serve(tree);
    let slow = File::open(root.join("slow")).unwrap();
    let reader = start(move || {
        let mut buf = vec![0u8; 4096];
        slow.read_exact_at(&mut buf, 0).map(|()| buf)
    });
    gate.await_waiting(1);
    // The last mount goes while a file is open and a read is parked: the session goes on until they are done.
    drop(session.take_mount());
    assert!(!session.wait(Some(Duration::from_millis(50))));
    gate.open();
    assert!(reader.wait(SOON, "the parked reader").unwrap() == pattern(4096, 3));
    assert!(session.wait(Some(SOON)), "unmounted");
    assert!(!session.is_alive());
    within(SOON, "stopping what has ended", move || session.stop());
}

#[test]
fn priv_an_aborted_session_ends() {
    if skip("priv_an_aborted_session_ends") {
        return;
    }
    let (tree, gate) = gated(1 << 20);
    let (session, root) = serve(tree);
    let id = sys::mount::ids(session.mount().unwrap()).unwrap().dev_minor;
    let fs = sys::mount::FsContext::open("fusectl").unwrap();
    fs.create().unwrap();
    let control = fs.mount(sys::mount::MountAttrFlags::empty()).unwrap();
    let slow = File::open(root.join("slow")).unwrap();
    let reader = start(move || {
        let mut buf = vec![0u8; 4096];
        errno(slow.read_at(&mut buf, 0))
    });
    gate.await_waiting(1);
    let abort = rustix::fs::openat(&control, format!("{id}/abort"), OFlags::WRONLY, Mode::empty()).unwrap();
    rustix::io::write(&abort, b"1").unwrap();
    let got = reader.wait(SOON, "the parked reader");
    assert!([Errno::IO, Errno::NOTCONN, Errno::CONNABORTED].contains(&got), "{got:?}");
    assert!(session.wait(Some(SOON)), "aborted");
    gate.open();
    within(SOON, "stopping what was aborted", move || session.stop());
}

#[test]
fn priv_through_fusermount() {
    if skip("priv_through_fusermount") {
        return;
    }
    if Command::new("fusermount3").arg("-V").output().is_err() {
        println!("SKIP priv_through_fusermount: no fusermount3");
        return;
    }
    let me = std::env::current_exe().unwrap();
    for user in [0, 65_534] {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        std::os::unix::fs::chown(dir.path(), Some(user), Some(user)).unwrap();
        // The program where the user can read it, and the device as udev would have made it.
        let copy = tempfile::tempdir_in("/tmp").unwrap();
        std::fs::set_permissions(copy.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = copy.path().join("test");
        std::fs::copy(&me, &program).unwrap();
        let node = copy.path().join("fuse");
        let dev = rustix::fs::makedev(10, 229);
        rustix::fs::mknodat(CWD, &node, rustix::fs::FileType::CharacterDevice, Mode::from_raw_mode(0o666), dev)
            .unwrap();
        std::fs::set_permissions(&node, std::fs::Permissions::from_mode(0o666)).unwrap();
        let mut command = Command::new(&program);
        use std::os::unix::process::CommandExt;
        command.args(["--exact", "life::helper_mount_as_this_user", "--include-ignored", "--nocapture"]);
        command.env("FUSE_TEST_PLACE", dir.path()).uid(user).gid(user).current_dir("/").stdout(Stdio::piped());
        let place = dir.path().to_owned();
        let (out, left) = within(Duration::from_secs(60), "the helper", move || {
            sys::mount::enter_own_namespace().unwrap();
            sys::mount::bind(&node, Path::new("/dev/fuse"), false).unwrap();
            let out = command.output().unwrap();
            (out, sys::mountinfo::of_thread().unwrap().iter().any(|e| e.mount_point == place))
        });
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(
            out.status.success() && text.contains("helper did it"),
            "{text} {}",
            String::from_utf8_lossy(&out.stderr)
        );
        assert!(!left, "the mount stayed");
    }
}

/// Not a test by itself: runs as the user that the test above chose.
#[test]
#[ignore = "run by priv_through_fusermount"]
fn helper_mount_as_this_user() {
    let Some(place) = std::env::var_os("FUSE_TEST_PLACE") else { return };
    let place = PathBuf::from(place);
    let (tree, gate) = gated(1 << 20);
    let options = TreeOptions { name: "a,b\\c".to_owned(), ..Default::default() };
    let session = TreeSession::start_at(tree, &place, &options, Context::default()).unwrap();
    let entry = sys::mountinfo::of_self().unwrap().into_iter().find(|e| e.mount_point == place).unwrap();
    assert_eq!((entry.fstype.as_str(), entry.source.to_str()), ("fuse.lazyroot", Some("a,b\\c")));
    assert!(entry.options.contains("nosuid") && entry.options.contains("nodev"), "{}", entry.options);
    assert_eq!(std::fs::read_dir(place.join("d")).unwrap().count(), 500);
    assert!(std::fs::read(place.join("d/f7")).unwrap() == pattern(1000, 7));
    let slow = File::open(place.join("slow")).unwrap();
    let reader = start(move || {
        let mut buf = vec![0u8; 4096];
        errno(slow.read_at(&mut buf, 0))
    });
    gate.await_waiting(1);
    within(SOON, "stopping", move || session.stop());
    reader.wait(SOON, "the parked reader");
    println!("helper did it");
}
