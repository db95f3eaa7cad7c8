#!/bin/sh
# packages.sh SET…: installs the Debian packages of these sets that are missing (build, test, full, demo, bench).
# Without root it names them and goes on: what needs them says so itself.
set -eu

wanted=
for set in "$@"; do
    case $set in
    build) wanted="$wanted gcc libc6-dev make" ;;
    # What the tests call: judges (erofs-utils), mounts (fuse3, e2fsprogs for small disks), runtimes, and what
    # the cases and corpora are made with.
    test) wanted="$wanted ca-certificates erofs-utils fuse3 e2fsprogs mount procps runc crun attr python3 debootstrap xz-utils" ;;
    full) wanted="$wanted npm python3-pip squashfs-tools squashfuse fuse-overlayfs bindfs ripgrep valgrind" ;;
    demo) wanted="$wanted erofs-utils fuse3 mount runc crun" ;;
    bench) wanted="$wanted erofs-utils fuse3 e2fsprogs mount procps squashfs-tools squashfuse fuse-overlayfs bindfs ripgrep valgrind python3 debootstrap xz-utils" ;;
    *)
        echo "packages.sh: unknown set $set" >&2
        exit 2
        ;;
    esac
done

missing=
for package in $wanted; do
    case " $missing " in *" $package "*) continue ;; esac
    # A command that is there counts whoever installed it: python3 and npm may come from elsewhere.
    case $package in
    gcc | make | python3 | npm) ! command -v "$package" > /dev/null || continue ;;
    python3-pip) ! python3 -m pip --version > /dev/null 2>&1 || continue ;;
    esac
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get > /dev/null; then
    echo "packages.sh: not a Debian system; needed here:$missing" >&2
    exit 0
fi
if [ "$(id -u)" = 0 ]; then
    as_root=
elif sudo -n true 2> /dev/null; then
    as_root="sudo -n"
else
    echo "packages.sh: not root; to have everything: apt-get install$missing" >&2
    exit 0
fi

echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
apt="$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086 # both are lists of words
if ! { $apt update && $apt install -y --no-install-recommends $missing; } > "$log" 2>&1; then
    cat "$log" >&2
    echo "packages.sh: apt-get failed" >&2
    exit 1
fi
