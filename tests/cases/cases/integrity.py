"""Damaged blobs and archives."""

import os

from caselib import *  # noqa: F403


@case(
    "bad_digest",
    "one byte of a layer blob flipped: stored bytes do not match the descriptor digest",
    why="image-spec descriptor.md: verify digest before use",
    seen=["data-accelerator/dart#6", "octasoft-ltd/wsl-ui#114"],
)
def bad_digest(c):
    t = tar_bytes([f("a", blob("bd", 4000))])
    b = bytearray(t)
    b[2000] ^= 1
    c.image(Layer(t, "none", stored=bytes(b)), tar=False)
    c.expect("reject")
    c.note("a lazy importer may accept the index and fail the read with EIO instead: see 'lazy_ok'")
    c.exp["lazy_ok"] = "EIO on reading /a is acceptable; returning the altered byte is not"


@case(
    "bad_truncated_tar",
    "tar cut in the middle of a member; digest and diff_id match the cut bytes",
    why="unexpected end of archive is an error, not a short or zero-padded file",
    seen=["opencontainers/image-spec#1301 (badtars-missing-contents)", "composefs/composefs-rs#383"],
)
def bad_truncated_tar(c):
    t = tar_bytes([f("a", "a\n"), f("big", blob("tt", 9000))])[: 512 * 2 + 512 + 3000]
    c.image(Layer(t, "none"), tar=True)
    c.expect("reject")


@case(
    "bad_pax",
    "malformed PAX records: wrong length, no newline, path with NUL",
    why="POSIX pax record grammar; refuse (Go, GNU tar error out)",
    seen=["AgentD/squashfs-tools-ng#50"],
)
def bad_pax(c):
    def rawpax(body):
        return header(b"PaxHeaders/x", 0o644, 0, 0, len(body), T0, b"x") + pad(body)

    t = rawpax(b"99 path=short\n") + tar_bytes([f("a", "a\n")])
    c.image(Layer(t, "none"), tar=True)
    c.expect("reject")


@case(
    "bad_pax_newline",
    "a PAX record whose length does not end on a newline",
    why="POSIX pax: a record ends with a newline where its length says",
    seen=["AgentD/squashfs-tools-ng#50"],
)
def bad_pax_newline(c):
    body = b"12 path=abcX" + pax_record("comment", "c")
    t = header(b"PaxHeaders/x", 0o644, 0, 0, len(body), T0, b"x") + pad(body) + tar_bytes([f("a", "a\n")])
    c.image(Layer(t, "none"))
    c.expect("reject")


@case("bad_pax_nul", "a PAX path with a NUL in it", why="no Linux name holds a NUL")
def bad_pax_nul(c):
    c.image([f("a", "a\n", pax=[("path", b"a\0b")])])
    c.expect("reject")


@case("bad_checksum", "a header whose checksum does not match", why="POSIX ustar: chksum")
def bad_checksum(c):
    t = bytearray(tar_bytes([f("a", "a\n"), f("b", "b\n")]))
    t[1024] ^= 1
    c.image(Layer(bytes(t), "none"))
    c.expect("reject")


@case("bad_diff_id", "the layer's own digest holds, its diff_id does not", why="image-spec config.md: rootfs.diff_ids")
def bad_diff_id(c):
    c.image(Layer(tar_bytes([f("a", "a\n")]), diff_id=digest(b"something else")), tar=False)
    c.expect("reject")


@case("bad_size", "a descriptor whose size is not the blob's", why="image-spec descriptor.md: size")
def bad_size(c):
    layer = Layer(tar_bytes([f("a", "a\n")]))
    layer.desc = {"size": len(layer.blob) + 1}
    c.image(layer, tar=False)
    c.expect("reject")


@case(
    "bad_truncated_gzip",
    "a gzip layer that ends in the middle of its stream",
    why="RFC 1952: the trailer is part of a member",
)
def bad_truncated_gzip(c):
    t = tar_bytes([f("a", blob("tg", 9000))])
    c.image(Layer(t, packed=gz(t)[:-700]), tar=False)
    c.expect("reject")


@case(
    "bad_media_type",
    "a layer of a media type that nobody knows",
    why="image-spec media-types.md: an unknown layer type is an error",
)
def bad_media_type(c):
    c.image(Layer(tar_bytes([f("a", "a\n")]), "none", media="application/vnd.example.layer"), tar=False)
    c.expect("reject")


@case(
    "bad_url_layer",
    "a layer that is not in the layout but names an URL",
    why="image-spec descriptor.md: urls are a hint, and never followed here",
)
def bad_url_layer(c):
    layer = Layer(tar_bytes([f("a", "a\n")]), desc={"urls": ["http://127.0.0.1:9/layer.tar.gz"]})
    c.image(layer, tar=False)
    os.unlink(os.path.join(c.out, "oci/blobs/sha256", digest(layer.blob)[7:]))
    c.expect("reject")


@case("bad_name_length", "a name of 256 bytes", why="NAME_MAX is 255 bytes")
def bad_name_length(c):
    c.image([f("n" * 256, "x")])
    c.expect("reject")
