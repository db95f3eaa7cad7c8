#!/bin/sh
# demo.sh: this machine's own /usr and /etc as an image, and a container that starts from it before the image's
# content is there. Everything lies in target/demo; the first run builds, the later ones do not.
#
# Without root: the same image, mounted as a tree through fusermount3, and some of its files hashed.
set -eu
cd "$(dirname "$0")/.."
command -v cargo > /dev/null || PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

say() { printf '\n== %s\n' "$*"; }
# Runs a command and prints what it took.
timed() {
    label=$1
    shift
    start=$(date +%s%N)
    "$@"
    spent=$((($(date +%s%N) - start) / 1000000))
    printf '%s: %d.%03d s\n' "$label" $((spent / 1000)) $((spent % 1000))
}

sh scripts/packages.sh build demo
say "building"
cargo build --release --locked -q -p lazyroot
program=${CARGO_TARGET_DIR:-target}/release/lazyroot
demo=$(pwd)/target/demo
mkdir -p "$demo"
lazyroot() { "$program" --root "$demo/root" --state "$demo/state" "$@"; }

say "importing /usr and /etc of this machine, without passwords and keys"
# Who may not read everything imports what everybody may read.
secrets="/etc/shadow* /etc/gshadow* /etc/ssh/ssh_host_* /etc/sudoers* /etc/**/*.key /etc/**/private"
set --
# /bin, /lib and so on are symbolic links into /usr on a merged system.
for path in usr etc bin sbin lib lib32 lib64 libx32; do set -- "$@" --include "/$path"; done
set -f
for pattern in $secrets; do set -- "$@" --exclude "$pattern"; done
if [ "$(id -u)" != 0 ]; then
    for path in $(find /usr /etc -xdev ! -readable -prune -print 2> /dev/null); do set -- "$@" --exclude "$path"; done
fi
set +f
timed "import" lazyroot import "$@" dir:/ host
lazyroot images

say "what this machine has"
lazyroot doctor

if [ "$(id -u)" = 0 ]; then
    say "nothing of it is cached any more"
    lazyroot daemon drop-caches host
    sync
    echo 3 > /proc/sys/vm/drop_caches || true

    say "a container with it as its root, writable"
    lazyroot run --rm --timeline --entrypoint '' host -- /bin/sh -c \
        'echo "hello from $(. /etc/os-release; echo "$PRETTY_NAME"), $(ls /usr/bin | wc -l) commands in /usr/bin"; echo mine > /etc/mine; cat /etc/mine'

    say "what having all of it first would have taken"
    needed=$(lazyroot --json images | sed -n 's/.*"content_bytes":\([0-9]*\).*/\1/p' | head -n 1)
    room=$(df --output=avail -B1 "$demo" | tail -n 1)
    if [ "$room" -gt $((needed * 2)) ]; then
        lazyroot daemon drop-caches host
        mkdir -p "$demo/tree" "$demo/copy"
        lazyroot mount --as erofs host "$demo/tree"
        timed "a full copy" cp -a "$demo/tree/." "$demo/copy/"
        lazyroot umount "$demo/tree"
        rm -rf "$demo/copy"
    else
        echo "not measured: a copy needs $((needed >> 20)) MiB, here are $((room >> 20)) MiB"
    fi
else
    say "mounted as a tree; what is read is loaded"
    lazyroot daemon drop-caches host
    mkdir -p "$demo/tree"
    timed "mount to the first listing" sh -c '
        "$1" --root "$2/root" --state "$2/state" mount host "$2/tree" --as tree && ls "$2/tree/usr" > /dev/null' sh "$program" "$demo"
    timed "hashing 200 files" sh -c 'find "$1/usr/bin" -type f | head -n 200 | xargs sha256sum | tail -n 3' sh "$demo/tree"
    lazyroot stats
    say "what having all of it first would have taken"
    timed "reading everything" sh -c 'find "$1" -type f -print0 | xargs -0 cat > /dev/null' sh "$demo/tree"
    lazyroot umount "$demo/tree"
fi
say "done; look around: $program --root $demo/root --state $demo/state images"
