//! The system calls that a container may make: an allow list in the runtime's form.
//!
//! Everything else fails with EPERM. Left out is what reaches the machine beyond the container (modules, kexec,
//! clocks, swap, bpf, keyrings, mounts, namespaces) or is obsolete. `clone3` fails with ENOSYS, because its flags lie
//! in memory where a filter cannot see them; C libraries then use `clone`. Names that a machine does not have are
//! ignored by the runtimes, so one list serves all architectures.

use serde_json::{Value, json};

const FILES: &str = "access chdir chmod chown chown32 close close_range copy_file_range creat dup dup2 dup3 faccessat \
    faccessat2 fadvise64 fadvise64_64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl \
    fcntl64 fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 \
    fsync ftruncate ftruncate64 futimesat getcwd getdents getdents64 getxattr getxattrat inotify_add_watch \
    inotify_init inotify_init1 inotify_rm_watch ioctl lchown lchown32 lgetxattr link linkat listxattr listxattrat \
    llistxattr _llseek lremovexattr lseek lsetxattr lstat lstat64 mkdir mkdirat mknod mknodat newfstatat open openat \
    openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr \
    removexattrat rename renameat renameat2 rmdir sendfile sendfile64 setxattr setxattrat splice stat stat64 statfs \
    statfs64 statmount listmount statx symlink symlinkat sync sync_file_range sync_file_range2 arm_sync_file_range \
    syncfs tee truncate truncate64 umask unlink unlinkat utime utimensat utimensat_time64 utimes vmsplice write \
    writev cachestat memfd_create memfd_secret name_to_handle_at landlock_create_ruleset landlock_add_rule \
    landlock_restrict_self pipe pipe2 map_shadow_stack";
const MEMORY: &str = "brk madvise mincore mlock mlock2 mlockall mmap mmap2 mprotect mremap msync munlock munlockall munmap \
    pkey_alloc pkey_free pkey_mprotect process_madvise process_mrelease remap_file_pages mseal membarrier";
const PROCESSES: &str = "alarm arch_prctl capget capset execve execveat exit exit_group fork getegid getegid32 geteuid \
    geteuid32 getgid getgid32 getgroups getgroups32 getpgid getpgrp getpid getppid getpriority getresgid \
    getresgid32 getresuid getresuid32 getrlimit get_robust_list getrusage getsid get_thread_area gettid getuid \
    getuid32 ioprio_get ioprio_set kill pidfd_open pidfd_send_signal pidfd_getfd pause prctl prlimit64 ptrace \
    process_vm_readv process_vm_writev rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn \
    rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_getaffinity sched_getattr \
    sched_getparam sched_get_priority_max sched_get_priority_min sched_getscheduler sched_rr_get_interval \
    sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield \
    seccomp setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer getitimer \
    setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 \
    setrlimit set_robust_list setsid set_thread_area set_tid_address set_tls setuid setuid32 sigaltstack sigreturn \
    signalfd signalfd4 sigprocmask tgkill tkill ugetrlimit vfork wait4 waitid waitpid getcpu sysinfo uname times \
    breakpoint cacheflush restart_syscall riscv_flush_icache riscv_hwprobe";
const WAITING: &str = "clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep \
    clock_nanosleep_time64 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait \
    epoll_wait_old eventfd eventfd2 futex futex_time64 futex_waitv futex_wait futex_wake futex_requeue getrandom \
    gettimeofday io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit nanosleep \
    _newselect poll ppoll ppoll_time64 pselect6 pselect6_time64 select time timer_create timer_delete \
    timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime \
    timerfd_gettime64 timerfd_settime timerfd_settime64";
const TALKING: &str = "accept accept4 bind connect getpeername getsockname getsockopt listen recv recvfrom recvmmsg \
    recvmmsg_time64 recvmsg send sendmmsg sendmsg sendto setsockopt shutdown socketcall socketpair ipc mq_getsetattr \
    mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink msgctl msgget \
    msgrcv msgsnd semctl semget semop semtimedop semtimedop_time64 shmat shmctl shmdt shmget";

/// Flags of clone(2) that make namespaces: a call with any of them is refused.
const CLONE_NAMESPACES: u64 = 0x7e02_0000;
/// `AF_VSOCK`: reaches the hypervisor past any network namespace.
const VSOCK: u64 = 40;
const ENOSYS: u32 = 38;
/// What personality(2) may be set to: Linux, its 32-bit form, without randomisation, and the query.
const PERSONALITIES: [u64; 5] = [0x0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// The architectures whose calls the filter knows, by the machine's.
fn architectures(machine: &str) -> Vec<&'static str> {
    match machine {
        "x86_64" => vec!["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "aarch64" => vec!["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
        "riscv64" => vec!["SCMP_ARCH_RISCV64"],
        "powerpc64" => vec!["SCMP_ARCH_PPC64LE"],
        "s390x" => vec!["SCMP_ARCH_S390X", "SCMP_ARCH_S390"],
        _ => Vec::new(),
    }
}

/// The filter for `machine` (as in `std::env::consts::ARCH`) and a process with `capabilities`.
pub fn profile(machine: &str, capabilities: &[String]) -> Value {
    let groups = [FILES, MEMORY, PROCESSES, WAITING, TALKING];
    let mut names: Vec<&str> = groups.iter().flat_map(|g| g.split_ascii_whitespace()).collect();
    if capabilities.iter().any(|c| c == "CAP_SYS_CHROOT") {
        names.push("chroot");
    }
    names.sort_unstable();
    names.dedup();
    let mut rules = vec![
        json!({"names": names, "action": "SCMP_ACT_ALLOW"}),
        json!({"names": ["socket"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": VSOCK, "op": "SCMP_CMP_NE"}]}),
        json!({"names": ["clone"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": CLONE_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]}),
        json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}),
    ];
    for value in PERSONALITIES {
        rules.push(json!({"names": ["personality"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": value, "op": "SCMP_CMP_EQ"}]}));
    }
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "architectures": architectures(machine),
        "syscalls": rules,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reaches_beyond_a_container_is_not_allowed() {
        let profile = profile("x86_64", &[]);
        let text = profile.to_string();
        for name in [
            "mount",
            "umount2",
            "unshare",
            "setns",
            "bpf",
            "init_module",
            "finit_module",
            "kexec_load",
            "reboot",
            "swapon",
            "keyctl",
            "add_key",
            "ptrace_",
            "open_by_handle_at",
            "perf_event_open",
            "userfaultfd",
            "io_uring_setup",
            "clock_settime",
            "settimeofday",
            "iopl",
            "pivot_root",
            "fsopen",
            "move_mount",
            "chroot",
            "quotactl",
        ] {
            assert!(!text.contains(&format!("\"{name}\"")), "{name}");
        }
        for name in ["read", "execve", "futex", "statx", "openat2", "faccessat2", "rseq"] {
            assert!(text.contains(&format!("\"{name}\"")), "{name}");
        }
        assert!(super::profile("x86_64", &["CAP_SYS_CHROOT".into()]).to_string().contains("\"chroot\""));
    }

    #[test]
    fn the_runtime_types_read_it() {
        for machine in ["x86_64", "aarch64", "something"] {
            let parsed: oci_spec::runtime::LinuxSeccomp = serde_json::from_value(profile(machine, &[])).unwrap();
            assert_eq!(parsed.syscalls().as_ref().unwrap().len(), 4 + PERSONALITIES.len());
        }
    }
}
