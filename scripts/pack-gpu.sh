#!/usr/bin/env bash
# Builds what scripts/check-gpu.sh needs on a machine with a GPU and without Rust, network or C compiler, and lays it into
# one folder: programs, libraries, tests, the wheel, and Python packages for the tests.
#
#   scripts/pack-gpu.sh [FOLDER]      default: target/gpu-programs
#
# There, in a checkout of the same commit with the folder at the same place:
#   source FOLDER/env && scripts/check-gpu.sh --part right --seconds 540
#
# FLASHCORE_FLASH_ATTENTION=CHECKOUT packs FlashAttention's suites too. The programs need a glibc as new as this machine's.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-target/gpu-programs}"
rm -rf "$folder"
mkdir -p "$folder"

cargo build --release --locked -p flashcore-cli -p flashcore-c -p flashcore-python
tests="$(cargo test --release --locked -p flashcore-bench --test gpu --no-run --message-format=json \
    | python3 -c 'import json, sys; print([m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable")][-1])')"
strip -o "$folder/flashcore" target/release/flashcore
strip -o "$folder/gpu-tests" "$tests"
strip --strip-unneeded -o "$folder/libflashcore.so" target/release/libflashcore.so
ln "$folder/libflashcore.so" "$folder/libflashcore.so.0.1"
cc -std=c11 -Icrates/flashcore-c/include crates/flashcore-c/examples/all_operands.c "$folder/libflashcore.so" -ldl -lm \
    -Wl,-rpath,'$ORIGIN' -o "$folder/all_operands"
FLASHCORE_LIBRARY_FILE=target/release/libflashcore.so FLASHCORE_ALLOW_NEWER_GLIBC=1 bash scripts/build-wheel.sh "$folder"
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/packages" pytest einops
if [ -n "${FLASHCORE_FLASH_ATTENTION:-}" ]; then
    # The files that the suites are, by the list of their sums.
    awk '{print $2}' bench/third_party/flash_attn.sha256 \
        | tar --create --directory "$FLASHCORE_FLASH_ATTENTION" --files-from - | tar --extract --one-top-level="$folder/flash-attention"
fi
cat > "$folder/env" << 'END'
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export FLASHCORE_PROGRAM="$here/flashcore" FLASHCORE_LIBRARY="$here/libflashcore.so" FLASHCORE_TESTS="$here/gpu-tests"
export FLASHCORE_OPERANDS="$here/all_operands" FLASHCORE_WHEEL="$(echo "$here"/*.whl)"
export FLASHCORE_PACKAGES="$here/packages"
if [ -d "$here/flash-attention" ]; then export FLASHCORE_FLASH_ATTENTION="$here/flash-attention"; fi
END
du -sh "$folder" | cut -f 1
