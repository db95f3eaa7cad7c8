#!/bin/bash
# Corpus `linux`: the kernel source tree of Debian's linux-source-6.1, with no
# system under it.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
start linux "$@"
linux_source
tar -xJf "$ARCHIVE" -C "$ROOTFS" --strip-components=1
linux_layers samples/bpf
finish /bin/true
