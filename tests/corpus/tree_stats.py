#!/usr/bin/env python3
"""Counts a tree (each inode once) and, if given, an OCI layout's layers."""

import json
import os
import stat
import sys


def tree(root):
    counts = dict(files=0, dirs=1, symlinks=0, other=0, hard_links=0, bytes=0, largest=0, names=0)
    seen = set()
    stack = [root]
    while stack:
        with os.scandir(stack.pop()) as entries:
            for entry in entries:
                st = entry.stat(follow_symlinks=False)
                counts["names"] += 1
                if stat.S_ISDIR(st.st_mode):
                    counts["dirs"] += 1
                    stack.append(entry.path)
                    continue
                if st.st_nlink > 1:
                    if (st.st_dev, st.st_ino) in seen:
                        counts["hard_links"] += 1
                        continue
                    seen.add((st.st_dev, st.st_ino))
                if stat.S_ISREG(st.st_mode):
                    counts["files"] += 1
                    counts["bytes"] += st.st_size
                    counts["largest"] = max(counts["largest"], st.st_size)
                elif stat.S_ISLNK(st.st_mode):
                    counts["symlinks"] += 1
                else:
                    counts["other"] += 1
    return counts


def layers(layout):
    def blob(digest):
        return os.path.join(layout, "blobs", *digest.split(":"))

    with open(os.path.join(layout, "index.json")) as f:
        index = json.load(f)
    with open(blob(index["manifests"][0]["digest"])) as f:
        manifest = json.load(f)
    return [layer["size"] for layer in manifest["layers"]]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: tree_stats.py ROOTFS [OCI_LAYOUT]")
    result = tree(sys.argv[1])
    if len(sys.argv) == 3:
        result["layer_bytes"] = layers(sys.argv[2])
    print(json.dumps(result, indent=1))
