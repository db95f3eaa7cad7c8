"""Hard links, within a layer and across layers."""

import hashlib

from caselib import *  # noqa: F403


@case(
    "hl_basic",
    "three names of one file: one inode number, nlink 3, one size in du",
    why="POSIX link(2), stat st_nlink/st_ino; " + SPEC + ": Hardlinks",
    seen=["dragonflyoss/nydus#552", "google/crfs#20", "dragonflyoss/nydus#413"],
)
def hl_basic(c):
    c.simple(
        [
            d("bin"),
            f("bin/gunzip", "#!/bin/sh\n# x\n", mode=0o4755, xattrs={"user.k": b"v"}),
            h("bin/uncompress", "bin/gunzip", mode=0o4755),
            d("z"),
            h("z/third", "bin/uncompress", mode=0o4755),
            f("bin/other", "#!/bin/sh\n# x\n", mode=0o755),
        ]
    )


@case(
    "hl_symlink",
    "hardlink to a symlink: both names are the same symlink inode",
    why="Linux link(2) does not follow symlinks; " + SPEC + ": hardlinks possible with all types but directories",
    seen=["microsoft/hcsshim#1120", "dragonflyoss/nydus#1983", "dragonflyoss/nydus#2006", "containerd/containerd#2458"],
)
def hl_symlink(c):
    c.simple([d("a"), d("b"), f("zzz", "z\n"), l("a/xxx", "../zzz"), h("b/yyy", "a/xxx", mode=0o777)])


@case(
    "hl_absolute",
    "hardlink target written with a leading slash",
    why="resolved against the image root (moby/go-archive#100, GNU tar strips the slash)",
    seen=["moby/go-archive#99", "confidential-containers/guest-components#1152"],
)
def hl_absolute(c):
    c.simple(
        [
            d("usr"),
            d("usr/bin"),
            f("usr/bin/perlbug", "perl\n", mode=0o755),
            h("usr/bin/perlthanks", "/usr/bin/perlbug", mode=0o755),
        ]
    )


@case(
    "hl_dotslash",
    "entry names with ./ and link targets without, and the other way round",
    why="same path after '.' removal",
    seen=["bestouff/genext2fs#21", "containerd/overlaybd#174"],
)
def hl_dotslash(c):
    c.simple([d("."), f("./a", "A\n"), h("./b", "a"), h("c", "./a"), d("./d"), h("./d/e", ".//./b")])


@case(
    "hl_missing_parent",
    "hardlink whose own parent directory has no entry",
    why="same rule as for files: create 0755 parents",
    seen=["apple/container#1797", "apple/containerization#777"],
)
def hl_missing_parent(c):
    c.simple([f("bin/app", "app", mode=0o755), h("bin/app.runfiles/_main/app_/app", "bin/app", mode=0o755)])


@case(
    "hl_cross_layer",
    "hardlink in layer 2 to a file of layer 1",
    why=SPEC + ": 'may fail'. Link with the right bytes, or refuse; never an empty file",
    seen=["opencontainers/image-spec#1204", "moby/moby#5632", "cvmfs/cvmfs#4286"],
)
def hl_cross_layer(c):
    c.simple([d("a"), f("a/big", blob("hlx", 9000))], [d("b"), h("b/link", "a/big")], expect="ok_or_reject")


@case(
    "hl_replaced_name",
    "one of two names is replaced by a later layer; the other keeps the old content",
    why="POSIX: a name is bound to an inode, not to another name",
    seen=["anchore/stereoscope#670"],
)
def hl_replaced_name(c):
    def tw(p, o):
        if p in (b"b", b"c"):
            o["nlink_ok"] = [1, 2]

    c.simple(
        [f("a", "old a\n"), h("b", "a"), f("x", "old x\n"), h("c", "x")],
        [f("a", "new a, longer\n"), wh(".wh.x")],
        tweak=tw,
    )
    c.note("nlink 1 in a flattened tree; 2 is tolerated where an overlay of per-layer mounts is used")


@case(
    "hl_many",
    "400 names of one file over 20 directories, and 400 copies that are not hardlinks",
    why="nlink 400 against 400 separate inodes; ext4 caps a file at 65000 links",
    seen=["microsoft/hcsshim#334", "aerynOS/os-tools#372"],
)
def hl_many(c):
    L = [f("one", "same\n")]
    for i in range(20):
        L.append(d("d%02d" % i))
        L += [h("d%02d/h%02d" % (i, j), "one") for j in range(20)]
        L += [f("d%02d/c%02d" % (i, j), "same\n") for j in range(20)]
    c.simple(L)


@case(
    "hl_self",
    "hardlink to itself, and a hardlink to a path that does not exist anywhere",
    why="no inode to bind to: refuse, or drop the entry and keep the rest; no hang, no empty file",
    seen=["opencontainers/image-spec#1204", "cvmfs/cvmfs#4286"],
)
def hl_self(c):
    c.image([f("ok", "ok\n"), h("self", "self"), h("dangling", "no/such")])
    c.tree("entries dropped", flatten([[f("ok", "ok\n")]]))
    c.expect("ok_or_reject")


@case(
    "hl_beyond_16_bits",
    "66,000 names of one file",
    why="EROFS holds 32 bits of link count in its extended inodes, 16 in compact ones",
    seen=["aerynOS/os-tools#372"],
)
def hl_beyond_16_bits(c):
    names = 66000
    tmpl = bytearray(header(b"l/n00000", 0o644, 0, 0, 0, T0, b"1", link=b"one"))
    checksum = sum(tmpl) - sum(tmpl[148:156]) + 8 * 32 - sum(b"00000")
    parts = [tar_entry(f("one", "one\n")), tar_entry(d("l"))]
    for i in range(names - 1):
        s = b"%05d" % i
        tmpl[3:8] = s
        tmpl[148:156] = b"%06o\0 " % (checksum + sum(s))
        parts.append(bytes(tmpl))
    t = b"".join(parts) + b"\0" * 1024
    c.image(Layer(t, packed=gz(t, 1)), tar=False)

    def linked(p, o):
        if p == b"one":
            o.update(nlink=names, hardlink_group=1)

    entry = {"type": "file", "mode": "0644", "uid": 0, "gid": 0, "mtime_ns": T0 * NS, "size": 4, "nlink": names}
    entry.update(hardlink_group=1, sha256=hashlib.sha256(b"one\n").hexdigest(), xattrs={})
    bulk = {"dir": "/l", "pattern": "n%05d", "start": 0, "count": names - 1, "entry": entry}
    c.tree("primary", flatten([[f("one", "one\n"), d("l")]]), linked, bulk=[bulk])


@case(
    "hl_to_directory",
    "a hard link whose target is a directory",
    why=SPEC + ": hard links are possible with all types but directories",
)
def hl_to_directory(c):
    c.image([d("d"), f("d/x", "x\n"), h("again", "d")])
    c.tree("entry dropped", flatten([[d("d"), f("d/x", "x\n")]]))
    c.expect("ok_or_reject")


@case(
    "hl_whiteout_of_one",
    "one of two names is whited out; the other keeps its content",
    why=SPEC + ": a whiteout removes a path",
)
def hl_whiteout_of_one(c):
    c.simple([f("a", "a\n"), h("b", "a"), d("k"), h("k/c", "a")], [wh(".wh.a")])
