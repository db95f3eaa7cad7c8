#!/usr/bin/env python3
"""Compare a mounted (or extracted) tree with expected.json.

  check.py MOUNT expected.json [--fs any|fuse|erofs|ext4|overlay] [--probe] [--max N]
  check.py --rejected expected.json      the importer refused the input: was that allowed?

Exit 0: one of the allowed trees matches. 1: differences (printed). 2: usage or I/O trouble.
Where expected.json lists several trees, any one of them may match; the closest one is reported.
Run as root, or modes 0000 and trusted.* cannot be read. Standard library only.
"""

import argparse
import base64
import ctypes
import errno
import hashlib
import json
import mmap
import os
import random
import stat
import sys
import threading

TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFCHR: "chr",
    stat.S_IFBLK: "blk",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "sock",
}
BIG = 64 << 20
EXT4_MIN, EXT4_MAX = -(1 << 31), (1 << 34) - (1 << 31) - 1
problems = []  # found while walking, whatever the tree


def bpath(o):
    return base64.b64decode(o["path_b64"]) if "path_b64" in o else o["path"].encode()


def show(b):
    return b.decode("utf-8", "backslashreplace")


def hash_fd(fd):
    h = hashlib.sha256()
    n = 0
    while True:
        b = os.read(fd, 1 << 20)
        if not b:
            return h.hexdigest(), n
        h.update(b)
        n += len(b)


def walk(root, want_probes, a):
    """-> {path: record}"""
    recs = {}

    def one(dfd, name, path):
        r = {}
        try:
            st = os.lstat(name, dir_fd=dfd) if dfd is not None else os.lstat(name)
        except OSError as e:
            problems.append("%s: in readdir but lstat fails: %s" % (show(path), e))
            return None
        t = TYPES.get(stat.S_IFMT(st.st_mode), "?")
        r.update(
            type=t,
            mode=st.st_mode & 0o7777,
            uid=st.st_uid,
            gid=st.st_gid,
            mtime_ns=st.st_mtime_ns,
            nlink=st.st_nlink,
            size=st.st_size,
            ino=(st.st_dev, st.st_ino),
            rdev=[os.major(st.st_rdev), os.minor(st.st_rdev)],
        )
        via = b"/proc/self/fd/%d/%s" % (dfd, name) if dfd is not None else name
        try:
            r["xattrs"] = {
                k: os.getxattr(via, k, follow_symlinks=False) for k in os.listxattr(via, follow_symlinks=False)
            }
        except OSError as e:
            r["xattrs"] = {}
            if e.errno not in (errno.ENOTSUP, errno.ENOSYS):
                problems.append("%s: xattrs: %s" % (show(path), e))
        if t == "symlink":
            r["target"] = os.readlink(name, dir_fd=dfd)
        if t == "file":
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dfd)
                try:
                    if st.st_size <= BIG:
                        r["sha256"], n = hash_fd(fd)
                        if n != st.st_size:
                            problems.append("%s: st_size %d but %d bytes read" % (show(path), st.st_size, n))
                    else:
                        r["probes"] = [
                            [o, n, hashlib.sha256(os.pread(fd, n, o)).hexdigest()] for o, n in want_probes.get(path, ())
                        ]
                finally:
                    os.close(fd)
            except OSError as e:
                r["error"] = str(e)
        return r

    def tree(fd, path):
        seen = set()
        with os.scandir(fd) as it:
            ents = [(os.fsencode(x.name), x.inode(), x.is_dir(follow_symlinks=False)) for x in it]
        subs = 0
        for name, ino, isdir in sorted(ents):
            p = path + b"/" + name if path != b"/" else b"/" + name
            if name in seen:
                problems.append("%s: listed twice by readdir" % show(p))
                continue
            seen.add(name)
            if a.fs == "ext4" and p == b"/lost+found":
                recs[b"/"]["nlink"] -= 1
                continue
            r = one(fd, name, p)
            if r is None:
                continue
            recs[p] = r
            if ino != r["ino"][1] and a.fs != "overlay":
                problems.append("%s: d_ino %d but st_ino %d" % (show(p), ino, r["ino"][1]))
            if isdir != (r["type"] == "dir"):
                problems.append("%s: d_type disagrees with lstat" % show(p))
            if r["type"] == "dir":
                subs += 1
                try:
                    sub = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                except OSError as e:
                    problems.append("%s: cannot open: %s" % (show(p), e))
                    continue
                try:
                    recs[p]["subs"] = tree(sub, p)
                finally:
                    os.close(sub)
        return subs

    recs[b"/"] = one(None, os.fsencode(root), b"/")
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        recs[b"/"]["subs"] = tree(fd, b"/")
    finally:
        os.close(fd)
    return recs


def expand(t):
    out = {bpath(o): o for o in t["entries"]}
    for b in t.get("bulk", ()):
        for i in range(b["start"], b["start"] + b["count"]):
            out[(b["dir"] + "/" + b["pattern"] % i).encode()] = b["entry"]
    return out


def compare(exp, got, a):
    d, groups, owner = [], {}, {}
    for p in sorted(set(exp) | set(got)):
        n = show(p)
        if p not in got:
            d.append("%s: missing (%s)" % (n, exp[p]["type"]))
            continue
        if p not in exp:
            d.append("%s: unexpected %s" % (n, got[p]["type"]))
            continue
        o, r = exp[p], got[p]
        if o["type"] != r["type"]:
            d.append("%s: type %s, want %s" % (n, r["type"], o["type"]))
            continue

        def eq(what, have, want):
            if have != want:
                d.append("%s: %s %s, want %s" % (n, what, have, want))

        if o["type"] != "symlink":
            eq("mode", "%04o" % r["mode"], o["mode"])
        eq("uid", r["uid"], o["uid"])
        eq("gid", r["gid"], o["gid"])
        m = o.get("mtime_ns")
        if m is not None and not a.no_mtime and not (p == b"/" and a.no_root_mtime):
            if a.fs == "ext4":
                if not EXT4_MIN <= m // 10**9 <= EXT4_MAX:
                    m = None  # ext4 must clamp
            if m is not None:
                eq("mtime_ns", r["mtime_ns"], m)
        if o["type"] == "dir":
            if r["nlink"] not in (1, o["nlink"]):
                d.append("%s: nlink %d, want %d (or 1)" % (n, r["nlink"], o["nlink"]))
        elif r["nlink"] not in o.get("nlink_ok", [o["nlink"]]):
            d.append("%s: nlink %d, want %d" % (n, r["nlink"], o["nlink"]))
        if o["type"] == "file":
            eq("size", r["size"], o["size"])
            if "error" in r:
                d.append("%s: read: %s" % (n, r["error"]))
            elif "sha256" in o and "sha256" in r:
                eq("sha256", r["sha256"], o["sha256"])
            elif "sha256" in o:
                d.append("%s: too big to hash" % n)
            elif "probes" in r:
                for x, y in zip(r["probes"], o.get("probes", ())):
                    eq("bytes at %d" % x[0], x[2], y[2])
        if o["type"] == "symlink":
            want = base64.b64decode(o["target_b64"]) if "target_b64" in o else o["target"].encode()
            eq("target", show(r["target"]), show(want))
            if r["size"] != len(want):
                d.append("%s: symlink st_size %d, want %d" % (n, r["size"], len(want)))
        if "rdev" in o:
            eq("rdev", r["rdev"], o["rdev"])
        if not a.no_xattr:
            drop = tuple(o.get("xattrs_may_drop", ()))
            want = {k: base64.b64decode(v) for k, v in o["xattrs"].items()}
            have = {k: v for k, v in r["xattrs"].items() if not k.startswith(tuple(a.ignore_xattr))}
            for k in sorted(set(want) | set(have)):
                if k not in have:
                    if not (drop and k.startswith(drop)):
                        d.append("%s: xattr %s missing" % (n, k))
                elif k not in want:
                    d.append("%s: xattr %s unexpected (%r)" % (n, k, have[k][:40]))
                elif want[k] != have[k]:
                    d.append("%s: xattr %s is %r, want %r" % (n, k, have[k][:40], want[k][:40]))
        if o["type"] != "dir":
            g = o.get("hardlink_group")
            if g is not None:
                if groups.setdefault(g, r["ino"]) != r["ino"]:
                    d.append("%s: not the same inode as the other names of hardlink group %d" % (n, g))
            key = ("g", g) if g is not None else ("p", p)
            if owner.setdefault(r["ino"], key) != key:
                d.append("%s: shares inode number %d with a file it is not linked to" % (n, r["ino"][1]))
    return d


# ------------------------------------------------------------------ probes on a mount
def libc_dir_probe(path, bad):
    libc = ctypes.CDLL(None, use_errno=True)

    class Dirent(ctypes.Structure):
        _fields_ = [
            ("ino", ctypes.c_uint64),
            ("off", ctypes.c_int64),
            ("reclen", ctypes.c_uint16),
            ("type", ctypes.c_uint8),
            ("name", ctypes.c_char * 256),
        ]

    libc.opendir.restype = ctypes.c_void_p
    libc.opendir.argtypes = [ctypes.c_char_p]
    libc.readdir.restype = ctypes.POINTER(Dirent)
    libc.readdir.argtypes = [ctypes.c_void_p]
    libc.telldir.restype = ctypes.c_long
    libc.telldir.argtypes = [ctypes.c_void_p]
    libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
    libc.rewinddir.argtypes = [ctypes.c_void_p]
    libc.closedir.argtypes = [ctypes.c_void_p]
    D = libc.opendir(path)
    if not D:
        return
    seq, pos = [], []
    while True:
        pos.append(libc.telldir(D))
        e = libc.readdir(D)
        if not e:
            break
        seq.append(e.contents.name)
    if len(set(seq)) != len(seq):
        bad.append("%s: readdir repeats names" % show(path))
    for i in random.Random(1).sample(range(len(seq)), min(40, len(seq))):
        libc.seekdir(D, pos[i])
        e = libc.readdir(D)
        if not e or e.contents.name != seq[i]:
            bad.append(
                "%s: seekdir to entry %d gives %r, want %r" % (show(path), i, e.contents.name if e else None, seq[i])
            )
            break
    libc.rewinddir(D)
    n = 0
    while libc.readdir(D):
        n += 1
    if n != len(seq):
        bad.append("%s: after rewinddir %d entries, before %d" % (show(path), n, len(seq)))
    libc.closedir(D)


def probe(root, recs, a):
    bad, rnd = [], random.Random(7)
    fs = os.statvfs(root)
    if fs.f_bsize == 0 or fs.f_namemax < 255:
        bad.append("statfs: bsize %d namemax %d" % (fs.f_bsize, fs.f_namemax))
    if fs.f_blocks == 0:
        bad.append("statfs: 0 blocks (df and kubelet complain)")
    rb = os.fsencode(root)
    files = sorted(p for p, r in recs.items() if r["type"] == "file" and "sha256" in r and len(p) < 3000)
    for p in sorted(files, key=lambda p: -recs[p]["size"])[:12]:
        q, size = rb + p, recs[p]["size"]
        try:
            fd = os.open(q, os.O_RDONLY)
        except OSError as e:
            bad.append("%s: open: %s" % (show(p), e))
            continue
        data = b""
        while len(data) < size:
            x = os.pread(fd, 1 << 20, len(data))
            if not x:
                break
            data += x
        if hashlib.sha256(data).hexdigest() != recs[p]["sha256"]:
            bad.append("%s: second read differs" % show(p))
        for _ in range(30):
            o = rnd.randrange(0, size + 10) if size else 0
            n = rnd.choice((1, 3, 511, 4096, 70001))
            if os.pread(fd, n, o) != data[o : o + n]:
                bad.append("%s: pread(%d,%d) differs" % (show(p), n, o))
                break
        if os.pread(fd, 10, size) or os.pread(fd, 10, size + 5000):
            bad.append("%s: bytes past the end" % show(p))
        if size:
            try:
                for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
                    with mmap.mmap(fd, size, flags, mmap.PROT_READ) as m:
                        for _ in range(20):
                            o = rnd.randrange(size)
                            if m[o : o + 5000] != data[o : o + 5000]:
                                bad.append("%s: mmap at %d differs" % (show(p), o))
                                break
            except OSError as e:
                bad.append("%s: mmap: %s" % (show(p), e))
        try:  # holes: monotonic, inside the file, data where bytes are
            if size:
                pos, guard = 0, 0
                while pos < size and guard < 10000:
                    guard += 1
                    try:
                        ds = os.lseek(fd, pos, os.SEEK_DATA)
                    except OSError as e:
                        if e.errno == errno.ENXIO:
                            ds = size
                        else:
                            raise
                    if ds < pos:
                        bad.append("%s: SEEK_DATA went backwards" % show(p))
                        break
                    if any(data[pos:ds]):
                        bad.append("%s: hole %d..%d holds data" % (show(p), pos, ds))
                        break
                    if ds >= size:
                        break
                    he = os.lseek(fd, ds, os.SEEK_HOLE)
                    if he <= ds or he > size:
                        bad.append("%s: SEEK_HOLE(%d) = %d" % (show(p), ds, he))
                        break
                    pos = he
            for w in (os.SEEK_DATA, os.SEEK_HOLE):
                try:
                    os.lseek(fd, size, w)
                    bad.append("%s: lseek(EOF, %d) must be ENXIO" % (show(p), w))
                except OSError as e:
                    if e.errno != errno.ENXIO:
                        bad.append("%s: lseek(EOF): %s" % (show(p), e))
        except OSError as e:
            bad.append("%s: lseek: %s" % (show(p), e))
        os.close(fd)
        try:  # O_DIRECT: works, or EINVAL at open; never wrong bytes
            fd = os.open(q, os.O_RDONLY | os.O_DIRECT)
            buf = mmap.mmap(-1, 65536)
            for o in (0, 4096, size // 4096 * 4096):
                n = os.preadv(fd, [buf], o)
                if buf[:n] != data[o : o + n] or (n < min(65536, max(0, size - o)) and n % 512):
                    bad.append("%s: O_DIRECT at %d differs" % (show(p), o))
            os.close(fd)
        except OSError as e:
            if e.errno != errno.EINVAL:
                bad.append("%s: O_DIRECT: %s" % (show(p), e))
        res = []

        def reader():
            try:
                with open(q, "rb") as fh:
                    res.append(hashlib.sha256(fh.read()).hexdigest())
            except OSError as e:
                res.append(str(e))

        ts = [threading.Thread(target=reader) for _ in range(8)]
        [t.start() for t in ts]
        [t.join() for t in ts]
        if set(res) != {recs[p]["sha256"]}:
            bad.append("%s: parallel readers disagree: %s" % (show(p), set(res)))
    dirs = [p for p, r in recs.items() if r["type"] == "dir" and len(p) < 3000]
    for p in sorted(dirs, key=lambda p: -recs[p].get("subs", 0))[:10] + [b"/"] + sorted(dirs)[:40]:
        libc_dir_probe(rb + (p if p != b"/" else b""), bad)
    some = [p for p in recs if len(p) < 3000]
    some = rnd.sample(some, min(300, len(some)))
    if os.geteuid() == 0 and a.drop_caches:
        with open("/proc/sys/vm/drop_caches", "w") as fh:
            fh.write("3")
    for p in some:
        st = os.lstat(rb + (p if p != b"/" else b""))
        if (st.st_dev, st.st_ino) != recs[p]["ino"]:
            bad.append("%s: inode number changed %s -> %s" % (show(p), recs[p]["ino"], (st.st_dev, st.st_ino)))
    for nm in ("no-such-name", "x" * 255):
        try:
            os.lstat(os.path.join(root, nm))
            bad.append("lookup of a missing name succeeded: %s" % nm)
        except FileNotFoundError:
            pass
        except OSError as e:
            bad.append("lookup of a missing name: %s" % e)
    try:
        os.lstat(os.path.join(root, "x" * 256))
        bad.append("256-byte name accepted")
    except OSError as e:
        if e.errno != errno.ENAMETOOLONG:
            bad.append("256-byte name: %s, want ENAMETOOLONG" % e)
    return bad


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("mount", nargs="?")
    ap.add_argument("expected")
    ap.add_argument("--fs", default="any", choices=["any", "fuse", "erofs", "ext4", "overlay"])
    ap.add_argument("--rejected", action="store_true")
    ap.add_argument("--probe", action="store_true")
    ap.add_argument(
        "--drop-caches",
        action="store_true",
        help="with --probe: drop the page and inode caches before the inode stability check",
    )
    ap.add_argument("--no-mtime", action="store_true")
    ap.add_argument("--no-root-mtime", action="store_true")
    ap.add_argument("--no-xattr", action="store_true")
    ap.add_argument("--ignore-xattr", action="append", default=[], metavar="PREFIX")
    ap.add_argument("--max", type=int, default=40)
    a = ap.parse_args()
    e = json.load(open(a.expected))
    if a.rejected:
        ok = e["expect"] in ("reject", "ok_or_reject")
        for p in e.get("must_not_exist", ()):
            if os.path.lexists(p):
                print("ESCAPE: %s exists" % p)
                ok = False
        print("%s: refusal %s" % (e["case"], "allowed" if ok else "is wrong: this input is valid"))
        return 0 if ok else 1
    if not a.mount:
        ap.error("MOUNT is needed")
    for p in e.get("must_not_exist", ()):
        if os.path.lexists(p):
            problems.append("ESCAPE: %s exists" % p)
    if e["expect"] == "reject" and not e["trees"]:
        print("%s: input had to be refused (%s)" % (e["case"], e["authority"]))
        return 1
    trees = [expand(t) for t in e["trees"]]
    wp = {}
    for t in trees:
        for p, o in t.items():
            if o.get("probes"):
                wp[p] = [(x[0], x[1]) for x in o["probes"]]
    got = walk(a.mount, wp, a)
    for r in got.values():
        r["xattrs"].pop("security.selinux", None)  # set by the host policy, exact name only
    results = [(compare(t, got, a), e["trees"][i]["name"]) for i, t in enumerate(trees)]
    diffs, name = min(results, key=lambda x: len(x[0]))
    diffs = problems + diffs
    if a.probe:
        diffs += ["probe: " + x for x in probe(a.mount, got, a)]
    if diffs:
        print(
            "%s: %d differences against tree '%s'%s"
            % (e["case"], len(diffs), name, " (closest of %d)" % len(trees) if len(trees) > 1 else "")
        )
        for x in diffs[: a.max]:
            print("  " + x)
        if len(diffs) > a.max:
            print("  ... %d more" % (len(diffs) - a.max))
        return 1
    print("%s: ok, %d paths%s" % (e["case"], len(got), " (tree: %s)" % name if len(trees) > 1 else ""))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, KeyError, ValueError) as x:
        print("check.py: %s: %s" % (type(x).__name__, x), file=sys.stderr)
        sys.exit(2)
