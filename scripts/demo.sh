#!/bin/sh
# demo.sh: this machine's own /usr and /etc as an image, and a container that starts from it before the image's
# content is there. Everything lies in target/demo; the first run builds, the later ones do not.
#
# Without root: the same image, mounted as a tree through fusermount3, and some of its files hashed.
set -eu
cd "$(dirname "$0")/.."
command -v cargo > /dev/null || PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

say() { printf '\n== %s\n' "$*"; }
# Milliseconds as seconds.
seconds() { printf '%d.%03d s' $(($1 / 1000)) $(($1 % 1000)); }
# Runs a command, prints what it took and keeps that in $spent.
timed() {
    label=$1
    shift
    start=$(date +%s%N)
    "$@"
    spent=$((($(date +%s%N) - start) / 1000000))
    printf '%s: %s\n' "$label" "$(seconds $spent)"
}
# The first number of a field in the JSON that is read.
field() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" | head -n 1; }

sh scripts/packages.sh build demo
say "building"
cargo build --release --locked -q -p lazyroot
program=${CARGO_TARGET_DIR:-target}/release/lazyroot
demo=$(pwd)/target/demo
mkdir -p "$demo/tree"
lazyroot() { "$program" --root "$demo/root" --state "$demo/state" "$@"; }

# However it ends: nothing stays mounted, no daemon stays, no copy stays.
finish() {
    status=$?
    trap - EXIT
    if grep -q " $demo/tree " /proc/self/mountinfo; then lazyroot umount "$demo/tree" || true; fi
    lazyroot daemon stop --force > /dev/null || true
    if [ -d "$demo/copy" ]; then chmod -R u+w "$demo/copy" && rm -rf "$demo/copy"; fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "importing /usr and /etc of this machine, without passwords and keys"
# Who may not read everything imports what everybody may read.
secrets="/etc/shadow* /etc/gshadow* /etc/ssh/ssh_host_* /etc/sudoers* /etc/**/*.key /etc/**/private"
set --
# /bin, /lib and so on are symbolic links into /usr on a merged system.
for path in usr etc bin sbin lib lib32 lib64 libx32; do set -- "$@" --include "/$path"; done
set -f
for pattern in $secrets; do set -- "$@" --exclude "$pattern"; done
set +f
if [ "$(id -u)" != 0 ]; then set -- "$@" --skip-unreadable; fi
timed "import" lazyroot import "$@" dir:/ host
imported=$spent
# What an earlier run imported and nobody needs any more.
lazyroot gc > /dev/null
lazyroot images
of_image=$(lazyroot --json images | grep '"name":"host:latest"')
files=$(echo "$of_image" | field files)
bytes=$(echo "$of_image" | field content_bytes)

say "what this machine has"
if ! lazyroot doctor; then
    [ "$(id -u)" = 0 ] || echo "an ordinary user needs a /dev/fuse that users may open (mode 666, as Debian has it); or run this as root" >&2
    exit 1
fi

# What is read next has to be fetched, unpacked and verified again.
forget() {
    said=$(lazyroot daemon drop-caches host 2>&1) || { echo "$said" >&2; exit 1; }
    if [ "$(id -u)" = 0 ]; then
        sync
        echo 3 > /proc/sys/vm/drop_caches || true
    fi
}
# Copies the whole image, as one would have to without mounting it lazily; $copied is what it took, or nothing.
full_copy() {
    copied=
    say "what having all of it first would have taken"
    room=$(df --output=avail -B1 "$demo" | tail -n 1)
    if [ "$room" -lt $((bytes * 2)) ]; then
        echo "not measured: a copy needs $((bytes * 2 >> 20)) MiB, here are $((room >> 20)) MiB"
        return
    fi
    mkdir -p "$demo/copy"
    timed "a full copy" cp -a "$demo/tree/." "$demo/copy/"
    copied=$spent
}
# The end: WHAT happened after so many milliseconds, and what was LOADED for WHICH.
in_short() {
    say "in short"
    line() { printf '  %-44s %s\n' "$1" "$2"; }
    line "the image" "$files files, $(mebibytes "$bytes")"
    line "made from this machine's own directories in" "$(seconds "$imported")"
    line "$1 after" "$(seconds "$2")"
    line "loaded for $3" "$4"
    [ -z "$copied" ] || line "copying all of it first" "$(seconds "$copied"), $((copied / ($2 + 1))) times as long"
}
mebibytes() { awk "BEGIN { printf \"%.1f MiB\", $1 / 1048576 }"; }

if [ "$(id -u)" = 0 ]; then
    say "nothing of it is cached any more; a container with it as its root, writable"
    forget
    # The timeline goes to standard error: it is shown, and read for the summary.
    lazyroot run --rm --timeline --entrypoint '' host -- /bin/sh -c \
        'echo "hello from $(. /etc/os-release; echo "$PRETTY_NAME"), $(ls /usr/bin | wc -l) commands in /usr/bin"; echo mine > /etc/mine; cat /etc/mine' \
        2> "$demo/timeline" || { status=$?; cat "$demo/timeline" >&2; exit "$status"; }
    echo " since start    this step"
    cat "$demo/timeline"
    first=$(awk '/first instruction/ { printf "%d", $1 + 0.5 }' "$demo/timeline")
    loaded=$(sed -n 's/.*read were \([0-9]* files\) ([^)]*), \([0-9.]* [A-Za-z]*\).*/\1, \2/p' "$demo/timeline")

    forget
    lazyroot mount --as erofs host "$demo/tree"
    full_copy
    in_short "the container's first instruction ran" "$first" "the container" "$loaded"
else
    say "nothing of it is unpacked any more; mounted as a tree, without privileges"
    forget
    timed "mounted and listed" sh -c '
        "$1" --root "$2/root" --state "$2/state" mount host "$2/tree" --as tree && ls "$2/tree/usr" > /dev/null' sh "$program" "$demo"
    first=$spent
    timed "200 files hashed" sh -c 'find "$1/usr/bin" -type f | head -n 200 | xargs sha256sum | tail -n 3' sh "$demo/tree"
    stats=$(lazyroot --json stats)
    loaded="$(echo "$stats" | field files_read) files, $(mebibytes "$(echo "$stats" | field bytes_read)")"
    full_copy
    in_short "mounted and listed" "$first" "200 hashes" "$loaded"
fi
say "done; look around: $program --root $demo/root --state $demo/state images"
