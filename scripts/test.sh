#!/bin/sh
# test.sh [--full]: everything between a fresh clone and the last line of `make test`.
set -eu
cd "$(dirname "$0")/.."

# A shell that is no login shell may not have rustup's directory in its path.
command -v cargo > /dev/null || PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
export PATH
if ! command -v cargo > /dev/null; then
    echo "test.sh: no cargo; install Rust from https://rustup.rs" >&2
    exit 1
fi

sets="build test"
[ "${1:-}" != --full ] || sets="$sets full"
start=$(date +%s)
# shellcheck disable=SC2086 # a list of words
sh scripts/packages.sh $sets
packages=$(date +%s)

# One build for everything that follows: libraries, programs and tests, in the one profile.
cargo build --locked --workspace --all-targets
build=$(date +%s)

LAZYROOT_TEST_BEFORE="packages=$((packages - start)) build=$((build - packages))"
export LAZYROOT_TEST_BEFORE
exec "${CARGO_TARGET_DIR:-target}/debug/xtask" test "$@"
