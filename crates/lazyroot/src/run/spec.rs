//! A container's `config.json`: a pure function of what was decided before.
//!
//! The same input gives the same text, so it can be compared with a golden one; the runtime's own types read it in
//! the tests. Nothing here looks at the host.

use super::user::User;
use super::volume::Volume;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What runc gives a process by default.
pub const DEFAULT_CAPABILITIES: [&str; 3] = ["CAP_AUDIT_WRITE", "CAP_KILL", "CAP_NET_BIND_SERVICE"];

/// The search path of an image that names none.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Kernel interfaces that say too much about the host.
const MASKED: [&str; 11] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];

/// Kernel interfaces that a container may look at but not turn.
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// How cgroups are used on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroups {
    /// The container's own group; none where the hierarchy cannot be written.
    pub path: Option<String>,
    /// Whether the container sees its group at `/sys/fs/cgroup`, in a cgroup namespace.
    pub mount: bool,
}

/// Everything that has been decided.
#[derive(Debug, Clone)]
pub struct Decided {
    /// Host name.
    pub hostname: String,
    /// The mounted root file system, on the host.
    pub rootfs: String,
    /// Command line.
    pub args: Vec<String>,
    /// Environment.
    pub env: Vec<String>,
    /// Working directory.
    pub cwd: String,
    /// Whom it runs as.
    pub user: User,
    /// Whether it gets a terminal.
    pub terminal: bool,
    /// Whether it shares the host's network.
    pub host_network: bool,
    /// Binds, with sources made absolute; and whether each source is a directory is the runtime's business.
    pub volumes: Vec<Volume>,
    /// Capabilities.
    pub capabilities: Vec<String>,
    /// Annotations: the image's labels and our own.
    pub annotations: BTreeMap<String, String>,
    /// Cgroups.
    pub cgroups: Cgroups,
    /// The system call filter.
    pub seccomp: Value,
}

/// The `config.json`.
pub fn config(d: &Decided) -> Value {
    let mut namespaces = vec!["pid", "ipc", "uts", "mount"];
    if !d.host_network {
        namespaces.push("network");
    }
    if d.cgroups.mount {
        namespaces.push("cgroup");
    }
    let namespaces: Vec<Value> = namespaces.iter().map(|n| json!({"type": n})).collect();
    let mut linux = json!({
        "namespaces": namespaces,
        "maskedPaths": MASKED,
        "readonlyPaths": READ_ONLY,
        "seccomp": d.seccomp,
    });
    if let Some(path) = &d.cgroups.path {
        linux["cgroupsPath"] = json!(path);
        linux["resources"] = json!({"devices": [{"allow": false, "access": "rwm"}]});
    }
    let caps = &d.capabilities;
    // Only root keeps them across its exec; anybody else would get them as ambient ones, which runc does not do
    // by default either.
    json!({
        "ociVersion": "1.0.2",
        "hostname": d.hostname,
        "root": {"path": d.rootfs, "readonly": false},
        "process": {
            "terminal": d.terminal,
            "user": {"uid": d.user.uid, "gid": d.user.gid, "additionalGids": d.user.groups},
            "args": d.args,
            "env": d.env,
            "cwd": d.cwd,
            "capabilities": {"bounding": caps, "effective": caps, "permitted": caps},
            "noNewPrivileges": true,
        },
        "mounts": mounts(d),
        "annotations": d.annotations,
        "linux": linux,
    })
}

fn mounts(d: &Decided) -> Vec<Value> {
    let mount = |destination: &str, kind: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": kind, "options": options});
    let mut mounts = vec![
        mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
        mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
    ];
    if d.cgroups.mount {
        mounts.push(mount("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]));
    }
    for volume in &d.volumes {
        let access = if volume.read_only { "ro" } else { "rw" };
        mounts.push(json!({
            "destination": volume.target, "type": "bind", "source": volume.source,
            "options": ["rbind", "rprivate", access],
        }));
    }
    mounts
}

/// The annotations that an image's labels become: those that only describe. Runtimes take others as orders (crun's
/// `run.oci.keep_original_groups`, `run.oci.handler`, `run.oci.seccomp.plugins`; runc's `org.criu.config` and
/// `org.systemd.property.*`), and those are not an image's to give.
pub fn annotations(labels: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let describes = |key: &str| key.starts_with("org.opencontainers.image.");
    labels.iter().filter(|(key, _)| describes(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The name of a capability as the kernel spells it, from `NAME` or `CAP_NAME` in any case; `None` for unknown ones.
pub fn capability(name: &str) -> Option<String> {
    const KNOWN: &str = "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE \
        NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE \
        SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL \
        SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE";
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
    KNOWN.split_ascii_whitespace().find(|k| *k == short).map(|k| format!("CAP_{k}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided() -> Decided {
        Decided {
            hostname: "box".into(),
            rootfs: "/run/x/rootfs".into(),
            args: vec!["/bin/sh".into(), "-c".into(), "true".into()],
            env: vec![format!("PATH={DEFAULT_PATH}"), "HOME=/root".into()],
            cwd: "/".into(),
            user: User { uid: 33, gid: 34, groups: vec![4, 29], home: "/".into() },
            terminal: false,
            host_network: false,
            volumes: vec!["/src:/dst:ro".parse().unwrap(), "/s2:/d2".parse().unwrap()],
            capabilities: DEFAULT_CAPABILITIES.map(str::to_owned).to_vec(),
            annotations: BTreeMap::from([("org.lazyroot.image".to_owned(), "a:latest".to_owned())]),
            cgroups: Cgroups { path: Some("/lazyroot/box".into()), mount: true },
            seccomp: json!({"defaultAction": "SCMP_ACT_ALLOW"}),
        }
    }

    #[test]
    fn the_configuration_is_the_golden_one() {
        let have = serde_json::to_string_pretty(&config(&decided())).unwrap();
        let want = include_str!("golden/config.json");
        assert_eq!(have, want.trim_end(), "rerun with the new text if the change is meant:\n{have}");
    }

    #[test]
    fn the_runtime_types_read_it() {
        let mut d = decided();
        d.seccomp = crate::run::seccomp::profile("x86_64", &d.capabilities);
        for (terminal, host, mount) in [(false, false, true), (true, true, false)] {
            d.terminal = terminal;
            d.host_network = host;
            d.cgroups.mount = mount;
            let spec: oci_spec::runtime::Spec = serde_json::from_value(config(&d)).unwrap();
            let linux = spec.linux().as_ref().unwrap();
            let mut spaces = linux.namespaces().as_ref().unwrap().iter();
            assert_eq!(spaces.any(|n| n.typ() == oci_spec::runtime::LinuxNamespaceType::Network), !host);
            assert_eq!(spec.process().as_ref().unwrap().terminal(), Some(terminal));
            let mounts = spec.mounts().as_ref().unwrap();
            assert_eq!(mounts.iter().any(|m| m.destination().ends_with("cgroup")), mount);
            assert_eq!(spec.process().as_ref().unwrap().no_new_privileges(), Some(true));
        }
    }

    #[test]
    fn labels_give_a_runtime_no_orders() {
        let labels = [
            "org.opencontainers.image.title",
            "maintainer",
            "run.oci.keep_original_groups",
            "run.oci.seccomp.plugins",
            "run.oci.handler",
            "org.criu.config",
            "org.systemd.property.DeviceAllow",
        ];
        let labels = labels.map(|l| (l.to_owned(), "1".to_owned())).into();
        assert_eq!(annotations(&labels).into_keys().collect::<Vec<_>>(), ["org.opencontainers.image.title"]);
    }

    #[test]
    fn capabilities_have_one_spelling() {
        for (name, want) in
            [("chown", Some("CAP_CHOWN")), ("CAP_SETUID", Some("CAP_SETUID")), ("fly", None), ("", None)]
        {
            assert_eq!(capability(name).as_deref(), want, "{name}");
        }
    }
}
