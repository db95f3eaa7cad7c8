#!/usr/bin/env python3
"""Writes an OCI image layout step by step from a tree that is being changed.

  oci_layout.py commit LAYOUT ROOTFS --message TEXT   adds a layer: what changed since the last commit
  oci_layout.py rebase LAYOUT ROOTFS                  ROOTFS is a fresh copy of the tree last committed
  oci_layout.py finish LAYOUT --tag TAG --command CMD...     writes config, manifest and index.json

The state between the steps lies in LAYOUT.state.json, beside the layout, so
that the layout itself stays clean; `finish` may be followed by more commits.
Layers are gzip-compressed PAX tars with names sorted, owners as numbers,
extended attributes as SCHILY.xattr records, and nanosecond times; the root
itself is the entry "./", so that the layers hold the whole tree.  Removed
names become .wh.NAME; a directory of which no old name is left and which has
new ones becomes opaque (.wh..wh..opq).
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import stat
import tarfile

KINDS = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}


def walk(root):
    """Yields (name, path, stat) below root, the root itself first as ''."""
    yield "", root, os.lstat(root)
    stack = [("", root)]
    while stack:
        prefix, folder = stack.pop()
        for entry in sorted(os.scandir(folder), key=lambda e: os.fsencode(e.name)):
            st = entry.stat(follow_symlinks=False)
            name = prefix + entry.name
            if stat.S_IFMT(st.st_mode) not in KINDS:
                continue  # sockets have no place in a layer
            yield name, entry.path, st
            if stat.S_ISDIR(st.st_mode):
                stack.append((name + "/", entry.path))


def attributes(path):
    return {
        key: os.getxattr(path, key, follow_symlinks=False) for key in sorted(os.listxattr(path, follow_symlinks=False))
    }


def fingerprint(path, st):
    """What tells a changed entry: all that a layer stores, and ctime for content."""
    link = os.readlink(path) if stat.S_ISLNK(st.st_mode) else ""
    xattrs = hashlib.sha256(repr(attributes(path)).encode()).hexdigest()[:16]
    ctime = 0 if stat.S_ISDIR(st.st_mode) else st.st_ctime_ns
    size = 0 if stat.S_ISDIR(st.st_mode) else st.st_size
    return [st.st_mode, st.st_uid, st.st_gid, size, st.st_mtime_ns, st.st_rdev, ctime, link, xattrs]


def snapshot(root):
    return {name: fingerprint(path, st) for name, path, st in walk(root)}


def parent(name):
    return name.rpartition("/")[0]


def removals(old, new):
    """The whiteout entries that lead from old to new, sorted."""
    was_dir = {name for name, entry in old.items() if stat.S_ISDIR(entry[0])}
    is_dir = {name for name, entry in new.items() if stat.S_ISDIR(entry[0])}
    kept, old_children, new_children = set(), {}, {}
    for name in old:
        if name:
            old_children.setdefault(parent(name), []).append(name)
            if name in new:
                kept.add(parent(name))
    for name in new:
        if name:
            new_children.setdefault(parent(name), []).append(name)
    marks = []
    for folder in was_dir & is_dir:
        gone = [name for name in old_children.get(folder, []) if name not in new]
        if not gone:
            continue
        prefix = folder + "/" if folder else ""
        if folder not in kept and new_children.get(folder):
            marks.append(prefix + ".wh..wh..opq")
        else:
            marks.extend(prefix + ".wh." + name.rpartition("/")[2] for name in gone)
    return sorted(marks)


def entry_info(name, path, st, links):
    info = tarfile.TarInfo((name or ".") + "/" if stat.S_ISDIR(st.st_mode) else name)
    info.type = KINDS[stat.S_IFMT(st.st_mode)]
    info.mode = stat.S_IMODE(st.st_mode)
    info.uid, info.gid = st.st_uid, st.st_gid
    info.mtime = st.st_mtime_ns // 10**9
    if st.st_mtime_ns % 10**9:
        info.pax_headers["mtime"] = "%d.%09d" % divmod(st.st_mtime_ns, 10**9)
    if stat.S_ISLNK(st.st_mode):
        info.linkname = os.readlink(path)
    elif info.type in (tarfile.CHRTYPE, tarfile.BLKTYPE):
        info.devmajor, info.devminor = os.major(st.st_rdev), os.minor(st.st_rdev)
    elif stat.S_ISREG(st.st_mode):
        first = links.setdefault((st.st_dev, st.st_ino), name) if st.st_nlink > 1 else name
        if first != name:
            info.type, info.linkname = tarfile.LNKTYPE, first
            return info
        info.size = st.st_size
    for key, value in attributes(path).items():
        info.pax_headers["SCHILY.xattr." + key] = value.decode("utf-8", "surrogateescape")
    return info


class Hashing(io.RawIOBase):
    """Passes bytes on to `sink` and keeps their digest and count."""

    def __init__(self, sink):
        self.sink, self.digest, self.count = sink, hashlib.sha256(), 0

    def writable(self):
        return True

    def write(self, data):
        self.digest.update(data)
        self.count += len(data)
        self.sink.write(data)
        return len(data)


def write_layer(layout, root, old, new):
    blobs = os.path.join(layout, "blobs", "sha256")
    os.makedirs(blobs, exist_ok=True)
    scratch = os.path.join(blobs, "partial")
    links = {}
    with open(scratch, "wb") as file:
        packed = Hashing(file)
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=packed, mtime=0) as zipped:
            plain = Hashing(zipped)
            with tarfile.open(
                fileobj=plain, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
            ) as tar:
                for mark in removals(old, new):
                    tar.addfile(tarfile.TarInfo(mark))
                for name, path, st in walk(root):
                    if old.get(name) == new[name]:
                        continue
                    info = entry_info(name, path, st, links)
                    if info.isreg():
                        with open(path, "rb") as content:
                            tar.addfile(info, content)
                    else:
                        tar.addfile(info)
    digest = packed.digest.hexdigest()
    os.replace(scratch, os.path.join(blobs, digest))
    return {"digest": "sha256:" + digest, "size": packed.count, "diff_id": "sha256:" + plain.digest.hexdigest()}


def state_path(layout):
    return layout.rstrip("/") + ".state.json"


def load(layout):
    try:
        with open(state_path(layout)) as file:
            return json.load(file)
    except FileNotFoundError:
        return {"tree": {}, "layers": []}


def save(layout, state):
    with open(state_path(layout), "w") as file:
        json.dump(state, file)


def put_json(layout, value, media_type):
    data = json.dumps(value, sort_keys=True).encode()
    digest = hashlib.sha256(data).hexdigest()
    with open(os.path.join(layout, "blobs", "sha256", digest), "wb") as file:
        file.write(data)
    return {"mediaType": media_type, "digest": "sha256:" + digest, "size": len(data)}


def commit(layout, root, message):
    state = load(layout)
    new = snapshot(root)
    layer = write_layer(layout, root, state["tree"], new)
    layer["message"] = message
    state["layers"].append(layer)
    state["tree"] = new
    save(layout, state)


def rebase(layout, root):
    save(layout, {"tree": snapshot(root), "layers": take_layers(layout)})


def take_layers(layout):
    """Reads the layer list of a finished layout and drops its config and manifest."""

    def take(digest):
        path = os.path.join(layout, "blobs", *digest.split(":"))
        with open(path) as file:
            value = json.load(file)
        os.unlink(path)
        return value

    with open(os.path.join(layout, "index.json")) as file:
        manifest = take(json.load(file)["manifests"][0]["digest"])
    config = take(manifest["config"]["digest"])
    return [
        {"digest": layer["digest"], "size": layer["size"], "diff_id": diff_id, "message": step["created_by"]}
        for layer, diff_id, step in zip(manifest["layers"], config["rootfs"]["diff_ids"], config["history"])
    ]


def finish(layout, tag, command):
    layers = load(layout)["layers"]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command, "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layer["diff_id"] for layer in layers]},
        "history": [{"created_by": layer["message"]} for layer in layers],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put_json(layout, config, "application/vnd.oci.image.config.v1+json"),
        "layers": [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": layer["digest"],
                "size": layer["size"],
            }
            for layer in layers
        ],
    }
    descriptor = put_json(layout, manifest, manifest["mediaType"])
    descriptor["platform"] = {"architecture": "amd64", "os": "linux"}
    descriptor["annotations"] = {"org.opencontainers.image.ref.name": tag}
    with open(os.path.join(layout, "oci-layout"), "w") as file:
        json.dump({"imageLayoutVersion": "1.0.0"}, file)
    with open(os.path.join(layout, "index.json"), "w") as file:
        json.dump({"schemaVersion": 2, "manifests": [descriptor]}, file)
    os.unlink(state_path(layout))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("commit")
    step.add_argument("layout")
    step.add_argument("rootfs")
    step.add_argument("--message", default="")
    step = steps.add_parser("rebase")
    step.add_argument("layout")
    step.add_argument("rootfs")
    step = steps.add_parser("finish")
    step.add_argument("layout")
    step.add_argument("--tag", default="latest")
    step.add_argument("--command", nargs="+", default=["/bin/sh"])
    args = parser.parse_args()
    if args.step == "commit":
        commit(args.layout, args.rootfs, args.message)
    elif args.step == "rebase":
        rebase(args.layout, args.rootfs)
    else:
        finish(args.layout, args.tag, args.command)


if __name__ == "__main__":
    main()
