//! Image files that the kernel mounts.

use crate::common::*;
use lazyroot::front::fuse::wire::opcode;
use lazyroot::front::{BlockFiles, BlockFilesOptions, Context, ReadPath};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Files by path.
type Contents = Vec<(String, Vec<u8>)>;

/// An EROFS image of a small tree, made by mkfs.erofs, in a file without a name; and what is in it.
fn erofs_image() -> Option<(File, Contents)> {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    let mut files = Vec::new();
    for d in 0..20 {
        let sub = source.join(format!("d{d}"));
        std::fs::create_dir_all(&sub).unwrap();
        for f in 0..20 {
            let bytes = pattern((d * 20 + f) * 997, (d * 20 + f) as u64);
            std::fs::write(sub.join(format!("f{f}")), &bytes).unwrap();
            files.push((format!("d{d}/f{f}"), bytes));
        }
    }
    let big = pattern(20 << 20, 77);
    std::fs::write(source.join("big"), &big).unwrap();
    files.push(("big".to_owned(), big));
    let image = dir.path().join("image");
    let made = Command::new("mkfs.erofs").arg(&image).arg(&source).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !made.is_ok_and(|s| s.success()) {
        println!("SKIP: mkfs.erofs does not work");
        return None;
    }
    Some((File::open(&image).unwrap(), files))
}

/// Mounts a block file as EROFS, attached nowhere.
fn mount_erofs(files: &BlockFiles, file: lazyroot::front::BlockFile) -> std::os::fd::OwnedFd {
    erofs_recipe(files, file).make_apart().unwrap()
}

fn erofs_recipe(files: &BlockFiles, file: lazyroot::front::BlockFile) -> sys::mount::Recipe {
    sys::mount::Recipe {
        fstype: "erofs".to_owned(),
        options: vec![("source".to_owned(), files.path(file).unwrap().to_str().map(str::to_owned))],
        attrs: sys::mount::MountAttrFlags::MOUNT_ATTR_RDONLY,
    }
}

#[test]
fn priv_block_files_are_mounted_as_erofs() {
    if skip("priv_block_files_are_mounted_as_erofs") {
        return;
    }
    let Some((image, contents)) = erofs_image() else { return };
    let image = Arc::new(image);
    for read_path in [ReadPath::Copy, ReadPath::Uncached, ReadPath::Splice] {
        let gate = Arc::new(Gate::default());
        gate.open();
        let source = Arc::new(HostImage { file: Arc::clone(&image), len: image.metadata().unwrap().len(), gate });
        let files =
            BlockFiles::start(&BlockFilesOptions::default(), Context { read_path, ..Default::default() }).unwrap();
        assert!(files.is_empty());
        let one = files.add("one", source.clone()).unwrap();
        let two = files.add("two", source.clone()).unwrap();
        assert!(files.add("two", source.clone()).is_err());
        for bad in ["", ".", "..", "a/b", "a\0"] {
            assert!(files.add(bad, source.clone()).is_err());
        }
        let listed: Vec<_> = std::fs::read_dir(proc_path(files.mount().unwrap()))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(listed, ["one", "two"]);
        let meta = files.path(one).unwrap().symlink_metadata().unwrap();
        assert_eq!((meta.mode(), meta.size(), meta.mtime()), (FILE | 0o400, source.len, 0));
        assert_eq!(proc_path(files.mount().unwrap()).metadata().unwrap().mode(), DIR | 0o700);
        let three = files.add("three", source.clone()).unwrap();
        assert!(files.path(three).unwrap().exists(), "added at run time");
        assert!(files.remove(three) && !files.remove(three));
        assert!(files.path(three).is_none());

        let mounted = mount_erofs(&files, one);
        let root = proc_path(&mounted);
        for (name, bytes) in &contents {
            assert!(std::fs::read(root.join(name)).unwrap() == *bytes, "{name}");
        }
        // Removed, it is served as long as it is mounted, and dropped afterwards.
        files.remove(one);
        assert!(files.remove(two));
        assert!(std::fs::read_dir(proc_path(files.mount().unwrap())).unwrap().next().is_none());
        files.invalidate(one, 0, 0).unwrap();
        rustix::fs::fadvise(File::open(root.join("big")).unwrap(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        assert!(std::fs::read(root.join("big")).unwrap() == contents.last().unwrap().1);
        assert_eq!(files.len(), 1);
        drop(mounted);
        until("the kernel forgot the file", || files.is_empty());
        until("the source is free", || Arc::strong_count(&source) == 1);
        assert_eq!(files.counters().refused(), 0);
        files.stop();
    }
}

#[test]
fn priv_a_mounted_block_file_may_wait_for_its_source() {
    if skip("priv_a_mounted_block_file_may_wait_for_its_source") {
        return;
    }
    let Some((image, contents)) = erofs_image() else { return };
    let gate = Arc::new(Gate::default());
    let len = image.metadata().unwrap().len();
    let files = BlockFiles::start(&BlockFilesOptions::default(), Context::default()).unwrap();
    let file = files.add("image", Arc::new(HostImage { file: Arc::new(image), len, gate: Arc::clone(&gate) })).unwrap();
    let files = Arc::new(files);
    let mounting = Arc::clone(&files);
    let mount = start(move || mount_erofs(&mounting, file));
    gate.await_waiting(1);
    std::thread::sleep(Duration::from_millis(20));
    assert!(mount.is_running());
    gate.open();
    let mounted = mount.wait(SOON, "the mount");
    let (name, bytes) = &contents[3];
    assert!(std::fs::read(proc_path(&mounted).join(name)).unwrap() == *bytes);
    // The daemon goes; what is not cached fails, and nothing hangs.
    let files = Arc::into_inner(files).unwrap();
    within(SOON, "stopping below a mounted image", move || files.stop());
    let got = errno(std::fs::read(proc_path(&mounted).join("big")));
    assert!([Errno::IO, Errno::NOTCONN].contains(&got), "{got:?}");
}

#[test]
fn priv_a_server_killed_while_it_mounts_its_own_file_is_gone() {
    if skip("priv_a_server_killed_while_it_mounts_its_own_file_is_gone") {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "blockfiles::helper_mount_and_wait", "--include-ignored", "--nocapture"]);
    let mut child = command.env("FUSE_TEST_MOUNTING", "1").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert!(lines.any(|line| line.is_ok_and(|line| line.contains("mounting now"))));
    child.kill().unwrap();
    let status = within(SOON, "a killed server", move || child.wait().unwrap());
    assert_eq!(status.signal(), Some(9));
}

/// Not a test by itself: mounts a file whose bytes never come.
#[test]
#[ignore = "run by priv_a_server_killed_while_it_mounts_its_own_file_is_gone"]
fn helper_mount_and_wait() {
    if std::env::var_os("FUSE_TEST_MOUNTING").is_none() {
        return;
    }
    let gate = Arc::new(Gate::default());
    let files = BlockFiles::start(&BlockFilesOptions::default(), Context::default()).unwrap();
    let source = HostImage { file: Arc::new(tempfile::tempfile().unwrap()), len: 1 << 20, gate: Arc::clone(&gate) };
    let file = files.add("image", Arc::new(source)).unwrap();
    let recipe = erofs_recipe(&files, file);
    let mount = start(move || recipe.make_apart().map(|_| ()));
    // The first by readahead, which is given up; then the one that the mount waits for.
    gate.await_waiting(1);
    println!("mounting now");
    let _ = mount.wait(Duration::from_secs(60), "killed before that");
}

#[test]
fn priv_pushed_pages_are_not_asked_for() {
    if skip("priv_pushed_pages_are_not_asked_for") {
        return;
    }
    let bytes = pattern((1 << 20) + 100, 5);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    let gate = Arc::new(Gate::default());
    gate.open();
    let files = BlockFiles::start(&BlockFilesOptions::default(), Context::default()).unwrap();
    let source = Arc::new(HostImage { file: Arc::new(file), len: bytes.len() as u64, gate });
    let pushed = files.add("pushed", source).unwrap();
    let fd = files.open(pushed).unwrap();
    files.notify_store(pushed, 0, &bytes[..1 << 20]).unwrap();
    let kind = |r: std::io::Result<()>| r.unwrap_err().kind();
    assert_eq!(kind(files.notify_store(pushed, 1 << 20, &bytes[1 << 20..])), std::io::ErrorKind::InvalidInput);
    assert_eq!(kind(files.notify_store(pushed, 1, &bytes[..4096])), std::io::ErrorKind::InvalidInput);
    assert_eq!(kind(files.notify_store(pushed, 1 << 20, &[0; 4096])), std::io::ErrorKind::InvalidInput);
    let mut got = vec![0; 1 << 20];
    sys::file::pread_exact(fd.as_fd(), &mut got, 0).unwrap();
    assert!(got == bytes[..1 << 20]);
    assert_eq!(files.counters().requests(opcode::READ), 0);
    let mut all = Vec::new();
    File::from(fd).read_to_end(&mut all).unwrap();
    assert!(all == bytes);
    assert!(files.counters().requests(opcode::READ) > 0, "the last, partial page");
    // What was dropped is asked for again.
    let before = files.counters().read_bytes();
    files.invalidate(pushed, 0, 0).unwrap();
    assert!(std::fs::read(files.path(pushed).unwrap()).unwrap() == bytes);
    assert!(files.counters().read_bytes() >= before + bytes.len() as u64);
}

#[test]
fn priv_reads_are_as_large_as_the_readahead() {
    if skip("priv_reads_are_as_large_as_the_readahead") {
        return;
    }
    let bytes = pattern(16 << 20, 5);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    let gate = Arc::new(Gate::default());
    gate.open();
    let options = BlockFilesOptions { read_ahead_kb: Some(1024), ..Default::default() };
    let files = BlockFiles::start(&options, Context::default()).unwrap();
    let ids = sys::mount::ids(files.mount().unwrap()).unwrap();
    assert_eq!(sys::mount::read_ahead_kb(ids).unwrap(), 1024);
    let file = files.add("f", Arc::new(HostImage { file: Arc::new(file), len: bytes.len() as u64, gate })).unwrap();
    assert!(std::fs::read(files.path(file).unwrap()).unwrap() == bytes);
    let reads = files.counters().requests(opcode::READ);
    assert!(reads <= 16 + 8, "{reads} reads for 16 MiB");
}
