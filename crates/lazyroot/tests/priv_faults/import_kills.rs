//! An import that is killed.

use crate::lab::{Lab, needs_mounts, skip_if};
use crate::support::{Random, Source, files_of, find, rounds, the, visit};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// When to kill.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// The import has written so many bytes.
    Wrote(u64),
    /// A file whose name ends so is in a part of the root, more of them than there were before.
    Made(&'static str, &'static str),
}

/// The stages of an import's end, which the bytes do not tell apart.
const STAGES: [(&str, &str); 8] = [
    ("tmp", "-pack"),
    ("tmp", "-map"),
    ("tmp", "-chunks"),
    ("tmp", "-index"),
    ("tmp", "-ref"),
    ("objects", ".pack"),
    ("objects", ".map"),
    ("indexes", ""),
];

impl Moment {
    fn has_come(self, root: &Path, before: usize) -> bool {
        match self {
            Moment::Wrote(bytes) => {
                let mut sum = 0;
                visit(&root.join("tmp"), &mut |path| sum += path.metadata().map_or(0, |m| m.len()));
                sum >= bytes
            }
            Moment::Made(part, ending) => find(root, part, ending).len() > before,
        }
    }
}

#[test]
fn priv_an_import_killed_at_any_moment_leaves_the_store_as_it_was() {
    skip_if!("priv_an_import_killed_at_any_moment_leaves_the_store_as_it_was", needs_mounts());
    let lab = Lab::new();
    lab.take(&Source::small(&lab, "first", 1), "first");
    let source = Source::medium(&lab);
    let done = lab.run(&["--json", "import", &format!("dir:{}", source.dir.display()), "b"]).ok();
    let packed = done.json().pop().unwrap()["packed_bytes"].as_u64().unwrap();
    assert!(packed > 10 << 20);
    lab.run(&["rm", "b"]).ok();
    lab.run(&["gc"]).ok();
    let (images, files) = (lab.images(), files_of(&lab.root));

    let archive = lab.path("medium.tar");
    let made = Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&source.dir).arg(".").status().unwrap();
    assert!(made.success());
    let from_archive = format!("tar:{}", archive.display());

    let (mut killed, count) = (0, rounds(20));
    for round in 0..count {
        let stage = STAGES.get((round / 2 % 10) as usize).filter(|_| round % 2 == 1);
        let moment = match stage {
            Some((part, ending)) => Moment::Made(part, ending),
            None => Moment::Wrote(packed * round / count + 1),
        };
        let before = match moment {
            Moment::Made(part, ending) if part != "tmp" => find(&lab.root, part, ending).len(),
            _ => 0,
        };
        let mut command = match round % 4 {
            3 => lab.command(&["import", "-q", &from_archive, "b"]),
            _ => lab.import_command(&source, "b"),
        };
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(90);
        let ended = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if moment.has_come(&lab.root, before) {
                break None;
            }
            assert!(Instant::now() < until, "{moment:?} never came");
            std::thread::sleep(Duration::from_micros(100));
        };
        child.kill().unwrap();
        child.wait().unwrap();
        killed += u64::from(ended.is_none());

        let (serious, _) = lab.problems();
        assert_eq!(serious, 0, "round {round}, {moment:?}");
        let now = lab.images();
        if now != images {
            // It had come to the very last step, and then all of it must be there.
            assert_eq!(now.len(), images.len() + 1, "round {round}, {moment:?}: {now:?}");
            lab.run(&["rm", "b"]).ok();
        } else {
            assert!(ended.is_none_or(|s| !s.success()), "round {round}: it succeeded, but where is the image?");
        }
        // Every other round the next import finds what this one left.
        if round % 2 == 0 {
            lab.run(&["gc"]).ok();
            assert_eq!(lab.problems(), (0, 0), "round {round}, {moment:?}");
            assert_eq!(files_of(&lab.root), files, "round {round}, {moment:?}");
        }
    }
    assert!(killed >= count - count / 5, "only {killed} imports were killed before their end");

    lab.take(&source, "b");
    lab.run(&["gc"]).ok();
    assert_eq!(lab.problems(), (0, 0));
    let point = lab.mount("b", "erofs", "m");
    source.is_right(&point);
    lab.umount(&point);
    lab.run(&["rm", "b"]).ok();
    lab.stop();
    lab.run(&["gc"]).ok();
    assert_eq!(files_of(&lab.root), files);
}

#[test]
fn priv_what_a_killed_import_left_does_not_get_into_the_next_image() {
    skip_if!("priv_what_a_killed_import_left_does_not_get_into_the_next_image", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 2);
    for ending in [".pack", ".map", ".chunks"] {
        lab.take(&source, "a");
        lab.run(&["rm", "a"]).ok();
        // As if killed while its object was moved to its place: not all parts of it are there.
        std::fs::remove_file(the(&lab.root, "objects", ending)).unwrap();
        assert_eq!(lab.problems().0, 0, "without {ending}, which no image needs");
        lab.take(&source, "a");
        assert_eq!(lab.problems().0, 0, "without {ending}");
        let point = lab.mount("a", "tree", "m");
        source.is_right(&point);
        lab.umount(&point);
        lab.stop();
        lab.cold();
        lab.run(&["rm", "a"]).ok();
        lab.run(&["gc"]).ok();
        assert!(find(&lab.root, "objects", "").is_empty());
    }
}

#[test]
fn priv_a_gc_killed_at_any_moment_takes_nothing_that_is_needed() {
    skip_if!("priv_a_gc_killed_at_any_moment_takes_nothing_that_is_needed", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "kept", 3);
    lab.take(&source, "kept");
    let others: Vec<Source> = (0..12)
        .map(|i| {
            let mut other = Source::new(lab.path(&format!("other{i}")));
            other.add("f", Random(200 + i).noise(50_000));
            other
        })
        .collect();
    let files = files_of(&lab.root);
    let point = lab.mount("kept", "erofs", "m");
    let count = rounds(8);
    let mut took = Duration::ZERO;
    for round in 0..=count {
        // Each in an object of its own; together they have a merged table.
        for (i, other) in others.iter().enumerate() {
            lab.take(other, &format!("other{i}"));
        }
        for i in 0..others.len() {
            lab.run(&["rm", &format!("other{i}")]).ok();
        }
        let began = Instant::now();
        let mut gc = lab.command(&["gc"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        if round > 0 {
            let until = began + took * round as u32 / count as u32;
            while Instant::now() < until && gc.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_micros(50));
            }
            gc.kill().unwrap();
        }
        gc.wait().unwrap();
        took = if round == 0 { began.elapsed() } else { took };
        assert_eq!(lab.problems().0, 0, "round {round}");
        assert_eq!(lab.images().len(), 1);
    }
    lab.run(&["gc"]).ok();
    assert_eq!(lab.problems(), (0, 0));
    assert_eq!(files_of(&lab.root), files);
    source.is_right(&point);
}
