#!/usr/bin/env bash
# Builds the Python wheel: one file for every Python from 3.9 on and every torch, with libflashcore inside.
#
#   scripts/build-wheel.sh [FOLDER]      the wheel goes to FOLDER, target/wheels if none is given
#
# The library must need nothing newer than glibc 2.28 (manylinux_2_28). A plain `cargo build` takes the symbols of the
# system's own glibc (stat64 of 2.33, pthread_create of 2.34), so the release build is made by cargo-zigbuild, which links
# against the stubs of an older glibc; `pip install cargo-zigbuild ziglang` installs both without root.
#
# FLASHCORE_LIBRARY_FILE=PATH takes a library that was built before, and libflashcore_python.so beside it.
# FLASHCORE_ALLOW_NEWER_GLIBC=1 takes one with newer symbols, and says so in the wheel's tag.
set -euo pipefail

repository="$(cd "$(dirname "$0")/.." && pwd)"
target="${CARGO_TARGET_DIR:-$repository/target}"
folder="${1:-$target/wheels}"
library="${FLASHCORE_LIBRARY_FILE:-}"
if [ -z "$library" ]; then
    if command -v cargo-zigbuild > /dev/null; then
        cargo zigbuild --quiet --release --locked --package flashcore-c --package flashcore-python --manifest-path "$repository/Cargo.toml" \
            --target x86_64-unknown-linux-gnu.2.28
        library="$target/x86_64-unknown-linux-gnu/release/libflashcore.so"
    else
        echo "cargo-zigbuild was not found; 'pip install cargo-zigbuild ziglang' installs it. Building with cargo." >&2
        cargo build --quiet --release --locked --package flashcore-c --package flashcore-python --manifest-path "$repository/Cargo.toml"
        library="$target/release/libflashcore.so"
    fi
fi
options=()
if [ "${FLASHCORE_ALLOW_NEWER_GLIBC:-0}" = 1 ]; then
    options+=(--allow-newer-glibc)
fi
exec python3 "$repository/python/build_wheel.py" "$library" "$folder" "${options[@]}"
