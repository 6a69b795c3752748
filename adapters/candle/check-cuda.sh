#!/usr/bin/env bash
# Checks the types and lints of the CUDA code of this workspace on a machine without a CUDA toolkit.
#
# candle's feature `cuda` compiles kernels with nvcc in a build script. Where there is no nvcc, a stand-in writes empty
# files in their place: enough for `cargo clippy`, which links and runs nothing.
set -euo pipefail
cd "$(dirname "$0")"

if ! command -v nvcc > /dev/null; then
    echo "no nvcc here: a stand-in writes empty kernels, and nothing is linked"
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
    mkdir -p "$folder/bin"
    cat > "$folder/bin/nvcc" << 'NVCC'
#!/usr/bin/env bash
output="" folder="" source=""
while [ $# -gt 0 ]; do
    case "$1" in
        --version) echo "Cuda compilation tools, release 12.8, V12.8.0"; exit 0 ;;
        --list-gpu-code) echo "sm_80"; exit 0 ;;
        -o) output="$2"; shift ;;
        --output-directory) folder="$2"; shift ;;
        *.cu) source="$1" ;;
    esac
    shift
done
[ -z "$output" ] || : > "$output"
[ -z "$folder" ] || : > "$folder/$(basename "${source%.cu}").ptx"
NVCC
    chmod +x "$folder/bin/nvcc"
    export PATH="$folder/bin:$PATH" NVCC="$folder/bin/nvcc"
fi
export CUDARC_CUDA_VERSION="${CUDARC_CUDA_VERSION:-12080}" CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-80}"

# Metadata for another feature set than the tests have, so in a folder of its own.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/check-cuda"
cargo clippy --locked --features cuda --lib --tests --examples -- -D warnings
# candle-transformers with its feature flash-attn, which gets this crate by the name of the other.
if [ "${1:-}" = --transformers ]; then
    cargo clippy --locked -p flashcore-candle-transformers --features flash-attn -- -D warnings
    cargo clippy --locked -p candle-flash-attn-v3 -- -D warnings
fi
