#!/bin/bash
# Corpus `linux-20k`: 20,000 names from the front of the kernel source tree; small
# enough for every test run, and still wider than most images.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
start linux-20k "$@"
linux_source
python3 - "$ARCHIVE" "$ROOTFS" 20500 <<'PY'
import os, sys, tarfile

archive, root, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
taken = 0
with tarfile.open(archive, "r|xz") as tar:
    for member in tar:
        member.name = member.name.partition("/")[2]
        if not member.name or not (member.isreg() or member.isdir() or member.issym()):
            continue
        tar.extract(member, root)
        os.utime(os.path.join(root, member.name), (member.mtime, member.mtime), follow_symlinks=False)
        taken += 1
        if taken == wanted:
            break
PY
linux_layers arch/alpha/boot
finish /bin/true
