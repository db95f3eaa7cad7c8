"""Trees that stress the writers of layouts."""

import hashlib

from caselib import *  # noqa: F403


@case(
    "lay_sizes",
    "file sizes around inline-tail, block and chunk boundaries",
    why="content and size exact for every length",
    seen=["google/gvisor#13461", "dragonflyoss/nydus#573", "plougher/squashfs-tools#168"],
)
def lay_sizes(c):
    sizes = {0, 1, 2, 31, 32, 511, 512, 513, *range(3990, 4104), 8191, 8192, 8193, 12287, 12288 + 4040}
    sizes |= {n + i for n in (64 * KIB, 128 * KIB, MIB) for i in (-1, 0, 1)}
    c.simple([d("s")] + [f("s/%07d" % n, blob("z%d" % n, n), mode=0o644 if n % 2 else 0o600) for n in sorted(sizes)])


@case(
    "lay_dirs",
    "directories whose entries fill 1..N blocks with names of every length",
    why="readdir returns each name once; trailing NUL padding in EROFS dirent blocks is legal",
    seen=["google/gvisor#13050", "google/gvisor#13461", "mpartel/bindfs#28"],
)
def lay_dirs(c):
    L = [d("long")] + [f("long/f%0254d" % i) for i in range(80)]
    for k in (1, 14, 15, 16, 17, 100, 240, 255, 300):
        L.append(d("n%03d" % k))
        L += [f("n%03d/" % k + ("%d-" % i) + "y" * (i * 7 % 200)) for i in range(k)]
    c.simple(L)


@case(
    "lay_100k_files",
    "one directory with 100000 empty files",
    why="all names exactly once through readdir, lookup of any one works",
    seen=["libfuse/libfuse#401", "crystal-lang/crystal#15399", "AgentD/squashfs-tools-ng#123"],
)
def lay_100k_files(c):
    count = 100000
    tmpl = bytearray(header(b"bulk/f000000", 0o644, 0, 0, 0, T0, b"0"))
    checksum = sum(tmpl) - sum(tmpl[148:156]) + 8 * 32 - sum(b"000000")
    parts = [tar_entry(d("bulk"))]
    for i in range(count):
        s = b"%06d" % i
        tmpl[6:12] = s
        tmpl[148:156] = b"%06o\0 " % (checksum + sum(s))
        parts.append(bytes(tmpl))
    t = b"".join(parts) + b"\0" * 1024
    c.image(Layer(t, packed=gz(t, 1)), tar=False)
    entry = {"type": "file", "mode": "0644", "uid": 0, "gid": 0, "mtime_ns": T0 * NS, "size": 0, "nlink": 1}
    entry.update(sha256=hashlib.sha256(b"").hexdigest(), xattrs={})
    names = {"dir": "/bulk", "pattern": "f%06d", "start": 0, "count": count, "entry": entry}
    c.tree("primary", flatten([[d("bulk")]]), bulk=[names])


@case(
    "lay_zeros_dedup",
    "all-zero chunks, files that share most of their chunks, one file equal to the start of another",
    why="content-addressed storage must not mix up equal, zero and prefix chunks",
    seen=["dragonflyoss/nydus#573", "s3fs-fuse/s3fs-fuse#15"],
)
def lay_zeros_dedup(c):
    a = blob("dd", 600000)
    c.simple(
        [
            f("zeros", b"\0" * 1500000),
            f("zero_tail", b"x" * 100 + b"\0" * 300000),
            f("zero_head", b"\0" * 262144 + b"y"),
            f("one_zero", b"\0"),
            f("a", a),
            f("a_again", a),
            f("a_prefix", a[:262144]),
            f("a_flip", a[:300000] + bytes([a[300000] ^ 1]) + a[300001:]),
            f("a_twice", a[:131072] * 2),
        ]
    )


@case(
    "lay_beyond_4_gib",
    "a file of 5 GiB, nearly all of it holes, and one of 2.1 TiB",
    why="sizes and offsets are 64 bits; holes read as zeros and take no time",
    seen=["dragonflyoss/nydus#573"],
    kind="dir",
)
def lay_beyond_4_gib(c):
    big = 5 * GIB + 12345
    huge = 2148 * GIB + 1
    c.directory(
        [
            f("big", Sparse(big, [(0, b"head"), (4 * GIB - 2, b"over the edge"), (big - 4, b"tail")])),
            f("huge", Sparse(huge, [(2048 * GIB, blob("huge", 5000)), (huge - 1, b"!")])),
            f("small", "s\n"),
        ]
    )
