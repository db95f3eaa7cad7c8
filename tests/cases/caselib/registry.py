"""The table of cases, and what a case's function can do."""

import json
import os
import socket
import stat

from .content import Sparse, blob
from .model import flatten, tree_json
from .oci import Layer, write_docker_archive, write_oci
from .tarfmt import NS, T0, d, f, tar_bytes

CASES = {}
SPEC = "OCI image-spec layer.md"


def case(name, title, why, seen=(), kind="oci"):
    """Registers a function as the case `name`.

    why: the specification clause or rule that decides what is right. seen: public threads where this kind of
    fault was met. kind: oci (an image), dir (a source directory; needs root).
    """

    def register(function):
        assert name not in CASES, name
        group = function.__module__.rpartition(".")[2]
        CASES[name] = {
            "name": name,
            "group": group,
            "title": title,
            "why": why,
            "seen": list(seen),
            "kind": kind,
            "function": function,
        }
        return function

    return register


class Ctx:
    """What a case's function gets: it writes inputs beside `expected.json` and says what is right."""

    def __init__(self, out, meta):
        self.out = out
        os.makedirs(out, exist_ok=True)
        self.exp = {
            "case": meta["name"],
            "kind": meta["kind"],
            "group": meta["group"],
            "title": meta["title"],
            "expect": "ok",
            "authority": meta["why"],
            "sources": meta["seen"],
            "inputs": {},
            "notes": [],
            "not_through": {},
            "trees": [],
        }

    def image(self, *layers, comp="gzip", tar=True, docker=False):
        """layers: lists of entries, or Layer objects. Writes oci/, and rootfs.tar for one plain layer."""
        made = [x if isinstance(x, Layer) else Layer(tar_bytes(x), comp) for x in layers]
        write_oci(os.path.join(self.out, "oci"), made)
        self.exp["inputs"].update(oci="oci", ref="latest")
        if tar and len(made) == 1:
            with open(os.path.join(self.out, "rootfs.tar"), "wb") as fh:
                fh.write(made[0].tar)
            self.exp["inputs"]["tar"] = "rootfs.tar"
        if docker:
            write_docker_archive(os.path.join(self.out, "docker.tar"), made)
            self.exp["inputs"]["docker-archive"] = "docker.tar"

    def tree(self, name, tree, tweak=None, **extra):
        """One tree that is right; with several, any of them is."""
        self.exp["trees"].append({"name": name, "entries": tree_json(tree, tweak), **extra})

    def simple(self, *layers, comp="gzip", tar=True, docker=False, tweak=None, expect="ok", name="primary"):
        """An image whose right tree is what the model makes of its entries."""
        self.image(*layers, comp=comp, tar=tar, docker=docker)
        self.tree(name, flatten(layers), tweak)
        self.exp["expect"] = expect

    def expect(self, what):
        """ok, reject (must be refused) or ok_or_reject (one of the trees, or a clean refusal)."""
        self.exp["expect"] = what

    def note(self, text):
        self.exp["notes"].append(text)

    def not_through(self, way, reason):
        """A way of mounting (erofs, tree, overlay, export) that cannot show this tree, and why."""
        self.exp["not_through"][way] = reason

    def directory(self, entries, tweak=None):
        """Kind dir: writes src/, whose right tree is itself."""
        src = os.path.join(self.out, "src")
        os.makedirs(src)
        tree = flatten([entries])
        for n in tree.values():
            if n.mtime_ns is None:
                n.mtime_ns = T0 * NS
        materialise(src, tree)
        self.exp["inputs"]["dir"] = "src"
        self.tree("primary", tree, tweak)

    def done(self):
        with open(os.path.join(self.out, "expected.json"), "w") as fh:
            json.dump(self.exp, fh, indent=1, sort_keys=True)


def materialise(root, tree):
    """Writes {path: Node} below root; needs root for owners and devices."""
    made = {}
    for p in sorted(tree):
        n, q = tree[p], os.path.join(os.fsencode(root), p)
        if id(n) in made and n.type != "d":
            os.link(made[id(n)], q, follow_symlinks=False)
            continue
        made[id(n)] = q
        if n.type == "d":
            if p:
                os.mkdir(q)
        elif n.type == "f":
            with open(q, "wb") as fh:
                if isinstance(n.data, Sparse):
                    fh.truncate(n.data.size)
                    for o, b in n.data.segs:
                        fh.seek(o)
                        fh.write(b)
                else:
                    fh.write(n.data)
        elif n.type == "l":
            os.symlink(n.link, q)
        elif n.type == "s":
            here = os.getcwd()  # a socket's path is at most 107 bytes, so bind by its bare name
            os.chdir(os.path.dirname(q))
            with socket.socket(socket.AF_UNIX) as s:
                s.bind(os.path.basename(q))
            os.chdir(here)
        else:
            kind = {"c": stat.S_IFCHR, "b": stat.S_IFBLK, "p": stat.S_IFIFO}[n.type]
            os.mknod(q, kind | n.mode, os.makedev(*n.dev))
        os.lchown(q, n.uid, n.gid)
        if n.type != "l":
            os.chmod(q, n.mode)
        for k, v in n.xattrs.items():
            os.setxattr(q, k, v, follow_symlinks=False)
    for p in sorted(tree, reverse=True):
        n = tree[p]
        os.utime(os.path.join(os.fsencode(root), p), ns=(n.mtime_ns, n.mtime_ns), follow_symlinks=False)


def base():
    """A small lower layer that most merge cases start from."""
    return [d("etc"), f("etc/keep", "keep\n"), d("etc/sub"), f("etc/sub/x", "x\n"), f("etc/gone", "gone\n")]


def small(n=3):
    """A directory with n files of some thousand incompressible bytes."""
    return [d("d")] + [f("d/f%d" % i, blob("s%d" % i, 2000 + i * 1777)) for i in range(n)]
