"""What a list of layers means: the reference model of the layer merge, in its plainest form."""

import base64
import hashlib

from .content import MIB, Sparse, content_sha256, content_size, read_content
from .tarfmt import E


class Node:
    """What a path is bound to; hard links share one."""


def node(e):
    n = Node()
    n.type, n.mode, n.uid, n.gid, n.mtime_ns = e.type, e.mode & 0o7777, e.uid, e.gid, e.mtime_ns
    n.data, n.link, n.dev, n.xattrs = e.data, e.link, e.dev, dict(e.xattrs)
    return n


def dir_node():
    return node(E("", "d", mtime_ns=None))


def components(p):
    return [c for c in p.split(b"/") if c not in (b"", b".")]


def flatten(layers, follow_lower=False):
    """Abstract entries -> {path: Node}.

    A layer's whiteouts come first, then its additions in order. Symlinked parents made by the same layer are
    followed inside the root; a symlink of a lower layer in a parent's place is replaced by a directory unless
    follow_lower is set. mtime_ns None: not defined.
    """
    tree = {b"": dir_node()}

    def below(p):
        pre = p + b"/" if p else b""
        return [q for q in tree if q != p and q.startswith(pre)]

    def remove(p):
        for q in below(p):
            del tree[q]
        tree.pop(p, None)

    for layer in layers:
        mine, explicit, touched = set(), set(), set()
        for e in layer:
            c = components(e.name)
            if not e.model or not c or not c[-1].startswith(b".wh."):
                continue
            par = b"/".join(c[:-1])
            if c[-1] == b".wh..wh..opq":
                if par in tree and tree[par].type == "d" and below(par):
                    for q in below(par):
                        del tree[q]
                    touched.add(par)
            else:
                t = b"/".join(c[:-1] + [c[-1][4:]])
                if t in tree and t:
                    remove(t)
                    touched.add(par)

        def place(c):
            """Resolves the parents, makes those that are missing, returns the final path."""
            cur, todo, hops = [], list(c[:-1]), 0
            while todo:
                x = todo.pop(0)
                if x == b"..":
                    cur = cur[:-1]
                    continue
                p = b"/".join(cur + [x])
                n = tree.get(p)
                if n is not None and n.type == "l" and (p in mine or follow_lower):
                    hops += 1
                    assert hops < 40
                    if n.link.startswith(b"/"):
                        cur = []
                    todo = components(n.link) + todo
                    continue
                if n is None or n.type != "d":
                    if n is not None:
                        remove(p)
                    tree[p] = dir_node()
                    touched.add(b"/".join(cur))
                    mine.add(p)
                cur.append(x)
            return b"/".join(cur + [c[-1]])

        for e in layer:
            c = components(e.name)
            if not e.model or (c and c[-1].startswith(b".wh.")):
                continue
            if not c:
                if e.type == "d":
                    tree[b""] = node(e)
                    explicit.add(b"")
                continue
            p = place(c)
            old = tree.get(p)
            if e.type == "h":
                src = tree[b"/".join(components(e.link))]
                if old is not None:
                    remove(p)
                tree[p] = src
            elif e.type == "d" and old is not None and old.type == "d":
                tree[p] = node(e)
            else:
                if old is not None:
                    remove(p)
                tree[p] = node(e)
            if e.type == "d":
                explicit.add(p)
            mine.add(p)
            touched.add(p.rpartition(b"/")[0])
        for p in touched - explicit:
            if p in tree and tree[p].type == "d":
                tree[p].mtime_ns = None
    return tree


TYPES = {"f": "file", "d": "dir", "l": "symlink", "c": "chr", "b": "blk", "p": "fifo", "s": "sock"}


def put_text(o, key, b):
    try:
        o[key] = b.decode()
    except UnicodeDecodeError:
        o[key] = b.decode("utf-8", "replace")
        o[key + "_b64"] = base64.b64encode(b).decode()


def tree_json(tree, tweak=None, big=64 * MIB):
    """The tree as expected.json holds it. tweak(path, entry) may change single entries."""
    count, ids, subdirs = {}, {}, {}
    for p, n in tree.items():
        count[id(n)] = count.get(id(n), 0) + 1
        if n.type == "d" and p:
            q = p.rpartition(b"/")[0]
            subdirs[q] = subdirs.get(q, 0) + 1
    out = []
    for p in sorted(tree):
        n, o = tree[p], {}
        put_text(o, "path", b"/" + p)
        o["type"] = TYPES[n.type]
        o["mode"] = "%04o" % (0o777 if n.type == "l" else n.mode)
        o["uid"], o["gid"], o["mtime_ns"] = n.uid, n.gid, n.mtime_ns
        o["nlink"] = 2 + subdirs.get(p, 0) if n.type == "d" else count[id(n)]
        if n.type != "d" and count[id(n)] > 1:
            o["hardlink_group"] = ids.setdefault(id(n), len(ids) + 1)
        if n.type == "f":
            o["size"] = content_size(n.data)
            if o["size"] <= big:
                o["sha256"] = content_sha256(n.data)
            if isinstance(n.data, Sparse):
                ends = {e for s, b in n.data.segs for e in (max(0, s - 1), s, s + len(b))}
                points = sorted({0, o["size"] - 1} | ends)
                o["probes"] = [
                    [s, 4096, hashlib.sha256(read_content(n.data, s, 4096)).hexdigest()]
                    for s in points
                    if s < o["size"]
                ]
        if n.type == "l":
            put_text(o, "target", n.link)
            o["size"] = len(n.link)
        if n.type in "cb":
            o["rdev"] = list(n.dev)
        o["xattrs"] = {k: base64.b64encode(v).decode() for k, v in sorted(n.xattrs.items())}
        if tweak:
            tweak(p, o)
        out.append(o)
    return out
