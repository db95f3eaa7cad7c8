//! Reads whose bytes are not there yet, or never come.

use crate::common::*;
use lazyroot::front::fuse::wire::opcode;
use lazyroot::front::{Context, TreeOptions};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[test]
fn priv_a_silent_source_holds_nobody_else_up() {
    if skip("priv_a_silent_source_holds_nobody_else_up") {
        return;
    }
    const READERS: usize = 1000;
    let (tree, gate) = gated(READERS * 4096);
    let options = TreeOptions { read_ahead_kb: Some(0), ..Default::default() };
    let (session, root) = serve_with(tree, &options, Context::default());
    let slow = Arc::new(File::open(root.join("slow")).unwrap());
    let readers: Vec<_> = (0..READERS)
        .map(|i| {
            let slow = Arc::clone(&slow);
            let builder = std::thread::Builder::new().stack_size(64 << 10);
            builder
                .spawn(move || {
                    let mut buf = vec![0u8; 4096];
                    slow.read_exact_at(&mut buf, i as u64 * 4096).unwrap();
                    buf
                })
                .unwrap()
        })
        .collect();
    gate.await_waiting(READERS);
    assert_eq!(session.parked_now(), READERS);
    let there = root.clone();
    within(SOON, "reading everything else", move || {
        for e in std::fs::read_dir(there.join("d")).unwrap() {
            assert_eq!(std::fs::read(e.unwrap().path()).unwrap().len(), 1000);
        }
    });
    assert_eq!(session.parked_now(), READERS);
    gate.open();
    let want = pattern(READERS * 4096, 3);
    for (i, reader) in readers.into_iter().enumerate() {
        assert!(reader.join().unwrap() == want[i * 4096..][..4096]);
    }
    assert_eq!((session.parked_now(), session.counters().parked()), (0, READERS as u64));
}

#[test]
fn priv_a_killed_reader_goes_at_once() {
    if skip("priv_a_killed_reader_goes_at_once") {
        return;
    }
    let (tree, gate) = gated(1 << 20);
    let (session, root) = serve(tree);
    let file = root.join("slow").into_os_string().into_string().unwrap();
    // Through the page cache, where the kernel gives the reader up by itself, and directly, where it asks us to.
    for (i, flags) in ["", "iflag=direct"].into_iter().enumerate() {
        let mut command = Command::new("dd");
        command.args([&format!("if={file}"), "of=/dev/null", "bs=64k"]).stderr(Stdio::null());
        if !flags.is_empty() {
            command.arg(flags);
        }
        let mut child = command.spawn().unwrap();
        gate.await_waiting(i + 1);
        let began = Instant::now();
        child.kill().unwrap();
        let status = within(SOON, "a killed reader", move || child.wait().unwrap());
        assert_eq!(status.signal(), Some(9));
        assert!(began.elapsed() < SOON);
    }
    until("only the page cache's read is left", || session.parked_now() <= 1);
    gate.open();
    assert!(within(SOON, "a read later", move || std::fs::read(root.join("slow")).unwrap()) == pattern(1 << 20, 3));
}

#[test]
fn priv_a_signal_that_does_not_kill_does_not_fail_a_read() {
    if skip("priv_a_signal_that_does_not_kill_does_not_fail_a_read") {
        return;
    }
    let (tree, gate) = gated(8192);
    let (session, root) = serve(tree);
    // The shell handles USR1; its own read of the file is interrupted by it.
    let script = "import os,signal,sys\nsignal.signal(signal.SIGUSR1, lambda *a: None)\n\
                  fd=os.open(sys.argv[1], os.O_RDONLY|os.O_DIRECT)\nimport mmap\nm=mmap.mmap(-1,8192)\n\
                  n=os.preadv(fd,[m],0)\nsys.stdout.write(str(n))\n";
    let child = Command::new("python3").args(["-c", script]).arg(root.join("slow")).stdout(Stdio::piped()).spawn();
    let Ok(child) = child else {
        println!("SKIP priv_a_signal_that_does_not_kill_does_not_fail_a_read: no python3");
        return;
    };
    gate.await_waiting(1);
    let pid = sys::proc::PidFd::open(child.id() as i32).unwrap();
    let before = session.counters().requests(opcode::INTERRUPT);
    pid.signal(rustix::process::Signal::USR1).unwrap();
    until("the interruption came", || session.counters().requests(opcode::INTERRUPT) > before);
    assert_eq!(session.parked_now(), 1);
    gate.open();
    let out = within(SOON, "the reader", move || child.wait_with_output().unwrap());
    assert_eq!(out.stdout, b"8192");
}

#[test]
fn priv_a_fetch_that_fails_is_an_error_and_logged() {
    if skip("priv_a_fetch_that_fails_is_an_error_and_logged") {
        return;
    }
    let (tree, gate) = gated(8192);
    let log = Arc::new(KeptLog::default());
    let (_session, root) =
        serve_with(tree, &TreeOptions::default(), Context { log: log.clone(), ..Default::default() });
    let there = root.join("slow");
    let reader = start(move || errno(std::fs::read(there)));
    gate.await_waiting(1);
    // Each retry of the kernel's, single pages after the readahead, fails too.
    let failing = Arc::clone(&gate);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let fail = std::thread::spawn(move || {
        while stopped.try_recv().is_err() {
            failing.fail();
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert_eq!(reader.wait(SOON, "a failing read"), Errno::IO);
    stop.send(()).unwrap();
    fail.join().unwrap();
    assert!(
        log.0.lock().unwrap().iter().any(|l| l.starts_with("Error lazyroot: reading 8192 bytes at 0: ")),
        "{:?}",
        log.0
    );
    // Not for good: what failed is not remembered.
    gate.open();
    assert!(std::fs::read(root.join("slow")).unwrap() == pattern(8192, 3));
}

#[test]
fn priv_bytes_evicted_before_the_answer_are_fetched_again_but_not_for_ever() {
    if skip("priv_bytes_evicted_before_the_answer_are_fetched_again_but_not_for_ever") {
        return;
    }
    let (tree, gate) = gated(4096);
    let (_session, root) = serve(tree);
    gate.open();
    gate.evicted.store(4, Ordering::Relaxed);
    assert!(std::fs::read(root.join("slow")).unwrap() == pattern(4096, 3));
    assert_eq!(gate.fetches(), 4);
    let (tree, gate) = gated(4096);
    let (_session, root) = serve(tree);
    gate.open();
    gate.evicted.store(usize::MAX, Ordering::Relaxed);
    let there = root.join("slow");
    assert_eq!(within(SOON, "an endless eviction", move || errno(std::fs::read(there))), Errno::IO);
}

#[test]
fn priv_a_session_ends_while_reads_are_parked() {
    if skip("priv_a_session_ends_while_reads_are_parked") {
        return;
    }
    for attached in [false, true] {
        let (tree, gate) = gated(1 << 20);
        let (session, root) = serve(tree);
        let slow = File::open(root.join("slow")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().to_owned();
        let reader = start(move || {
            let mut buf = vec![0u8; 4096];
            errno(slow.read_at(&mut buf, 0))
        });
        gate.await_waiting(1);
        within(SOON, "ending the session", move || {
            if attached {
                sys::mount::enter_own_namespace().unwrap();
                sys::mount::attach(session.mount().unwrap(), sys::mount::open_target(&place).unwrap().as_fd()).unwrap();
                assert!(place.join("d/f1").exists());
            }
            session.stop();
            if attached {
                assert_eq!(errno(place.join("d/new").symlink_metadata()), Errno::NOTCONN);
                // The reader may not have closed its file yet.
                sys::mount::unmount(&place, sys::mount::UnmountFlags::DETACH).unwrap();
            }
        });
        let got = reader.wait(SOON, "the parked reader");
        assert!([Errno::IO, Errno::NOTCONN, Errno::CONNABORTED].contains(&got), "{got:?}");
        // The fetch may end at any time later.
        gate.open();
    }
}
