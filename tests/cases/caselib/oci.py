"""Compression containers, OCI image layouts and docker archives."""

import gzip
import hashlib
import json
import os
import struct
import zlib

from .content import KIB
from .tarfmt import d, f, tar_bytes


def zstd_raw(data, content_size=True):
    """A valid zstd frame made of raw blocks only (RFC 8878): no compressor needed."""
    out = struct.pack("<IB", 0xFD2FB528, 0x20 | (3 << 6) if content_size else 0x00)
    out += struct.pack("<Q", len(data)) if content_size else bytes([0x50])  # or a window of 1 MiB
    blocks = [data[i : i + 128 * KIB] for i in range(0, len(data), 128 * KIB)] or [b""]
    for i, b in enumerate(blocks):
        out += struct.pack("<I", (len(b) << 3) | (1 if i == len(blocks) - 1 else 0))[:3] + b
    return out


def zstd_skip(data, n=0):
    return struct.pack("<II", 0x184D2A50 + n, len(data)) + data


def gz(data, level=6):
    return gzip.compress(data, level, mtime=0)


def gz_member(data, extra=b"", name=b"", comment=b""):
    flags = (4 if extra else 0) | (8 if name else 0) | (16 if comment else 0)
    o = b"\x1f\x8b\x08" + bytes([flags]) + b"\0" * 4 + b"\0\xff"
    if extra:
        o += struct.pack("<H", len(extra)) + extra
    if name:
        o += name + b"\0"
    if comment:
        o += comment + b"\0"
    z = zlib.compressobj(6, zlib.DEFLATED, -15)
    o += z.compress(data) + z.flush()
    return o + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


MEDIA_TYPES = {
    "none": "application/vnd.oci.image.layer.v1.tar",
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}


def digest(b):
    return "sha256:" + hashlib.sha256(b).hexdigest()


class Layer:
    """A layer's tar and how it is stored. desc overrides descriptor fields; stored: bytes on disk that differ
    from the described ones."""

    def __init__(self, tar, comp="gzip", packed=None, media=None, diff_id=None, desc=None, stored=None):
        pack = {"none": bytes, "gzip": gz, "zstd": zstd_raw}[comp]
        self.tar, self.media = tar, media or MEDIA_TYPES[comp]
        self.blob = packed if packed is not None else pack(tar)
        self.diff_id = diff_id or digest(tar)
        self.desc = desc or {}
        self.stored = stored


def to_json(o):
    return json.dumps(o, indent=1, sort_keys=True).encode()


def image_config(layers):
    return {
        "architecture": "amd64",
        "os": "linux",
        "created": "2023-11-14T22:13:20Z",
        "config": {"Cmd": ["/bin/sh"]},
        "rootfs": {"type": "layers", "diff_ids": [x.diff_id for x in layers]},
        "history": [{"created_by": "gen.py", "created": "2023-11-14T22:13:20Z"} for _ in layers],
    }


MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


def put(layout, b, name=None):
    """Stores a blob, under another name than its own digest if need be."""
    name = name or digest(b)
    with open(os.path.join(layout, "blobs/sha256", name.partition(":")[2]), "wb") as fh:
        fh.write(b)
    return name


def put_json(layout, value, media_type):
    b = to_json(value)
    return {"mediaType": media_type, "digest": put(layout, b), "size": len(b)}


def write_manifest(layout, layers, architecture="amd64"):
    """Stores layers, config and manifest; returns the manifest's descriptor."""
    descriptors = []
    for x in layers:
        name = put(layout, x.stored if x.stored is not None else x.blob, digest(x.blob))
        descriptors.append({"mediaType": x.media, "digest": name, "size": len(x.blob), **x.desc})
    config = {**image_config(layers), "architecture": architecture}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": put_json(layout, config, "application/vnd.oci.image.config.v1+json"),
        "layers": descriptors,
    }
    return {**put_json(layout, manifest, MANIFEST), "platform": {"architecture": architecture, "os": "linux"}}


def write_index(layout, descriptor):
    descriptor["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    with open(os.path.join(layout, "index.json"), "wb") as fh:
        fh.write(to_json({"schemaVersion": 2, "manifests": [descriptor]}))


def write_oci(layout, layers):
    os.makedirs(os.path.join(layout, "blobs/sha256"), exist_ok=True)
    write_index(layout, write_manifest(layout, layers))
    with open(os.path.join(layout, "oci-layout"), "w") as fh:
        fh.write('{"imageLayoutVersion": "1.0.0"}')


def nest_index(layout, other):
    """Puts the layout's manifest into an index of its own, behind one for arm64 that consists of the layer `other`."""
    with open(os.path.join(layout, "index.json"), "rb") as fh:
        (inner,) = json.load(fh)["manifests"]
    del inner["annotations"]
    manifests = [write_manifest(layout, [other], "arm64"), inner]
    write_index(layout, put_json(layout, {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}, INDEX))


def write_docker_archive(path, layers, name="case:latest"):
    """The older form of `docker save`: a tar with a folder per layer and manifest.json in front of nothing."""
    config = to_json(image_config(layers))
    config_name = digest(config)[7:] + ".json"
    entries, paths = [f(config_name, config)], []
    for x in layers:
        folder = digest(x.tar + b"%d" % len(paths))[7:]
        paths.append(folder + "/layer.tar")
        entries += [d(folder), f(folder + "/VERSION", "1.0"), f(paths[-1], x.tar)]
    entries.append(f("manifest.json", to_json([{"Config": config_name, "RepoTags": [name], "Layers": paths}])))
    with open(path, "wb") as fh:
        fh.write(tar_bytes(entries))
