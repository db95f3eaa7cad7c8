"""Imports of a directory."""

import os

from caselib import *  # noqa: F403

from .xattr import CAP


@case(
    "dir_mixed",
    "directory import with every file type, sockets included, owners, xattrs and odd modes",
    why=SPEC + " lists sockets as a file type; lstat of source and mount agree",
    seen=["vmware/vic#5714"],
    kind="dir",
)
def dir_mixed(c):
    c.directory(
        [
            d("", 0o711, uid=3),
            d("etc", 0o1777),
            f("etc/a", "a\n", mode=0o4711, uid=70000, gid=4294967294, xattrs={"user.x": b"\0\xff"}),
            l("etc/l", "a", uid=5),
            E("p", "p", mode=0o640),
            E("c00", "c", mode=0, dev=(0, 0)),
            E("null", "c", mode=0o666, dev=(1, 3)),
            E("loop", "b", mode=0o660, dev=(7, 300)),
            E("sock", "s", mode=0o755),
            f("secret", "s", mode=0),
            d("closed", 0),
            f("closed/in", "in", mode=0o200),
            f("cap", "#!\n", mode=0o755, xattrs={"security.capability": CAP}),
            f("ns", "n", mtime_ns=1700000000987654321),
            f("neg", "n", mtime_ns=-1500000000),
            f(b"by\xe4", "b"),
            f("empty"),
            d("emptydir", 0o555),
        ]
    )
    c.not_through("overlay", "overlayfs takes a 0:0 character device for a whiteout")


@case(
    "dir_hardlinks",
    "hard links of files, symlinks and FIFOs stay; a link to a file outside the tree is not counted",
    why="one inode, nlink = names inside the image",
    seen=["composefs/composefs#444", "tytso/e2fsprogs#48", "dragonflyoss/nydus#1983"],
    kind="dir",
)
def dir_hardlinks(c):
    L = [
        f("a", "shared\n"),
        h("b", "a"),
        d("sub"),
        h("sub/c", "a"),
        l("s1", "a"),
        h("sub/s2", "s1"),
        E("p1", "p"),
        h("sub/p2", "p1"),
        f("copy", "shared\n"),
        f("lonely", "outside link exists\n"),
    ]
    c.directory(L)
    os.link(os.path.join(c.out, "src/lonely"), os.path.join(c.out, "outside_name"))
    c.note("src/lonely has st_nlink 2 on the host because of ../outside_name; the image must say 1")


@case(
    "dir_holes",
    "files with holes at every place, read from a directory",
    why="lseek(2): SEEK_DATA, SEEK_HOLE; the same bytes whether a zero is stored or not",
    kind="dir",
)
def dir_holes(c):
    c.directory(
        [
            f("only", Sparse(MIB, [])),
            f("head", Sparse(MIB, [(0, blob("h", 5000))])),
            f("tail", Sparse(MIB + 100, [(MIB, blob("t", 100))])),
            f("comb", Sparse(4 * MIB, [(i * 128 * KIB, blob("c%d" % i, 4096)) for i in range(32)])),
            f("zeros", b"\0" * 300000),
        ]
    )
