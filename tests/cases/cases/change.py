"""Type changes, and the attributes of directories."""

from caselib import *  # noqa: F403


@case(
    "chg_dir_to_symlink",
    "directory with content replaced by a symlink, no whiteout",
    why=SPEC + ": remove the path, then recreate it",
    seen=["NERSC/shifter#50", "goldmann/docker-squash#120"],
)
def chg_dir_to_symlink(c):
    c.simple(
        [d("data"), f("data/old", "o\n"), d("data/sub"), f("data/sub/deep", "d\n"), d("real"), f("real/r", "r\n")],
        [l("data", "real")],
    )


@case(
    "chg_dir_to_file",
    "directory replaced by a regular file, file by fifo, symlink by symlink",
    why=SPEC + ": remove then recreate",
    seen=["hpc/charliecloud#825", "camallo/dkregistry-rs#149"],
)
def chg_dir_to_file(c):
    c.simple(
        [d("d"), f("d/x", "x"), d("d/e"), f("f1", "1"), l("s", "one"), f("f2", "2")],
        [f("d", "now a file\n", mode=0o444), E("f1", "p", mode=0o600), l("s", "two"), d("f2")],
    )


@case(
    "chg_dir_attrs",
    "directory over directory: attributes replaced (mode, owner, mtime, xattrs), children kept",
    why=SPEC + ": both directories -> existing attributes MUST be replaced",
    seen=["containers/storage#743", "opencontainers/image-spec#737"],
)
def chg_dir_attrs(c):
    c.simple(
        [d("d", 0o700, uid=1000, gid=1000, xattrs={"user.old": b"1", "user.both": b"1"}), f("d/k", "k\n", uid=1000)],
        [d("d", 0o2755, uid=7, gid=8, mtime_ns=1600000000 * NS, xattrs={"user.both": b"2"})],
    )


@case(
    "chg_implicit_parent_lower",
    "upper layer omits the parent entry: the lower directory keeps its attributes",
    why=SPEC + ": the spec's own example changeset omits ./etc/; nothing says its attributes change",
    seen=["opencontainers/image-spec#1221", "containerd/containerd#3017", "moby/moby#44140"],
)
def chg_implicit_parent_lower(c):
    c.simple(
        [d("srv", 0o1770, uid=33, gid=44, xattrs={"user.a": b"b"}), d("srv/in", 0o700, uid=33)],
        [f("srv/in/new", "n\n", uid=33)],
    )


@case(
    "chg_implicit_parents",
    "no directory entries at all: parents are 0755 root:root",
    why="containerd/moby/c-storage: missing parents 0755; image-spec PR 970",
    seen=["containerd/containerd#3017", "containers/storage#1288", "opencontainers/image-spec#970"],
)
def chg_implicit_parents(c):
    c.simple([f("etc/ssl/certs/ca.crt", "cert\n"), f("usr/bin/x", "x", mode=0o755), l("a/b/c/l", "x"), E("dev/p", "p")])


@case(
    "chg_dir_after_child",
    "directory entries after their children, with restrictive modes and old mtimes",
    why="GNU tar: directory metadata is set last; the entry's own values count",
    seen=["ostreedev/ostree-rs-ext#186", "GoogleContainerTools/kaniko#2308"],
)
def chg_dir_after_child(c):
    c.simple(
        [
            f("d/e/x", "x\n"),
            f("d/y", "y\n"),
            d("d/e", 0o555, mtime_ns=1 * NS, uid=3),
            d("d", 0, mtime_ns=2 * NS, gid=4),
            d("ro", 0o500),
            f("ro/z", "z"),
        ]
    )


@case(
    "chg_symlink_parent_same",
    "entries that go through a symlink made earlier in the same layer (usr-merge)",
    why="containerd and umoci resolve the parent inside the image root, absolute targets too"
    " (GNU tar and bsdtar refuse to go through the absolute one)",
    seen=["NixOS/nixpkgs#107021", "clearlinux/distribution#1765"],
)
def chg_symlink_parent_same(c):
    c.simple(
        [d("usr"), d("usr/lib"), l("lib", "usr/lib"), f("lib/a.so", "A"), l("lib64", "/usr/lib"), f("lib64/b.so", "B")]
    )
