#!/usr/bin/env bash
# Tests the CPU backend as compiled for AArch64. On another architecture the tests run in QEMU's user-mode emulation,
# which executes every instruction as the Arm manual defines it; of speed it says nothing.
#
#   scripts/test-aarch64.sh [argument of cargo test]...      for the tests of flashcore-cpu, e.g. a part of a name
#
# On Debian what is missing is installed, where there is root and a network. Running it again installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="aarch64-unknown-linux-gnu"
# Debian's directory of AArch64 libraries: a test finds its dynamic linker and its libc there.
libraries="/usr/aarch64-linux-gnu"

step() { printf '\n== %s\n' "$*"; }

fail() {
    printf 'test-aarch64.sh: %s\n' "$@" >&2
    exit 1
}

# The Debian packages of the tools that are not there.
missing_packages() {
    command -v qemu-aarch64 >/dev/null || echo qemu-user
    command -v aarch64-linux-gnu-gcc >/dev/null || echo gcc-aarch64-linux-gnu
    # The compiler only recommends the libraries, so it may well be there without them.
    [ -e "$libraries/lib/libc.so.6" ] && [ -e "$libraries/lib/crt1.o" ] || echo libc6-dev-arm64-cross
}

install_packages() {
    local as_root=()
    command -v apt-get >/dev/null ||
        fail "this machine lacks what Debian has in the packages $*, and there is no apt-get to install them with"
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null ||
            fail "the packages $* are missing, and only root can install them; as root: apt-get install $*"
        as_root=(sudo -n)
    fi
    # The lists of a fresh machine name packages that the mirrors no longer have.
    "${as_root[@]}" apt-get update -qq >&2 ||
        fail "the packages $* are missing, and apt-get update failed; is there a network?"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "$@" >/dev/null ||
        fail "apt-get install $* failed"
}

# Tests that the emulator cannot do: QEMU's user-mode emulation dies of an assertion of its own in a child that was forked
# while other threads ran. They run on an AArch64 machine.
skipped=()
if [ "$(uname -m)" != aarch64 ]; then
    skipped=(
        a_child_of_a_process_that_has_computed
        a_fork_while_other_threads_compute
        a_fork_inside_of_a_pool
        a_pool_of_the_child
    )
    step "emulator, linker and C library for AArch64"
    mapfile -t packages < <(missing_packages)
    if [ "${#packages[@]}" -gt 0 ]; then
        install_packages "${packages[@]}"
        mapfile -t packages < <(missing_packages)
        [ "${#packages[@]}" -eq 0 ] ||
            fail "${packages[*]} are installed, but what was to be found in them is not where Debian puts it"
    fi
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L $libraries"
    # For tests that run themselves once more.
    export FLASHCORE_TEST_RUNNER="$CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER"
fi

step "Rust's standard library for AArch64"
if [ ! -d "$(rustc --print target-libdir --target "$target")" ]; then
    command -v rustup >/dev/null ||
        fail "this Rust has no standard library for $target, and there is no rustup to install it with"
    rustup --quiet target add "$target" || fail "rustup target add $target failed; is there a network?"
fi

# Each floating-point operation is a few nanoseconds in the emulator, so the tests are optimised as a release is; the
# checks for overflow stay.
export CARGO_PROFILE_DEV_OPT_LEVEL=3 CARGO_PROFILE_DEV_DEBUG=line-tables-only
# More threads than cores would only wait for one another.
export RAYON_NUM_THREADS="${RAYON_NUM_THREADS:-$(nproc)}"

# Of flashcore-problem what the judge of the other tests stands on: conversions, inputs, the oracle. The tests of the gate
# itself are numbers in, verdicts out, the same on every architecture, and take longer here than all others together.
tests_of_problem=(--package flashcore-problem --lib --test oracle)

step "build"
cargo test --quiet --locked --target "$target" "${tests_of_problem[@]}" --no-run
cargo test --quiet --locked --target "$target" --package flashcore-cpu --no-run

step "tests of flashcore-problem"
cargo test --quiet --locked --target "$target" "${tests_of_problem[@]}"

# Arguments of the tests come after a `--`, of which there may be one already.
arguments=("$@")
if [ "${#skipped[@]}" -gt 0 ]; then
    [[ " $* " == *" -- "* ]] || arguments+=(--)
    for name in "${skipped[@]}"; do
        arguments+=(--skip "$name")
    done
fi

step "tests of flashcore-cpu, each at the levels neon and portable"
cargo test --quiet --locked --target "$target" --package flashcore-cpu "${arguments[@]}"

if [ "${#skipped[@]}" -gt 0 ]; then
    step "left out, since QEMU itself fails in forked children of threaded processes: tests/forks.rs"
    printf '%s\n' "${skipped[@]}"
fi
step "all is well on AArch64"
