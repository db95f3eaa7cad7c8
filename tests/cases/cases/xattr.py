"""Extended attributes."""

import struct

from caselib import *  # noqa: F403

# capabilities(7): version 2, effective, cap_net_raw; and version 3 with root id 65536.
CAP = bytes.fromhex("0100000200200000000000000000000000000000")
CAP3 = bytes.fromhex("010000030004000000000000000000000000000000000100")


@case(
    "xattr_caps",
    "security.capability (v2 and v3) through PAX SCHILY.xattr",
    why="byte-exact value; capabilities(7)",
    seen=[
        "awslabs/soci-snapshotter#812",
        "containerd/overlaybd#301",
        "containerd/accelerated-container-image#251",
        "libarchive/libarchive#1756",
        "GoogleContainerTools/kaniko#1837",
    ],
)
def xattr_caps(c):
    c.simple(
        [
            d("bin"),
            f("bin/ping", "#!ping\n", mode=0o755, xattrs={"security.capability": CAP}),
            f("bin/ns", "#!ns\n", mode=0o755, xattrs={"security.capability": CAP3}),
        ]
    )


@case(
    "xattr_binary",
    "values with NUL, newline, '=' and 0xff; empty-ish names; UTF-8 names; and no leak of other PAX keys",
    why="PAX SCHILY.xattr value is raw bytes; other PAX keys are not xattrs",
    seen=["awslabs/soci-snapshotter#812", "dragonflyoss/nydus#994", "libarchive/libarchive#1756"],
)
def xattr_binary(c):
    c.simple(
        [
            f(
                "a",
                "a\n",
                xattrs={
                    "user.nul": b"\0a\0",
                    "user.nl": b"x\ny\n",
                    "user.eq": b"k=v=w",
                    "user.ff": bytes(range(256)),
                    "user.\u00fc": b"u",
                    "user.a.b.c": b"dots",
                },
                pax=[("comment", "not an xattr"), ("ctime", "5.5"), ("atime", "6.5"), ("GOLANG.pkg", "no")],
            ),
            d("dir", xattrs={"user.on_dir": b"1", "trusted.t": b"2"}),
            l("sym", "a", xattrs={"trusted.on_link": b"3"}),
            E("p", "p", xattrs={"trusted.on_fifo": b"4"}),
        ]
    )


@case(
    "xattr_large",
    "large value, long name (255 bytes) and many attributes on one file",
    why="xattr(7): name <= 255 bytes, value <= 64 KiB; these sizes still fit one 4 KiB ext4 xattr block",
    seen=["composefs/composefs#314", "google/gvisor#14696", "gkostka/lwext4#99"],
)
def xattr_large(c):
    many = {"user.k%02d" % i: b"v%02d" % i for i in range(30)}
    many["user.big"] = blob("xb", 2200)
    c.simple(
        [
            f("a", "a\n", xattrs=many),
            f("b", "b\n", xattrs={"user." + "n" * 250: b"long name"}),
            d("d", xattrs={"user.big": blob("xd", 3000)}),
        ]
    )


def acl(*entries):
    """A POSIX ACL as the kernel's xattr holds it: version 2, then (tag, permissions, id)."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in entries)


NOBODY = 0xFFFFFFFF
USER_OBJ, USER, GROUP_OBJ, MASK, OTHER = 1, 2, 4, 16, 32


@case(
    "xattr_acl",
    "access and default ACLs as raw attributes",
    why="acl(5); the kernel's system.posix_acl_* attributes, byte by byte",
    seen=["containerd/overlaybd#301"],
)
def xattr_acl(c):
    access = acl((USER_OBJ, 6, NOBODY), (USER, 4, 1000), (GROUP_OBJ, 4, NOBODY), (MASK, 4, NOBODY), (OTHER, 0, NOBODY))
    default = acl(
        (USER_OBJ, 7, NOBODY), (USER, 7, 70000), (GROUP_OBJ, 5, NOBODY), (MASK, 7, NOBODY), (OTHER, 5, NOBODY)
    )
    c.simple(
        [
            f("a", "a\n", mode=0o640, xattrs={"system.posix_acl_access": access}),
            d("d", 0o755, xattrs={"system.posix_acl_default": default}),
            f("d/plain", "p\n"),
        ]
    )


@case(
    "xattr_overlay_private",
    "overlayfs's own attributes as content of the image: shown as they are, never obeyed",
    why="an image's bytes are content; a mount of it alone must not interpret them",
    seen=["composefs/composefs#185", "composefs/composefs#288"],
)
def xattr_overlay_private(c):
    c.simple(
        [
            d("d", xattrs={"trusted.overlay.opaque": b"y"}),
            f("d/x", "x\n", xattrs={"trusted.overlay.metacopy": b"", "trusted.overlay.redirect": b"/secret"}),
            f("secret", "s\n", mode=0o600),
        ]
    )
    c.not_through("overlay", "overlayfs hides attributes of its own name")
