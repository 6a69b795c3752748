#!/usr/bin/env bash
# Runs candle's own tests of flash attention, unchanged, with flashcore-candle in place of the crates they were written
# for; and then this project's tests of the adapter on the same GPU.
#
#     bench/third_party/candle.sh                # fetches candle at the pinned revision
#     bench/third_party/candle.sh PATH           # test files from a checkout of candle
#     bench/third_party/candle.sh --check PATH   # only checks that they compile
#     bench/third_party/candle.sh --cpu [PATH]   # the same tests with CPU tensors
#
# With --cpu one line of the copies is another, which the script prints: Device::new_cuda(0)? becomes Device::Cpu. Head dim
# 512 is computed there, and nothing but cargo is needed. The arguments, the tensors and the expected numbers are candle's.
# One test is left out:
#   flash_attn_acausal_gqa of v3    its numbers, to four digits, are those of weights rounded to f16, as tensor cores take
#                                   them; the CPU does not round weights, and gives the f16 next to the exact result
#
# Without --cpu it needs a GPU of compute capability 8.0 or later, its driver, and what candle's feature `cuda` needs to build: nvcc, a C++
# compiler, and the libraries cudart, cublas, cublasLt, curand and nvrtc to link with. Tests are left out for one reason:
# GPU kernels here have head dims up to 256.
#   flash_attn_varlen_paged_shuffled_block_table_hd512   head dim 512
#   flash_attn_varlen_param, fourth head dim             head dim 512
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"

revision=2a13b0f3ff62f7e67013597f2996f764c5735e21 # 2026-08-14
command=(cargo test --no-fail-fast)
only_check="" on_cpu="" features='features = ["cuda"]'
if [ "${1:-}" = --check ]; then
    only_check=1
    command=(cargo check --tests)
    shift
elif [ "${1:-}" = --cpu ]; then
    on_cpu=1
    features='default-features = false'
    shift
fi

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
candle="${1:-}"
if [ -z "$candle" ]; then
    candle="$scratch/candle"
    git init --quiet "$candle"
    git -C "$candle" fetch --quiet --depth 1 https://github.com/huggingface/candle "$revision"
    git -C "$candle" checkout --quiet FETCH_HEAD
fi

mkdir -p "$scratch/suites/src" "$scratch/suites/tests"
cp "$candle/candle-flash-attn/tests/flash_attn_tests.rs" "$scratch/suites/tests/flash_attn.rs"
cp "$candle/candle-flash-attn-v3/tests/flash_attn_tests.rs" "$scratch/suites/tests/flash_attn_v3.rs"
: > "$scratch/suites/src/lib.rs"
if [ -n "$on_cpu" ]; then
    for name in "" -v3; do
        from="$candle/candle-flash-attn$name/tests/flash_attn_tests.rs" to="$scratch/suites/tests/flash_attn${name/-/_}.rs"
        sed -i 's/Device::new_cuda(0)?/Device::Cpu/' "$to"
        echo "changed in candle-flash-attn$name:"
        diff "$from" "$to" || true
    done
fi
cp "$root/adapters/candle/Cargo.lock" "$scratch/suites/Cargo.lock" # the versions that the adapter is tested with
cat > "$scratch/suites/Cargo.toml" << TOML
[package]
name = "suites"
version = "0.0.0"
edition = "2021"

[dependencies]
anyhow = { version = "1", features = ["backtrace"] }
candle = { package = "candle-core", version = "0.11", $features }
candle-nn = { version = "0.11", $features }
candle-flash-attn = { package = "flashcore-candle", path = "$root/adapters/candle", $features }
candle-flash-attn-v3 = { path = "$root/adapters/candle/shims/candle-flash-attn-v3", $features }
rstest = "0.23"

[workspace]

# As in the adapter, whose builds can then be used.
[profile.dev]
debug = false

[profile.dev.package.flashcore-cpu]
opt-level = 1

[profile.dev.package.flashcore-problem]
opt-level = 1
TOML
target="$root/adapters/candle/target"
[ -n "$on_cpu" ] || target="$target/suites"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$target}"

cd "$scratch/suites"
if [ -n "$only_check" ]; then
    "${command[@]}"
    exit
fi
if [ -n "$on_cpu" ]; then
    "${command[@]}" -- --skip flash_attn_acausal_gqa
    exit
fi
"${command[@]}" -- --skip hd512 --skip head_dim_4

cd "$root/adapters/candle"
FLASHCORE_CANDLE_CUDA=1 cargo test --locked --features cuda --test suite -- --test-threads 4
cargo run --locked --release --features cuda --example generate -- cuda
