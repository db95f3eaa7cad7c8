//! Commands that look into images without mounting.

use crate::lab::{Lab, finish};
use std::process::Command;

#[test]
fn images_are_read_without_daemon_and_mount() {
    let lab = Lab::new();
    let tree = lab.image("a");
    assert_eq!(lab.run(&["ls", "a"]).ok().out, "absolute\ndir\nempty\nlink\nsmall\n");
    assert_eq!(lab.run(&["ls", "a", "/absolute"]).ok().out, "big\ndeep\nlinked\n");
    assert!(lab.run(&["ls", "-l", "a", "/small"]).ok().out.starts_with("-rwsr-x--x   2 "));
    assert_eq!(lab.run(&["cat", "a", "/small", "/dir/linked"]).ok().out, "small\nsmall\n");
    assert_eq!(lab.run(&["cat", "a", "/../link"]).ok().out.len(), 100_000, "links and .. stay in the image");
    assert_eq!(
        lab.run(&["find", "a"]).ok().out,
        "/\n/absolute\n/dir\n/dir/big\n/dir/deep\n/dir/deep/file\n/dir/linked\n/empty\n/link\n/small\n"
    );
    assert_eq!(
        lab.run(&["find", "a", "/dir", "--type", "f", "--name", "?i[kgl]*"]).ok().out,
        "/dir/big\n/dir/deep/file\n"
    );
    let found = lab.run(&["--json", "find", "a", "/link"]).ok().json().remove(0);
    assert_eq!((found["type"].as_str(), found["target"].as_str()), (Some("symlink"), Some("dir/deep/file")));

    lab.run(&["diff", "a", tree.to_str().unwrap()]).ok();
    // `dir:` says that it is one, where a name may be either, from wherever it is typed.
    std::fs::write(lab.path("a"), b"").unwrap();
    let here = |args: &[&str]| {
        let mut command = lab.command(args);
        command.current_dir(&lab.dir);
        finish(command)
    };
    here(&["diff", "a", "dir:tree-a"]).ok();
    here(&["diff", "dir:tree-a", "a"]).ok();
    here(&["diff", "a", "tree-a"]).fails(3, &["tree-a:latest"]);
    here(&["diff", "a", "dir:no-such"]).fails(3, &["no directory no-such"]);
    std::fs::write(tree.join("small"), b"SMALL\n").unwrap();
    here(&["diff", "a", "dir:tree-a"]).fails(1, &[]);
    std::fs::write(tree.join("added"), b"").unwrap();
    let diff = lab.run(&["diff", "a", tree.to_str().unwrap()]).fails(1, &[]).out;
    assert!(diff.contains("~ /small: content") && diff.contains("+ /added"), "{diff}");
    lab.import(&tree, "a:2");
    let between = lab.run(&["diff", "a", "a:2", "--ignore-times"]).fails(1, &[]).out;
    assert!(between.contains("~ /small: content") && !between.contains("/dir/big"), "{between}");
    lab.run(&["tag", "a:2", "b"]).ok();
    lab.run(&["diff", "b", "a:2"]).ok();

    let inspect = lab.run(&["--json", "inspect", "a"]).ok().json().remove(0);
    assert_eq!(inspect["names"].as_u64(), Some(9));
    let fsck = lab.run(&["--json", "fsck"]).ok().json();
    assert_eq!(fsck.last().unwrap()["problems"].as_u64(), Some(0));
    assert_eq!(lab.run(&["--json", "images"]).ok().json().len(), 3);
    lab.run(&["rm", "a:2", "b"]).ok();
    lab.run(&["gc"]).ok();
    assert_eq!(lab.run(&["cat", "a", "/small"]).ok().out, "small\n");
    assert!(!lab.daemon_lives(), "nothing of this needed a daemon");
    lab.run(&["logs"]).fails(3, &["no daemon has run"]);
    lab.run(&["stats"]).fails(6, &["no daemon runs"]);
    assert!(lab.run(&["completions", "bash"]).ok().out.contains("lazyroot"));
}

#[test]
fn exports_are_the_image() {
    let lab = Lab::new();
    let tree = lab.image("a");
    let tar = lab.path("a.tar");
    lab.run(&["export", "a", tar.to_str().unwrap(), "--as", "tar"]).ok();
    lab.run(&["import", &format!("tar:{}", tar.display()), "b"]).ok();
    lab.run(&["diff", "a", "b"]).ok();
    let identity = |name: &str| lab.run(&["--json", "inspect", name]).ok().json()[0]["identity"].clone();
    assert_eq!(identity("a"), identity("b"), "the same tree has the same identity");
    lab.run(&["export", "a", tar.to_str().unwrap(), "--as", "tar"]).fails(4, &["exists already"]);

    let whole = lab.path("a.erofs");
    let meta = lab.path("a.meta");
    lab.run(&["export", "a", whole.to_str().unwrap(), "--as", "erofs"]).ok();
    lab.run(&["export", "a", meta.to_str().unwrap(), "--as", "erofs", "--metadata-only"]).ok();
    let (whole_bytes, meta_bytes) = (std::fs::read(&whole).unwrap(), std::fs::read(&meta).unwrap());
    assert_eq!(whole_bytes[..meta_bytes.len()], meta_bytes[..]);
    let big = std::fs::read(tree.join("dir/big")).unwrap();
    assert!(whole_bytes.windows(4096).step_by(4096).any(|w| w == &big[..4096]));
    if lazyroot::run::runtime::in_path("fsck.erofs").is_some() {
        let mut fsck = Command::new("fsck.erofs");
        fsck.arg(&whole);
        finish(fsck).ok();
    }
}

#[test]
fn sparse_files_are_exported_with_their_holes() {
    let lab = Lab::new();
    let tree = lab.path("tree");
    let long = format!("{}/{}", "d".repeat(90), "n\u{fc}".repeat(60));
    std::fs::create_dir_all(tree.join(&long).parent().unwrap()).unwrap();
    /// Name, size, pieces of data.
    type Holed<'a> = (&'a str, u64, &'a [(u64, usize)]);
    // No block of zeros, so that the image keeps them as they are.
    let files: &[Holed<'_>] = &[
        ("between", 3 << 20, &[(0, 4096), (2 << 20, 65536)]),
        ("at-the-end", 1 << 20, &[(8192, 100)]),
        ("in-front", (1 << 20) + 77, &[(1 << 20, 77)]),
        ("nothing-else", 50 << 20, &[]),
        ("far-away", 80 << 20, &[(70 << 20, 4096)]),
        (&long, 1 << 20, &[(65536, 4096)]),
        ("whole", 5000, &[(0, 5000)]),
        ("empty", 0, &[]),
    ];
    for (name, size, pieces) in files {
        let file = std::fs::File::create(tree.join(name)).unwrap();
        file.set_len(*size).unwrap();
        for (at, len) in *pieces {
            let bytes: Vec<u8> = (0..*len).map(|i| (i % 251) as u8 + 1).collect();
            std::os::unix::fs::FileExt::write_all_at(&file, &bytes, *at).unwrap();
        }
    }
    std::fs::hard_link(tree.join("between"), tree.join("linked")).unwrap();
    lab.import(&tree, "a");
    let archive = lab.path("a.tar");
    let text = archive.to_str().unwrap();
    lab.run(&["export", "a", text, "--as", "erofs", "--sparse"]).fails(2, &["--as tar"]);
    lab.run(&["export", "a", text, "--as", "tar", "--sparse"]).ok();
    assert!(std::fs::metadata(&archive).unwrap().len() < 1 << 20);
    // Our own import.
    lab.run(&["import", &format!("tar:{text}"), "b"]).ok();
    let identity = |name: &str| lab.run(&["--json", "inspect", name]).ok().json()[0]["identity"].clone();
    assert_eq!(identity("a"), identity("b"));
    // GNU tar.
    let out = lab.path("out");
    std::fs::create_dir(&out).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["-xf", text, "-C"]).arg(&out);
    let done = finish(tar).ok();
    assert_eq!(done.err, "");
    lab.run(&["diff", "a", &format!("dir:{}", out.display())]).ok();
    for (name, size, _) in files {
        let meta = std::fs::metadata(out.join(name)).unwrap();
        assert_eq!(meta.len(), *size, "{name}");
        assert!(std::os::unix::fs::MetadataExt::blocks(&meta) * 512 < 300_000, "{name} has lost its holes");
    }
    // By default they are zeros, which everybody reads.
    lab.import(&tree.join("d".repeat(90)), "small");
    let plain = lab.path("plain.tar");
    lab.run(&["export", "small", plain.to_str().unwrap(), "--as", "tar"]).ok();
    let bytes = std::fs::read(&plain).unwrap();
    assert!(bytes.len() > 1 << 20 && !bytes.windows(10).any(|w| w == b"GNU.sparse"));
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let lab = Lab::new();
    lab.image("a");
    let mut child = lab
        .command(&["cat", "a", "/dir/big"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}
