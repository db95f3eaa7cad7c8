//! Directories: what is taken, what is left out, and what happens when they change.

mod common;

use common::make::noise;
use common::{Home, options};
use image::index::InodeKind;
use lazyroot_import::{ImportError, Options};
use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Makes files (and the directories above them) with their own names as content.
fn make(root: &Path, files: &[&str]) {
    for f in files {
        let path = root.join(f);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, f).unwrap();
    }
}

fn source(path: &Path) -> String {
    format!("dir:{}", path.display())
}

fn imported(home: &Home, src: &Path, change: impl Fn(&mut Options<'_>)) -> Vec<String> {
    let mut options = options();
    change(&mut options);
    home.import_with(&source(src), &options).unwrap();
    home.opened().paths().keys().map(|p| String::from_utf8(p.clone()).unwrap()).collect()
}

#[test]
fn patterns_choose() {
    let home = Home::new();
    let src = home.dir.path().join("src");
    make(
        &src,
        &[
            "etc/passwd",
            "etc/shadow",
            "etc/ssh/key",
            "usr/bin/x",
            "usr/share/doc/x/y",
            "var/cache/a",
            "home/u/.cache/z",
            "top",
        ],
    );
    let strings = |l: &[&str]| l.iter().map(|s| (*s).to_owned()).collect::<Vec<String>>();
    let with = |include: &[&str], exclude: &[&str]| {
        imported(&home, &src, |o| {
            o.include = strings(include);
            o.exclude = strings(exclude);
        })
    };
    assert_eq!(
        with(&["/etc", "/usr/bin"], &["/etc/shadow*", "/etc/ssh"]),
        ["/", "/etc", "/etc/passwd", "/usr", "/usr/bin", "/usr/bin/x"]
    );
    assert_eq!(
        with(&["x"], &[]),
        [
            "/",
            "/usr",
            "/usr/bin",
            "/usr/bin/x",
            "/usr/share",
            "/usr/share/doc",
            "/usr/share/doc/x",
            "/usr/share/doc/x/y"
        ]
    );
    assert_eq!(with(&[], &["/etc", "/usr", ".cache/", "var"]), ["/", "/home", "/home/u", "/top"]);
    assert_eq!(with(&["/**/passwd"], &[]), ["/", "/etc", "/etc/passwd"]);
    let mut o = options();
    o.exclude = strings(&["[a"]);
    let e = home.import_with(&source(&src), &o).unwrap_err().to_string();
    assert!(e.contains("--exclude: pattern \"[a\": a '[' is not closed"), "{e}");
    let e = home.import_with("tar:/dev/null", &o).unwrap_err().to_string();
    assert!(e.contains("choose files of a directory"), "{e}");
}

#[test]
fn links_holes_and_attributes_are_kept() {
    let home = Home::new();
    let src = home.dir.path().join("src");
    make(&src, &["a", "d/b"]);
    fs::hard_link(src.join("a"), src.join("d/a2")).unwrap();
    fs::hard_link(src.join("a"), home.dir.path().join("outside")).unwrap();
    symlink("../nowhere", src.join("d/l")).unwrap();
    fs::set_permissions(src.join("a"), fs::Permissions::from_mode(0o4751)).unwrap();
    let mut sparse = fs::File::create(src.join("sparse")).unwrap();
    sparse.set_len(100 << 20).unwrap();
    sparse.seek(SeekFrom::Start((50 << 20) + 5)).unwrap();
    sparse.write_all(b"island").unwrap();
    drop(sparse);
    let report = home.import(&source(&src)).unwrap().report;
    assert!(report.source_bytes < 1 << 20, "holes were read: {report:?}");
    let image = home.opened();
    let (a, a2) = (image.find("/a").unwrap(), image.find("/d/a2").unwrap());
    assert_eq!((a.ino, a.nlink, a.permissions()), (a2.ino, 2, 0o4751));
    let meta = fs::metadata(src.join("a")).unwrap();
    assert_eq!((a.mtime_sec, i64::from(a.mtime_nsec), a.uid), (meta.mtime(), meta.mtime_nsec(), meta.uid()));
    assert_eq!(image.index.link_target(image.find("/d/l").unwrap().ino).unwrap(), b"../nowhere");
    let island = image.find("/sparse").unwrap();
    assert_eq!(island.size(), 100 << 20);
    assert_eq!(image.read(island.ino, (50 << 20) + 4, 8), b"\0island\0");
    assert!(image.data_blocks("/sparse") <= 16);
}

#[test]
fn the_same_tree_from_a_directory_and_an_archive_is_the_same_image() {
    let home = Home::new();
    let src = home.dir.path().join("src");
    make(&src, &["x/y/z", "x/q", "empty/e", "w"]);
    fs::write(src.join("w"), noise(9, 777_777)).unwrap();
    fs::hard_link(src.join("w"), src.join("x/w")).unwrap();
    symlink("w", src.join("l")).unwrap();
    let mut identities = Vec::new();
    for threads in [1, 4] {
        let mut o = options();
        o.threads = threads;
        identities.push(home.import_with(&source(&src), &o).unwrap().record.identity);
    }
    let tar = home.dir.path().join("t.tar");
    let made = std::process::Command::new("tar")
        .args(["--format=pax", "--numeric-owner", "-cf"])
        .arg(&tar)
        .arg("-C")
        .arg(&src)
        .arg(".")
        .status();
    assert!(made.unwrap().success());
    identities.push(home.import(&format!("tar:{}", tar.display())).unwrap().record.identity);
    identities.dedup();
    assert_eq!(identities.len(), 1);
}

#[test]
fn deep_trees_need_few_descriptors() {
    let home = Home::new();
    let src = home.dir.path().join("src");
    fs::create_dir_all(&src).unwrap();
    // Deeper than a path can name at once, with something beside each step so that the walk has to come back.
    let mut dir = rustix::fs::openat(rustix::fs::CWD, &src, rustix::fs::OFlags::DIRECTORY, 0o0.into()).unwrap();
    for i in 0..700 {
        let mode = rustix::fs::Mode::from(0o755);
        rustix::fs::mkdirat(&dir, "d", mode).unwrap();
        if i % 10 == 0 {
            rustix::fs::mkdirat(&dir, "z", mode).unwrap();
            rustix::fs::mkdirat(&dir, "z/in", mode).unwrap();
        }
        dir = rustix::fs::openat(&dir, "d", rustix::fs::OFlags::DIRECTORY, 0o0.into()).unwrap();
    }
    let report = home.import(&source(&src)).unwrap().report;
    assert_eq!(report.names, 700 + 2 * 70);
    // Beyond what an index can hold there is a message, not a crash.
    for _ in 0..1500 {
        rustix::fs::mkdirat(&dir, "d", 0o755.into()).unwrap();
        dir = rustix::fs::openat(&dir, "d", rustix::fs::OFlags::DIRECTORY, 0o0.into()).unwrap();
    }
    let home2 = Home::new();
    let e = home2.import(&source(&src)).unwrap_err();
    assert!(matches!(e, ImportError::Limit { .. }), "{e}");
    home2.assert_untouched();
    // The directory is too deep for a recursive remover that uses paths.
    let removed = std::process::Command::new("rm").arg("-rf").arg(&src).status().unwrap();
    assert!(removed.success());
}

#[test]
fn a_file_that_keeps_changing_is_named() {
    /// Appends to the file each time some more of it has been read.
    struct Growing(PathBuf);
    impl lazyroot_import::Progress for Growing {
        fn progress(&self, _: &lazyroot_import::Counts) {
            let mut file = fs::OpenOptions::new().append(true).open(&self.0).unwrap();
            file.write_all(b"x").unwrap();
        }
    }
    let home = Home::new();
    let src = home.dir.path().join("src");
    make(&src, &["steady"]);
    let busy = src.join("busy.log");
    fs::write(&busy, noise(1, 8 << 20)).unwrap();
    let growing = Growing(busy.clone());
    let mut options = options();
    options.progress = &growing;
    let e = home.import_with(&source(&src), &options).unwrap_err();
    assert!(matches!(&e, ImportError::Changing { path, tries: 3 } if *path == busy), "{e}");
    assert!(e.to_string().contains("--exclude"), "{e}");
    home.assert_untouched();
}

#[test]
fn a_file_that_changes_once_is_read_again() {
    struct Touch(PathBuf, AtomicBool);
    impl lazyroot_import::Progress for Touch {
        fn progress(&self, counts: &lazyroot_import::Counts) {
            // In the middle of the first reading.
            if counts.bytes > 3 << 20 && !self.1.swap(true, Ordering::Relaxed) {
                let mut file = fs::OpenOptions::new().write(true).open(&self.0).unwrap();
                file.write_all(b"changed!").unwrap();
            }
        }
    }
    let home = Home::new();
    let src = home.dir.path().join("src");
    fs::create_dir_all(&src).unwrap();
    fs::write(src.join("f"), noise(1, 8 << 20)).unwrap();
    let touch = Touch(src.join("f"), AtomicBool::new(false));
    let mut options = options();
    (options.progress, options.threads) = (&touch, 1);
    home.import_with(&source(&src), &options).unwrap();
    assert!(touch.1.load(Ordering::Relaxed));
    assert!(home.opened().content("/f") == fs::read(src.join("f")).unwrap());
}

#[test]
fn the_store_is_not_part_of_its_images() {
    let home = Home::new();
    let src = home.dir.path();
    make(src, &["file"]);
    let paths = imported(&home, src, |_| {});
    assert_eq!(paths, ["/", "/file", "/root"]);
    let e = home.import(&source(home.store.root())).unwrap_err();
    assert!(matches!(e, ImportError::Usage { .. }), "{e}");
    for bad in ["/no/such", "/proc/self/exe"] {
        let e = home.import(&format!("dir:{bad}")).unwrap_err();
        assert!(matches!(e, ImportError::NotFound { .. }), "{e}");
    }
}

#[test]
fn what_may_not_be_read_is_named_or_left_out() {
    // Root may read everything, so a thread becomes nobody, and with it those that it starts.
    let test = || {
        if rustix::process::geteuid().is_root() {
            let nobody = rustix::thread::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        }
        let home = Home::new();
        let src = home.dir.path().join("src");
        make(&src, &["open", "closed", "dir/x"]);
        fs::set_permissions(src.join("closed"), fs::Permissions::from_mode(0o000)).unwrap();
        let e = home.import(&source(&src)).unwrap_err().to_string();
        assert!(e.contains("closed"), "{e}");
        assert_eq!(imported(&home, &src, |o| o.skip_unreadable = true), ["/", "/dir", "/dir/x", "/open"]);
    };
    std::thread::spawn(test).join().unwrap();
}

#[test]
fn priv_mount_points_are_empty() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP priv_mount_points_are_empty: mounting needs root");
        return;
    }
    let home = Home::new();
    let src = home.dir.path().join("src");
    make(&src, &["tmpfs/hidden", "bound/hidden", "file", "other", "from/inner"]);
    let mount = |args: &[&str]| std::process::Command::new("mount").args(args).status().is_ok_and(|s| s.success());
    let at = |n: &str| src.join(n).display().to_string();
    struct Unmount(Vec<String>);
    impl Drop for Unmount {
        fn drop(&mut self) {
            for path in &self.0 {
                let _ = std::process::Command::new("umount").arg(path).status();
            }
        }
    }
    let mut mounted = Unmount(Vec::new());
    if !mount(&["-t", "tmpfs", "-o", "mode=0711", "none", &at("tmpfs")]) {
        println!("SKIP priv_mount_points_are_empty: mount(2) is forbidden here");
        return;
    }
    mounted.0.push(at("tmpfs"));
    fs::write(src.join("tmpfs/inside"), "x").unwrap();
    for (from, to) in [("from", "bound"), ("other", "file")] {
        assert!(mount(&["--bind", &at(from), &at(to)]));
        mounted.0.push(at(to));
    }
    let report = home.import(&source(&src)).unwrap().report;
    assert_eq!(report.mount_points, 3);
    let image = home.opened();
    assert_eq!(image.find("/tmpfs").unwrap().permissions(), 0o711);
    assert_eq!(image.find("/file").unwrap().kind, InodeKind::File { size: 0 });
    let paths: Vec<_> = image.paths().into_keys().map(|p| String::from_utf8(p).unwrap()).collect();
    assert_eq!(paths, ["/", "/bound", "/file", "/from", "/from/inner", "/other", "/tmpfs"]);
}

/// Hears everything and wants to know how much there is.
#[derive(Default)]
struct Curious(std::sync::Mutex<Vec<lazyroot_import::Counts>>);

impl lazyroot_import::Progress for Curious {
    fn progress(&self, counts: &lazyroot_import::Counts) {
        self.0.lock().unwrap().push(*counts);
    }

    fn wants_totals(&self) -> bool {
        true
    }
}

#[test]
fn progress_knows_how_much_a_directory_holds() {
    let home = Home::new();
    let dir = home.dir.path().join("d");
    std::fs::create_dir_all(dir.join("sub/deeper")).unwrap();
    std::fs::create_dir_all(dir.join("left-out/deeper")).unwrap();
    let data = common::make::noise(1, 100_000);
    for n in 0..300 {
        std::fs::write(dir.join(format!("sub/{n}")), &data[n..]).unwrap();
        std::fs::write(dir.join(format!("left-out/deeper/{n}")), &data[n..]).unwrap();
    }
    std::fs::hard_link(dir.join("sub/1"), dir.join("sub/deeper/again")).unwrap();
    std::os::unix::fs::symlink("sub", dir.join("link")).unwrap();
    std::fs::write(dir.join("hole"), b"").unwrap();
    std::fs::File::options().write(true).open(dir.join("hole")).unwrap().set_len(1 << 30).unwrap();
    let listen = Curious::default();
    let mut options = options();
    options.exclude = vec!["left-out".into()];
    options.progress = &listen;
    options.threads = 1;
    let report = home.import_with(&format!("dir:{}", dir.display()), &options).unwrap().report;
    let all = listen.0.lock().unwrap();
    let last = all.iter().max_by_key(|c| (c.bytes, c.files)).unwrap();
    assert_eq!((last.bytes, last.files), (report.source_bytes, report.names));
    assert_eq!(last.total_bytes, Some(report.source_bytes), "30 MB take longer than 300 names");
    assert_eq!(last.total_files, Some(report.names));
}

#[test]
fn the_report_says_by_how_much_the_store_grew() {
    let home = Home::new();
    let dir = home.dir.path().join("d");
    std::fs::create_dir(&dir).unwrap();
    let kept = || -> u64 {
        let mut files = Vec::new();
        for part in ["objects", "indexes", "refs"] {
            common::walk(&home.store.root().join(part), &mut files);
        }
        files.iter().map(|f| f.metadata().unwrap().len()).sum()
    };
    let mut before = kept();
    // New content, compressible and not; the same again; one file more; nothing but names.
    let steps: [&dyn Fn(); 4] = [
        &|| {
            std::fs::write(dir.join("noise"), common::make::noise(1, 300_000)).unwrap();
            std::fs::write(dir.join("text"), b"again and again ".repeat(50_000)).unwrap();
        },
        &|| {},
        &|| std::fs::write(dir.join("more"), common::make::noise(2, 70_000)).unwrap(),
        &|| std::fs::write(dir.join("empty"), b"").unwrap(),
    ];
    for (n, step) in steps.iter().enumerate() {
        step();
        let report = home.import(&format!("dir:{}", dir.display())).unwrap().report;
        let after = kept();
        assert_eq!(report.added_bytes, after.saturating_sub(before), "step {n}");
        assert_eq!(n == 1, report.added_bytes == 0, "step {n}");
        assert!(report.added_bytes >= report.stored_bytes);
        before = after;
    }
}
