//! What an import takes of memory: so much a name, whatever the size of what it names. `doc/operations.md` says the
//! same figures.
//!
//! Each import runs in a process of its own, which says the most that it ever had resident (VmHWM).

mod common;

use common::{Home, name, options};
use lazyroot_import::{Source, import};
use std::io::{BufWriter, Write};
use std::process::{Command, Stdio};
use store::Store;

/// Set in the children: the store's root, and where to write the figure.
const CHILD: &str = "LAZYROOT_TEST_MEMORY";

/// The promise, and the names that it is made for by default.
const PROMISED: u64 = 256 << 20;
const NAMES: u64 = 2_000_000;
/// Bytes that one more name may cost.
const PER_NAME: u64 = 110;

/// Not a test: what the others start.
#[test]
fn child() {
    let Ok(spec) = std::env::var(CHILD) else { return };
    let (root, result) = spec.split_once('\n').unwrap();
    let store = Store::open(root.as_ref()).unwrap();
    import(&store, &Source::parse("tar:-").unwrap(), &name("test"), &options()).unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    std::fs::write(result, line.split_whitespace().nth(1).unwrap()).unwrap();
}

/// The most memory that an import of the archive that `make` writes had, bytes.
fn peak(make: impl FnOnce(&mut dyn Write)) -> u64 {
    let home = Home::new();
    let result = home.dir.path().join("result");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child"]).env(CHILD, format!("{}\n{}", home.store.root().display(), result.display()));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut out = BufWriter::with_capacity(1 << 20, child.stdin.take().unwrap());
    make(&mut out);
    out.write_all(&[0; 1024]).unwrap();
    drop(out);
    assert!(child.wait().unwrap().success());
    std::fs::read_to_string(result).unwrap().parse::<u64>().unwrap() << 10
}

/// A header, as ustar has it.
fn header(name: &str, size: u64) -> [u8; 512] {
    let mut h = [0u8; 512];
    h[..name.len()].copy_from_slice(name.as_bytes());
    h[100..107].copy_from_slice(b"0000644");
    h[108..115].copy_from_slice(b"0000000");
    h[116..123].copy_from_slice(b"0000000");
    h[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    h[136..147].copy_from_slice(b"14524656000");
    h[148..156].copy_from_slice(b"        ");
    h[156] = b'0';
    h[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = h.iter().map(|&b| u32::from(b)).sum();
    h[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    h
}

/// So many empty files in one directory, not in order.
fn names(out: &mut dyn Write, count: u64) {
    for n in 0..count {
        let n = n * 7_919 % count;
        out.write_all(&header(&format!("d/file-{n:07}"), 0)).unwrap();
    }
}

#[test]
fn a_name_costs_few_bytes_and_the_default_limit_fits() {
    let (few, many) = (200_000, 450_000);
    let (small, large) = (peak(|out| names(out, few)), peak(|out| names(out, many)));
    let each = large.saturating_sub(small) / (many - few);
    let most = small + (NAMES - few) * each;
    let said = format!("{few} names: {small} bytes, {many}: {large}, so {each} each and {most} for {NAMES}");
    println!("{said}");
    assert!(each <= PER_NAME, "{said}");
    assert!(most < PROMISED, "{said}");
}

#[test]
fn content_costs_nothing_whatever_its_size() {
    let file = |mib: u64| {
        move |out: &mut dyn Write| {
            out.write_all(&header("file", mib << 20)).unwrap();
            let mut n = 0u64;
            let mut block = vec![0u8; 64 << 10];
            for _ in 0..mib * 16 {
                for word in block.chunks_exact_mut(8) {
                    n += 1;
                    word.copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
                }
                out.write_all(&block).unwrap();
            }
        }
    };
    let (small, large) = (peak(file(60)), peak(file(600)));
    println!("60 MiB: {small} bytes, 600 MiB: {large}");
    assert!(large < 64 << 20, "{large} bytes");
    // 45 bytes for each of 8,640 chunks more, and some give and take.
    assert!(large < small + (6 << 20), "60 MiB take {small} bytes, 600 MiB {large}");
}
