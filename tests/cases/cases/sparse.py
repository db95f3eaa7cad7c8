"""Sparse members: three encodings of one idea, the map of where the data lies."""

from caselib import *  # noqa: F403

AUTHORITY = "GNU tar manual, Sparse Formats. OCI: SHOULD NOT be used. Right content or a clean refusal"


def content():
    """A file with data at its head, middle and tail, and one that begins and ends with a hole."""
    full = Sparse(3 * MIB, [(0, b"head" * 128), (MIB, b"mid!" * 256), (3 * MIB - 512, b"tail" * 128)])
    return full, Sparse(100000, [(49664, b"z" * 512)])


def closed(sp):
    """The segments as GNU tar lists them: a zero-length last one when the file ends in a hole."""
    o, b = sp.segs[-1] if sp.segs else (0, b"")
    return sp.segs + ([(sp.size, b"")] if o + len(b) != sp.size else [])


def stored(sp):
    return b"".join(b for _, b in sp.segs)


def pax_1_0(name, sp):
    """The map lies in front of the data, in decimal lines."""
    lines = [b"%d\n" % len(closed(sp))] + [b"%d\n%d\n" % (o, len(b)) for o, b in closed(sp)]
    keys = [
        ("GNU.sparse.major", 1),
        ("GNU.sparse.minor", 0),
        ("GNU.sparse.name", name),
        ("GNU.sparse.realsize", sp.size),
    ]
    return f("GNUSparseFile.0/" + name, sp, body=pad(b"".join(lines)) + stored(sp), pax=keys)


def pax_0_1(name, sp):
    """The map is one PAX value."""
    numbers = ",".join("%d,%d" % (o, len(b)) for o, b in closed(sp))
    keys = [("GNU.sparse.size", sp.size), ("GNU.sparse.numblocks", len(closed(sp))), ("GNU.sparse.name", name)]
    return f("GNUSparseFile.0/" + name, sp, body=stored(sp), pax=keys + [("GNU.sparse.map", numbers)])


def gnu_old(name, sp):
    """Type S: four segments in the header, the rest in a block behind it."""
    segs = closed(sp)
    pairs = [b"%011o\0%011o\0" % (o, len(b)) for o, b in segs]
    fields = {386: b"".join(pairs[:4]), 482: bytes([len(pairs) > 4]), 483: b"%011o\0" % sp.size}
    body = stored(sp)
    head = header(name.encode(), 0o644, 0, 0, len(body), T0, b"S", magic=b"ustar  \0", raw=fields)
    more = b"".join(pairs[4:25]).ljust(512, b"\0") if len(pairs) > 4 else b""
    return E(name, "f", data=sp, raw=head + more + pad(body))


def write(c, encode):
    """Both files in one encoding, with an ordinary member behind them."""
    full, holes = content()
    many = Sparse(10 * MIB, [(i * MIB, b"%d" % i * 512) for i in range(10)])
    files = {"a.img": full, "hole_at_ends": holes, "many": many}
    c.image([encode(name, sp) for name, sp in files.items()] + [f("after", "after\n")])
    c.tree("primary", flatten([[f(name, sp) for name, sp in files.items()] + [f("after", "after\n")]]))
    c.expect("ok_or_reject")


@case(
    "sparse_pax10",
    "GNU sparse 1.0 (PAX): map inside the data, real name and size in PAX keys",
    why=AUTHORITY + ", never GNUSparseFile.0/ paths",
    seen=["mxmlnkn/ratarmount#23", "landley/toybox#469", "aquaproj/aqua#5001"],
)
def sparse_pax10(c):
    write(c, pax_1_0)


@case(
    "sparse_pax01",
    "GNU sparse 0.1 (PAX): the whole map in one PAX record",
    why=AUTHORITY + ", never GNUSparseFile.0/ paths",
    seen=["mxmlnkn/ratarmount#23"],
)
def sparse_pax01(c):
    write(c, pax_0_1)


@case(
    "sparse_gnu",
    "old GNU sparse members (type S), one with a continuation block",
    why=AUTHORITY,
    seen=["landley/toybox#469"],
)
def sparse_gnu(c):
    write(c, gnu_old)
