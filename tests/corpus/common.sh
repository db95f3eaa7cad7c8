# Sourced by the build-*.sh scripts: argument handling and the steps they share.
#
# Each script is called as:  build-NAME.sh OUTPUT_DIR
# and leaves                 OUTPUT_DIR/NAME/rootfs   the final tree
#                            OUTPUT_DIR/NAME/oci      an OCI image layout
#                            OUTPUT_DIR/NAME/stats.json
set -euo pipefail
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# start NAME "$@": checks the arguments and sets OUT, WORK, ROOTFS and LAYOUT.
start() {
    local name=$1
    shift
    [ $# -eq 1 ] || { echo "usage: $(basename "$0") OUTPUT_DIR" >&2; exit 2; }
    [ "$(id -u)" = 0 ] || { echo "$(basename "$0"): needs root (owners, device nodes, chroot)" >&2; exit 2; }
    mkdir -p "$1"
    OUT=$(cd "$1" && pwd)
    WORK=$OUT/$name ROOTFS=$OUT/$name/rootfs LAYOUT=$OUT/$name/oci
    # One recipe, one result: a corpus built by other scripts is built again.
    RECIPE=$(cat "$HERE/common.sh" "$HERE/build-$name.sh" "$HERE"/*.py | sha256sum | cut -c 1-16)
    if [ -e "$WORK/stats.json" ] && [ "$(cat "$WORK/recipe" 2> /dev/null)" = "$RECIPE" ]; then
        echo "$name: already built"
        exit 0
    fi
    rm -rf "$WORK"
    mkdir -p "$WORK"
}

# The first Debian mirror that this machine's own apt configuration names.
debian_mirror() {
    local found
    found=$(cat /etc/apt/sources.list.d/*.sources 2>/dev/null \
        | sed -n 's/^URIs:[[:space:]]*\([^[:space:]]*\).*/\1/p' \
        | grep -E '/debian/?$' | head -n 1 || true)
    [ -n "$found" ] || found=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null \
        | sed -nE 's/^deb([[:space:]]+\[[^]]*\])?[[:space:]]+([^[:space:]]+).*/\2/p' \
        | grep -E '/debian/?$' | head -n 1 || true)
    [ -n "$found" ] || { echo "no Debian mirror in this machine's apt configuration" >&2; return 1; }
    echo "$found"
}

# layer MESSAGE: records what changed in ROOTFS since the last layer.
layer() { python3 "$HERE/oci_layout.py" commit "$LAYOUT" "$ROOTFS" --message "$1"; }

# finish [CMD...]: writes config, manifest and index, and counts the tree.
finish() {
    python3 "$HERE/oci_layout.py" finish "$LAYOUT" --tag latest --command "$@"
    echo "$RECIPE" > "$WORK/recipe"
    python3 "$HERE/tree_stats.py" "$ROOTFS" "$LAYOUT" > "$WORK/stats.partial"
    mv "$WORK/stats.partial" "$WORK/stats.json"
    cat "$WORK/stats.json"
}

# base_image: begins ROOTFS and LAYOUT from the finished `debian` corpus.
base_image() {
    bash "$HERE/build-debian.sh" "$OUT"
    cp -a "$OUT/debian/rootfs" "$ROOTFS"
    cp -a "$OUT/debian/oci" "$LAYOUT"
    python3 "$HERE/oci_layout.py" rebase "$LAYOUT" "$ROOTFS"
}

# install_debs PACKAGE...: apt-get install in ROOTFS, leaving lists and caches
# behind as an ordinary image build would.
install_debs() {
    cp -L /etc/resolv.conf "$ROOTFS/etc/resolv.conf"
    chroot "$ROOTFS" apt-get update -q
    chroot "$ROOTFS" apt-get install -q -y --no-install-recommends "$@"
    : > "$ROOTFS/etc/resolv.conf"
}

# drop_apt_leftovers: the later `rm` that image builds end with; in the layered
# image these become whiteouts.
drop_apt_leftovers() {
    rm -rf "$ROOTFS"/var/lib/apt/lists/* "$ROOTFS"/var/cache/apt/* "$ROOTFS"/var/log/*.log "$ROOTFS"/var/log/apt
}

# linux_source: sets ARCHIVE to the kernel source archive, fetched once for
# both corpora that use it, and makes ROOTFS.
linux_source() {
    local fetched=$OUT/downloads
    mkdir -p "$fetched" "$ROOTFS"
    ARCHIVE=$fetched/linux-source-6.1.tar.xz
    [ ! -e "$ARCHIVE" ] || return 0
    local scratch=$WORK/package
    mkdir "$scratch"
    chmod 777 "$scratch" # apt drops its privileges to write here
    (cd "$scratch" && apt-get download -q linux-source-6.1 && dpkg-deb -x linux-source-6.1_*.deb .)
    mv "$scratch/usr/src/linux-source-6.1.tar.xz" "$ARCHIVE"
    rm -rf "$scratch"
}

# linux_layers DIR: the two layers of a kernel tree. The second removes a whole
# tree by one whiteout and many single files, replaces the parent of DIR, and
# changes a file.
linux_layers() {
    local kept=$1 parent
    parent=$(dirname "$1")
    chown -R 0:0 "$ROOTFS"
    cp -a "$ROOTFS/Documentation" "$ROOTFS/Documentation.orig"
    layer "source"
    rm -rf "$ROOTFS/Documentation.orig"
    find "$ROOTFS/arch" -name '.*' -type f -delete
    mv "$ROOTFS/$kept" "$ROOTFS/kept"
    rm -rf "${ROOTFS:?}/$parent"
    mkdir "$ROOTFS/$parent"
    mv "$ROOTFS/kept" "$ROOTFS/$parent/kept"
    printf '\n# corpus\n' >> "$ROOTFS/Makefile"
    layer "change"
}
