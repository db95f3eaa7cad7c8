//! Imports in processes of their own: killed at any moment, fed through a pipe.

mod common;

use common::make::{gzip, noise, plain_layout, tar};
use common::{Home, Opened, name, options, walk};
use lazyroot_import::{Source, import};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use store::Store;

/// Set in the children: root, source, name.
const CHILD: &str = "LAZYROOT_TEST_IMPORT";

/// Not a test: what the others start.
#[test]
fn child() {
    let Ok(spec) = std::env::var(CHILD) else { return };
    let [root, source, image] = spec.split('\n').collect::<Vec<_>>()[..] else { panic!("{spec}") };
    let store = Store::open(root.as_ref()).unwrap();
    import(&store, &Source::parse(source).unwrap(), &name(image), &options()).unwrap();
}

fn spawn(home: &Home, source: &str, image: &str, stdin: Stdio) -> std::process::Child {
    let spec = format!("{}\n{source}\n{image}", home.store.root().display());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child"]).env(CHILD, spec).stdin(stdin).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn killed_at_any_moment_the_store_is_as_it_was() {
    let home = Home::new();
    let oci = home.dir.path().join("oci");
    let before: Vec<u8> = noise(1, 500_000);
    plain_layout(&oci, &[tar(&[("f", &before)])]);
    home.import(&format!("oci:{}", oci.display())).unwrap();
    let old = home.store.image(&name("test")).unwrap();
    let after = noise(2, 12 << 20);
    let next = home.dir.path().join("next");
    plain_layout(&next, &[tar(&[("f", &after), ("g", &before)]), tar(&[("h", b"h")])]);
    let source = format!("oci:{}", next.display());

    let start = Instant::now();
    assert!(spawn(&home, &source, "whole", Stdio::null()).wait().unwrap().success());
    let whole = start.elapsed();
    home.store.remove(&name("whole")).unwrap();
    home.store.gc(&Default::default()).unwrap();
    let (mut killed, mut finished) = (0, 0);
    for i in 0..20u32 {
        let mut child = spawn(&home, &source, "test", Stdio::null());
        std::thread::sleep(whole * i / 20);
        child.kill().unwrap();
        child.wait().unwrap();
        let record = home.store.image(&name("test")).unwrap();
        let image = home.opened();
        if record.identity == old.identity {
            killed += 1;
            assert!(image.content("/f") == before);
        } else {
            // It was quicker this time: then everything is there.
            finished += 1;
            assert!(image.content("/f") == after && image.content("/g") == before);
            let back = import(
                &home.store,
                &Source::parse(format!("oci:{}", oci.display())).unwrap(),
                &name("test"),
                &options(),
            );
            assert_eq!(back.unwrap().record.identity, old.identity);
            home.store.gc(&Default::default()).unwrap();
        }
    }
    assert!(killed >= 5, "{killed} killed, {finished} finished");
    // Another import goes through, and nothing of the killed ones is left after it and a gc.
    home.import(&source).unwrap();
    assert!(home.opened().content("/f") == after);
    home.store.gc(&Default::default()).unwrap();
    let mut files = Vec::new();
    walk(&home.store.root().join("tmp"), &mut files);
    assert_eq!(files, Vec::<std::path::PathBuf>::new());
    walk(&home.store.root().join("objects"), &mut files);
    walk(&home.store.root().join("indexes"), &mut files);
    // A pack, a map and a table for each object, and the index.
    let objects = home.store.image(&name("test")).unwrap().objects.len();
    assert_eq!((objects, files.len()), (2, 7), "{files:?}");
}

#[test]
fn archives_come_through_a_pipe() {
    let home = Home::new();
    let data = noise(3, 3 << 20);
    let archive = gzip(&tar(&[("f", &data)]));
    let mut child = spawn(&home, "tar:-", "piped", Stdio::piped());
    let mut pipe = child.stdin.take().unwrap();
    for part in archive.chunks(70_001) {
        std::io::Write::write_all(&mut pipe, part).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(pipe);
    assert!(child.wait().unwrap().success());
    assert!(Opened::new(&home.store, &name("piped")).content("/f") == data);
    // Cut short, it fails and leaves nothing.
    let mut child = spawn(&home, "tar:-", "cut", Stdio::piped());
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), &archive[..archive.len() / 2]).unwrap();
    assert!(!child.wait().unwrap().success());
    assert!(home.store.image(&name("cut")).is_err());
}
