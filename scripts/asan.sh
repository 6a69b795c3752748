#!/usr/bin/env bash
# AddressSanitizer over the CPU backend: its tests, the edge suite and 1,000 random cases at every level of the machine.
# A read or write outside any allocation, scratch memory included, is a report and a failure.
#
#   scripts/asan.sh [--tests]      with --tests, unit tests and those of sequences and caches alone
#
# Sanitizers are a feature of nightly compilers. Where there is none, the stable one is told to behave like it: the run
# is a check, and nothing that it builds is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if rustup toolchain list 2>/dev/null | grep -q '^nightly'; then
    export RUSTUP_TOOLCHAIN=nightly
else
    export RUSTC_BOOTSTRAP=1
fi
target="$(rustc -vV | sed -n 's/^host: //p')"
libraries="$(rustc --print sysroot)/lib/rustlib/$target/lib"
if ! compgen -G "$libraries/librustc*asan*" >/dev/null; then
    echo "asan.sh: the compiler has no AddressSanitizer runtime in $libraries; install a nightly toolchain for $target" >&2
    exit 3
fi

export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target/asan}"
# A profile between debug and release: overflows and bounds are checked, and it is fast enough. `--target` keeps the
# sanitizer out of build scripts.
export CARGO_PROFILE_DEV_OPT_LEVEL=2 CARGO_PROFILE_DEV_DEBUG=line-tables-only CARGO_PROFILE_DEV_INCREMENTAL=false
export RUSTFLAGS="-Zsanitizer=address"
# Nothing outlives the process, and what rayon's threads still hold at its end is no leak.
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=0:exitcode=99"

if [ "${1:-}" = --tests ]; then
    cargo test --quiet --locked --target "$target" -p flashcore-cpu --lib --test operations --test sequences
    echo "asan.sh: no report of the tests"
    exit 0
fi
cargo test --quiet --locked --target "$target" -p flashcore-cpu --lib --tests
cargo build --quiet --locked --target "$target" -p flashcore-cli
flashcore="$CARGO_TARGET_DIR/$target/debug/flashcore"
"$flashcore" verify --backend cpu --cpu-level all --suite edge | tail -n 5
"$flashcore" verify --backend cpu --cpu-level all --fuzz 1000 | tail -n 5
echo "asan.sh: no report"
