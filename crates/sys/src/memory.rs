//! What the C library's allocator does with memory that is free. All of it does nothing where that is not glibc.

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

#[cfg(test)]
mod tests {
    use super::*;

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
