"""The parts that cases are made of. A case module starts with `from caselib import *`."""

from .content import GIB, KIB, MIB, Sparse, blob, content_size, read_content
from .model import dir_node, flatten, tree_json
from .oci import Layer, digest, gz, gz_member, nest_index, write_docker_archive, write_oci, zstd_raw, zstd_skip
from .registry import CASES, SPEC, Ctx, base, case, small
from .tarfmt import NS, T0, E, d, f, h, header, l, pad, pax_block, pax_record, tar_bytes, tar_entry, wh

__all__ = [
    "CASES", "Ctx", "E", "GIB", "KIB", "Layer", "MIB", "NS", "SPEC", "Sparse", "T0", "base", "blob", "case",
    "content_size", "d", "digest", "dir_node", "f", "flatten", "gz", "gz_member", "h", "header", "l", "nest_index", "pad",
    "pax_block", "pax_record", "read_content", "small", "tar_bytes", "tar_entry", "tree_json", "wh",
    "write_docker_archive", "write_oci", "zstd_raw", "zstd_skip",
]  # fmt: skip
