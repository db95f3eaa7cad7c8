"""Tar archives, byte by byte: the encodings that real writers use, and wrong ones on purpose."""

T0 = 1700000000  # default mtime, seconds
NS = 10**9


class E:
    """One tar entry: how it is encoded, and what it means.

    type is one of f d l h c b p (s for a socket in a directory case). Everything else is a keyword:
    mode uid gid mtime_ns data link dev xattrs: the meaning;
    enc: pax gnu ustar v7; pax: extra raw records [(key, value)]; hdr: header fields to override;
    body: stored bytes when they are not `data`; flag: type flag to store; raw: the whole entry's bytes;
    model=False: the entry has no effect on the tree.
    """

    def __init__(self, name, type, **k):
        self.name = name if isinstance(name, bytes) else name.encode()
        self.type = type
        self.mode = k.pop("mode", {"d": 0o755, "l": 0o777}.get(type, 0o644))
        self.uid, self.gid = k.pop("uid", 0), k.pop("gid", 0)
        self.mtime_ns = k.pop("mtime_ns", T0 * NS)
        self.data = k.pop("data", b"")
        link = k.pop("link", b"")
        self.link = link if isinstance(link, bytes) else link.encode()
        self.dev = k.pop("dev", (0, 0))
        self.xattrs = k.pop("xattrs", {})
        self.enc = k.pop("enc", "pax")
        self.pax = k.pop("pax", [])
        self.raw = k.pop("raw", None)
        self.hdr = k.pop("hdr", {})
        self.body = k.pop("body", None)
        self.model = k.pop("model", True)
        self.flag = k.pop("flag", None)
        assert not k, k


def f(name, data=b"", **k):
    return E(name, "f", data=data.encode() if isinstance(data, str) else data, **k)


def d(name, mode=0o755, **k):
    return E(name, "d", mode=mode, **k)


def l(name, target, **k):  # noqa: E743
    return E(name, "l", link=target, **k)


def h(name, target, **k):
    return E(name, "h", link=target, **k)


def wh(name, **k):
    return E(name, "f", mode=0, **k)


def number(v, w, force256=False):
    """An octal field, or GNU's base-256 form where octal cannot hold the value."""
    if not force256 and 0 <= v < 8 ** (w - 1):
        return b"%0*o\0" % (w - 1, v)
    b = (v & ((1 << (8 * w)) - 1)).to_bytes(w, "big")
    return bytes([b[0] | 0x80]) + b[1:]


def header(
    name,
    mode,
    uid,
    gid,
    size,
    mtime,
    flag,
    link=b"",
    dev=(0, 0),
    magic=b"ustar\x0000",
    prefix=b"",
    force256=(),
    raw=None,
):
    b = bytearray(512)

    def put(off, val, w):
        assert len(val) <= w, (val, w)
        b[off : off + len(val)] = val

    put(0, name, 100)
    put(100, number(mode, 8), 8)
    put(108, number(uid, 8, "uid" in force256), 8)
    put(116, number(gid, 8, "gid" in force256), 8)
    put(124, number(size, 12, "size" in force256), 12)
    put(136, number(mtime, 12, "mtime" in force256), 12)
    put(156, flag, 1)
    put(157, link, 100)
    put(257, magic, 8)
    if magic[:5] == b"ustar":
        put(329, number(dev[0], 8), 8)
        put(337, number(dev[1], 8), 8)
    put(345, prefix, 155)
    for off, val in (raw or {}).items():
        if isinstance(off, int):
            b[off : off + len(val)] = val
    b[148:156] = b" " * 8
    b[148:156] = b"%06o\0 " % sum(b)
    return bytes(b)


def pad(x, n=512):
    return x + b"\0" * (-len(x) % n)


def pax_record(k, v):
    k = k if isinstance(k, bytes) else k.encode()
    v = v if isinstance(v, bytes) else str(v).encode()
    n = len(k) + len(v) + 3
    while len(str(n)) + len(k) + len(v) + 3 != n:
        n = len(str(n)) + len(k) + len(v) + 3
    return b"%d %s=%s\n" % (n, k, v)


def pax_block(recs, flag=b"x", name=b"PaxHeaders/x"):
    body = b"".join(pax_record(k, v) for k, v in recs)
    return header(name, 0o644, 0, 0, len(body), T0, flag) + pad(body)


def gnu_long(flag, val):
    body = val + b"\0"
    return header(b"././@LongLink", 0o644, 0, 0, len(body), 0, flag, magic=b"ustar  \0") + pad(body)


FLAG = {"f": b"0", "h": b"1", "l": b"2", "c": b"3", "b": b"4", "d": b"5", "p": b"6"}


def pax_time(ns):
    """Decimal seconds as POSIX writes them: the sign stands before the whole number."""
    whole, frac = divmod(abs(ns), NS)
    return ("-" if ns < 0 else "") + str(whole) + (".%09d" % frac if frac else "")


def tar_entry(e):
    if e.raw is not None:
        return e.raw
    out = b""
    body = e.body if e.body is not None else (e.data if e.type == "f" else b"")
    sec, nsec = divmod(e.mtime_ns, NS)
    recs, name, link = list(e.pax), e.name, e.link
    if e.type == "d" and not name.endswith(b"/") and not e.hdr.get("noslash"):
        name += b"/"
    magic, prefix = b"ustar\x0000", b""
    force = set(e.hdr.get("force256", ()))
    uid, gid, header_sec = e.uid, e.gid, sec
    if e.enc == "gnu":
        magic = b"ustar  \0"
        if len(link) > 100:
            out += gnu_long(b"K", link)
            link = link[:100]
        if len(name) > 100:
            out += gnu_long(b"L", name)
            name = name[:100]
    elif e.enc == "v7":
        magic = b""
    elif e.enc == "ustar":
        if len(name) > 100:
            cut = name.rfind(b"/", 0, 156)
            prefix, name = name[:cut], name[cut + 1 :]
    else:
        if len(name) > 100 or any(c > 127 for c in name):
            recs.append(("path", name))
            name = name[:100]
        if len(link) > 100 or any(c > 127 for c in link):
            recs.append(("linkpath", link))
            link = link[:100]
        if uid > 0o7777777:
            recs.append(("uid", uid))
            uid = 0
        if gid > 0o7777777:
            recs.append(("gid", gid))
            gid = 0
        if nsec or sec < 0 or sec > 0o77777777777:
            recs.append(("mtime", pax_time(e.mtime_ns)))
            header_sec = max(0, min(sec, 0o77777777777))
        for k, v in e.xattrs.items():
            recs.append((b"SCHILY.xattr." + k.encode(), v))
    if recs:
        out += pax_block(recs)
    out += header(
        e.hdr.get("name", name),
        e.hdr.get("mode", e.mode),
        uid,
        gid,
        e.hdr.get("size", len(body)),
        header_sec,
        e.flag or FLAG[e.type],
        e.hdr.get("link", link),
        e.dev,
        e.hdr.get("magic", magic),
        prefix,
        force,
        e.hdr,
    )
    return out + pad(body)


def tar_bytes(entries, eof=True):
    b = b"".join(tar_entry(e) for e in entries)
    return b + b"\0" * 1024 if eof else b
