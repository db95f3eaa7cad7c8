"""File content: bytes, or a sparse description of them."""

import hashlib

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Sparse:
    """A size and [(offset, bytes)]; everything else reads as zero."""

    def __init__(self, size, segs):
        self.size, self.segs = size, sorted(segs)

    def read(self, off, n):
        n = max(0, min(n, self.size - off))
        out = bytearray(n)
        for o, b in self.segs:
            lo, hi = max(o, off), min(o + len(b), off + n)
            if lo < hi:
                out[lo - off : hi - off] = b[lo - o : hi - o]
        return bytes(out)


def content_size(c):
    return c.size if isinstance(c, Sparse) else len(c)


def read_content(c, off, n):
    return c.read(off, n) if isinstance(c, Sparse) else c[off : off + n]


def content_sha256(c):
    h = hashlib.sha256()
    for off in range(0, content_size(c), MIB):
        h.update(read_content(c, off, MIB))
    return h.hexdigest()


def blob(tag, n):
    """n bytes that depend on the tag only and do not compress."""
    out, i = bytearray(), 0
    while len(out) < n:
        out += hashlib.sha256(b"%s/%d" % (tag.encode(), i)).digest()
        i += 1
    return bytes(out[:n])
