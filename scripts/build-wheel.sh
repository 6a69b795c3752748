#!/usr/bin/env bash
# Builds the Python wheel: one file for every Python from 3.9 on and every torch, with libflashcore inside.
#
#   scripts/build-wheel.sh [FOLDER]      the wheel goes to FOLDER, target/wheels if none is given
#
# The library must need nothing newer than glibc 2.28 (manylinux_2_28). A plain `cargo build` takes the symbols of the
# system's own glibc (stat64 of 2.33, pthread_create of 2.34), so the release build is made by cargo-zigbuild, which links
# against the stubs of an older glibc. It and zig come from PyPI into .venv/wheel, without root, unless both are installed.
# What else is missing is an error before anything is compiled.
#
# FLASHCORE_LIBRARY_FILE=PATH takes a library that was built before, and libflashcore_python.so beside it.
# FLASHCORE_ALLOW_NEWER_GLIBC=1 takes one with newer symbols, and says so in the wheel's tag: built by cargo alone.
set -euo pipefail

# Exact, so that the same files give the same wheel.
tools=(cargo-zigbuild==0.24.0 ziglang==0.17.0)
triple=x86_64-unknown-linux-gnu

repository="$(cd "$(dirname "$0")/.." && pwd)"
target="${CARGO_TARGET_DIR:-$repository/target}"
folder="${1:-$target/wheels}"
library="${FLASHCORE_LIBRARY_FILE:-}"
newer="${FLASHCORE_ALLOW_NEWER_GLIBC:-0}"
venv="$repository/.venv/wheel"

lacks=()
need() {
    command -v "$1" > /dev/null || lacks+=("$1: $2")
}
has_zigbuild() {
    command -v cargo-zigbuild > /dev/null && { command -v zig > /dev/null || python3 -m ziglang version > /dev/null 2>&1; }
}
need python3 "install Python 3.9 or newer"
need objdump "install binutils"
need strip "install binutils"
if [ -z "$library" ]; then
    need cargo "install Rust, https://rustup.rs"
    need cc "install gcc or clang; build scripts of crates are compiled with it"
    if [ "$newer" != 1 ] && ! has_zigbuild && ! python3 -c "import ensurepip, venv" 2> /dev/null; then
        lacks+=("python3 -m venv: install python3-venv, for cargo-zigbuild and zig from PyPI")
    fi
    if command -v rustc > /dev/null && [ ! -d "$(rustc --print target-libdir --target "$triple")" ]; then
        lacks+=("Rust's standard library for $triple: rustup target add $triple")
    fi
elif [ ! -f "$library" ]; then
    lacks+=("$library: FLASHCORE_LIBRARY_FILE names a libflashcore.so that was built before")
fi
if [ ${#lacks[@]} -gt 0 ]; then
    echo "build-wheel.sh: nothing was compiled, because this is missing:" >&2
    printf '  %s\n' "${lacks[@]}" >&2
    exit 1
fi

build=(--quiet --release --locked --package flashcore-c --package flashcore-python --manifest-path "$repository/Cargo.toml")
if [ -n "$library" ]; then
    :
elif [ "$newer" = 1 ]; then
    cargo build "${build[@]}"
    library="$target/release/libflashcore.so"
else
    if ! has_zigbuild && [ "$(cat "$venv/installed" 2> /dev/null)" != "${tools[*]}" ]; then
        echo "installing ${tools[*]} into $venv" >&2
        python3 -m venv --clear "$venv" >&2
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${tools[@]}" >&2 || {
            echo "build-wheel.sh: nothing was compiled, because pip could not install ${tools[*]}; is there a network?" >&2
            exit 1
        }
        echo "${tools[*]}" > "$venv/installed"
    fi
    # cargo-zigbuild finds zig as a module of the first python3.
    has_zigbuild || PATH="$venv/bin:$PATH"
    cargo zigbuild "${build[@]}" --target "$triple.2.28"
    library="$target/$triple/release/libflashcore.so"
fi
options=()
if [ "$newer" = 1 ]; then
    options+=(--allow-newer-glibc)
fi
exec python3 "$repository/python/build_wheel.py" "$library" "$folder" "${options[@]}"
