//! What the C library's allocator does with memory that is free, which does nothing where that is not glibc, and what
//! the kernel does with the program's pages.

use std::io;
use std::os::unix::ffi::OsStrExt;

/// From now on buffers of 128 KiB and more go back to the kernel when they are freed. By itself the C library raises that
/// bound to the size of what was freed last, up to 32 MiB, and keeps as much again in each thread's arena. To be
/// called once, early, by a program that handles large buffers and lives long.
#[allow(unsafe_code)]
pub fn return_large_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes two numbers and sets a parameter of the allocator under its own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
    }
}

/// Gives memory that was freed back to the kernel. The C library keeps what large buffers leave behind in case that
/// they come again; a daemon that has gone idle has no use for it. Costs milliseconds at most.
#[allow(unsafe_code)]
pub fn release_free() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes a number, may be called by any thread at any time and touches free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Reads this process's program into memory and maps it, all of it. Pages that a process has mapped are among the last
/// that the kernel gives up, so while a daemon runs its clients start without a read from disk. How many bytes.
///
/// # Errors
/// `/proc/self` cannot be read, or the kernel is older than 5.14 (MADV_POPULATE_READ).
#[allow(unsafe_code)]
pub fn keep_program() -> io::Result<usize> {
    let program = std::fs::read_link("/proc/self/exe")?;
    let maps = std::fs::read("/proc/self/maps")?;
    let mut kept = 0;
    for (start, len) in maps.split(|b| *b == b'\n').filter_map(|line| mapped_from(line, program.as_os_str().as_bytes()))
    {
        // SAFETY: the range was mapped from the program a moment ago and a program is never unmapped while it runs;
        // even so, MADV_POPULATE_READ only faults pages in for reading and fails where nothing is mapped.
        if unsafe { libc::madvise(start as *mut libc::c_void, len, libc::MADV_POPULATE_READ) } != 0 {
            return Err(io::Error::last_os_error());
        }
        kept += len;
    }
    Ok(kept)
}

/// Start and length of a mapping that is no private copy, if this line of `/proc/PID/maps` is about `file`.
fn mapped_from(line: &[u8], file: &[u8]) -> Option<(usize, usize)> {
    // The path is the sixth field, has leading blanks, and may have blanks inside.
    let mut fields = line.splitn(6, |b| *b == b' ');
    let (range, access) = (fields.next()?, fields.next()?);
    let path = fields.nth(3)?.trim_ascii_start();
    if path != file || access.first() != Some(&b'r') || access.get(1) == Some(&b'w') {
        return None;
    }
    let (start, end) = std::str::from_utf8(range).ok()?.split_once('-')?;
    let hex = |text| usize::from_str_radix(text, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    Some((start, end.checked_sub(start)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_kept() {
        match keep_program() {
            // At least the text of this test.
            Ok(kept) => assert!(kept > 100 << 10, "{kept}"),
            Err(e) => println!("SKIP the_program_is_kept: {e}"),
        }
    }

    #[test]
    fn lines_of_maps() {
        let line = b"55c0874c5000-55c0875df000 r-xp 00119000 fe:00 326269                     /a b/c (deleted)";
        assert_eq!(mapped_from(line, b"/a b/c (deleted)"), Some((0x55c0_874c_5000, 0x11_a000)));
        assert_eq!(mapped_from(line, b"/a b/c"), None);
        assert_eq!(mapped_from(b"55c0874c5000-55c0875df000 rw-p 0 fe:00 1    /x", b"/x"), None, "a private copy");
        assert_eq!(mapped_from(b"7f7a5cae1000-7f7a5caea000 r--p 00000000 00:00 0 ", b"/x"), None);
        assert_eq!(mapped_from(b"", b"/x"), None);
    }

    /// Bytes of anonymous memory that are resident.
    fn resident() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn freed_memory_goes_back() {
        // Many small blocks and one that stays behind them, so that nothing goes back by itself.
        let blocks: Vec<Vec<u8>> = (0..16_384).map(|i| vec![i as u8; 4096]).collect();
        let kept = vec![1u8; 4096];
        let before = resident();
        drop(blocks);
        release_free();
        let after = resident();
        assert!(after + (32 << 20) < before, "{before} before, {after} after");
        assert!(kept.iter().all(|b| *b == 1));
    }
}
