"""Compression containers."""

from caselib import *  # noqa: F403


@case(
    "comp_gzip_members",
    "gzip layer made of several members, with header extras and an empty last member (eStargz style)",
    why="RFC 1952: a gzip file is a series of members; their outputs are concatenated",
    seen=[
        "awslabs/soci-snapshotter#1871",
        "confidential-containers/guest-components#561",
        "composefs/composefs-rs#383",
        "ebiggers/libdeflate#31",
    ],
)
def comp_gzip_members(c):
    L = small(6)
    t = tar_bytes(L)
    cut = [0, 100, 512, 513, 5000, len(t)]
    b = b"".join(
        gz_member(
            t[cut[i] : cut[i + 1]],
            extra=b"LZ\x04\0abcd" if i == 1 else b"",
            name=b"layer.tar" if i == 0 else b"",
            comment=b"hi" if i == 2 else b"",
        )
        for i in range(5)
    )
    b += gz_member(b"", extra=b"SG\x16\0" + b"0" * 22)
    c.image(Layer(t, "gzip", packed=b))
    c.tree("primary", flatten([L]))


@case(
    "comp_zstd_frames",
    "zstd layer of several frames with skippable frames before, between and after (zstd:chunked)",
    why="RFC 8878 section 3.1: frames are concatenated, skippable frames are ignored",
    seen=["composefs/composefs-rs#381", "composefs/composefs-rs#383", "facebook/zstd#904", "DataDog/zstd#129"],
)
def comp_zstd_frames(c):
    L = small(6)
    t = tar_bytes(L)
    b = (
        zstd_skip(b"first", 3)
        + zstd_raw(t[:700])
        + zstd_skip(b"", 0)
        + zstd_raw(b"")
        + zstd_raw(t[700:9000], False)
        + zstd_skip(b"x" * 100, 15)
        + zstd_raw(t[9000:])
        + zstd_skip(b"GNUlInUx-toc", 1)
    )
    c.image(Layer(t, "zstd", packed=b))
    c.tree("primary", flatten([L]))


@case(
    "comp_uncompressed",
    "uncompressed layer with the plain tar media type, and a repeated identical layer",
    why="media-types.md; applying the same layer twice is fine",
    seen=["ostreedev/ostree-rs-ext#102", "opencontainers/image-tools#58"],
)
def comp_uncompressed(c):
    L = small()
    t = tar_bytes(L)
    c.image(Layer(t, "none"), Layer(t, "none"), tar=False)
    c.tree("primary", flatten([L, L]))
