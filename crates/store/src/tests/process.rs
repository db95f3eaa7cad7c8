//! Other processes: locks that go with them, imports that are killed.

use super::*;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const ROLE: &str = "LAZYROOT_TEST_STORE_CHILD";
const ROOT: &str = "LAZYROOT_TEST_STORE_ROOT";

/// Not a test of its own: what the child processes of the tests below run.
#[test]
fn child() {
    let (Ok(role), Ok(root)) = (std::env::var(ROLE), std::env::var(ROOT)) else { return };
    let store = Store::open(Path::new(&root)).unwrap();
    let ready = || println!("\nREADY");
    match role.as_str() {
        "import" => {
            let session = store.import().unwrap();
            let _written = write_image(&session, "killed", &[content(7, 60_000)]).unwrap();
            ready();
            std::thread::sleep(Duration::from_secs(600));
        }
        "open" => {
            let record = store.image(&name("a")).unwrap();
            let _index = store.index_file(&record.index).unwrap();
            ready();
            std::thread::sleep(Duration::from_secs(600));
        }
        // Imports for ever, always the same content under two names in turn.
        "loop" => {
            ready();
            for i in 0u64.. {
                let chunks: Vec<Vec<u8>> = (0..8).map(|k| content(i % 2 * 100 + k, 65_000 >> k)).collect();
                import(&store, ["even", "odd"][i as usize % 2], &chunks).unwrap();
                if i % 2 == 1 {
                    store.remove(&name("even")).unwrap();
                }
            }
        }
        _ => unreachable!(),
    }
}

/// A child that is killed at the end, whatever happens.
struct Killed(Child);

impl Killed {
    fn start(role: &str, store: &Store) -> Killed {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["tests::process::child", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(ROOT, store.root())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let ready = out.lines().map_while(Result::ok).any(|line| line == "READY");
        let child = Killed(child);
        assert!(ready, "the child is at work");
        child
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // SIGKILL.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn impatient() -> GcOptions {
    GcOptions { wait: Duration::from_millis(20) }
}

#[test]
fn a_killed_import_leaves_the_store_as_it_was() {
    let (_dir, store) = new_store();
    import(&store, "a", &[content(1, 1000)]).unwrap();
    let objects = list(&store.layout.objects()).unwrap();
    let child = Killed::start("import", &store);
    assert!(matches!(store.gc(&impatient()), Err(StoreError::Busy { .. })), "its import holds the lock");
    import(&store, "b", &[content(2, 1000)]).unwrap();
    assert_eq!(list(&store.layout.tmp()).unwrap().len(), 1, "the other import did not take its directory for stale");
    drop(child);
    store.remove(&name("b")).unwrap();
    assert_eq!(names(&store), ["a:latest"]);
    let report = store.gc(&impatient()).unwrap();
    assert_eq!((report.leftovers, report.objects.len()), (1, 1));
    assert!(list(&store.layout.tmp()).unwrap().is_empty());
    assert_eq!(list(&store.layout.objects()).unwrap(), objects);
}

#[test]
fn the_next_import_removes_what_a_killed_one_left() {
    let (_dir, store) = new_store();
    drop(Killed::start("import", &store));
    assert_eq!(list(&store.layout.tmp()).unwrap().len(), 1);
    import(&store, "a", &[content(1, 1000)]).unwrap();
    assert!(list(&store.layout.tmp()).unwrap().is_empty());
}

#[test]
fn an_index_that_another_process_has_open_stays() {
    let (_dir, store) = new_store();
    let record = import(&store, "a", &[content(1, 1000)]).unwrap();
    let child = Killed::start("open", &store);
    store.remove(&name("a")).unwrap();
    assert_eq!(store.gc(&impatient()).unwrap().in_use, [record.index]);
    check_record(&store, &record);
    drop(child);
    assert_eq!(store.gc(&impatient()).unwrap().objects, record.objects);
}

#[test]
fn killed_again_and_again_at_any_moment() {
    let (_dir, store) = new_store();
    import(&store, "a", &[content(1, 1000)]).unwrap();
    for round in 0..20u64 {
        let child = Killed::start("loop", &store);
        // Another moment each time; what is there must be right at all of them.
        std::thread::sleep(Duration::from_millis(round * 7 % 40));
        drop(child);
        for (name, record) in store.images().unwrap() {
            let record = record.unwrap();
            assert_eq!(check_record(&store, &record), if name.name() == "a" { 1 } else { 8 });
        }
        if round % 5 == 4 {
            store.gc(&impatient()).unwrap();
            let report = store.fsck(&FsckOptions::default()).unwrap();
            assert!(report.problems.is_empty(), "{:?}", report.problems);
            assert!(list(&store.layout.tmp()).unwrap().is_empty());
        }
    }
    check(&store, &name("a"));
}
