#!/usr/bin/env bash
# Checks every combination of cargo features that the README promises, and that the program chooses the CUDA version of
# cudarc, with and without flashcore's feature `cudarc`.
set -euo pipefail
cd "$(dirname "$0")/.."

check() {
    echo "flashcore with ${*:-no features}"
    cargo clippy --quiet --locked -p flashcore --lib --no-default-features "$@" -- -D warnings
}
# Crates that a build must not contain.
without() {
    local features="$1"
    shift
    local tree
    tree="$(cargo tree --locked -p flashcore --edges normal --prefix none --no-default-features --features "$features")"
    for crate in "$@"; do
        if grep -q "^$crate v" <<< "$tree"; then
            echo "the features \`$features\` of flashcore bring $crate, which they must not" >&2
            exit 1
        fi
    done
}

check
check --features cpu
check --features cuda
check --features cpu,cuda
# The feature `cudarc` chooses no CUDA version: the oldest that works, and one of the next major version.
check --features cudarc,cudarc/cuda-12000
check --features cpu,cudarc,cudarc/cuda-13000
without "" flashcore-cpu flashcore-cuda flashcore-kernels cudarc libloading sha2 serde
without "cpu" flashcore-cuda flashcore-kernels flashcore-ir cudarc libloading sha2 serde
without "cpu,cuda" cudarc

echo "what is said where a backend is left out"
cargo test --quiet --locked -p flashcore --no-default-features --test api
cargo test --quiet --locked -p flashcore --no-default-features --features cpu --test api

echo "typed buffers of cudarc: lints, checks of lengths and types, the example"
cargo clippy --quiet --locked -p flashcore --features cudarc --lib --tests --examples -- -D warnings
cargo test --quiet --locked -p flashcore --features cudarc --lib cudarc
cargo test --quiet --locked -p flashcore --features cudarc --doc cudarc
cargo run --quiet --locked -p flashcore --features cudarc --example cudarc_buffers

if rustup target list --installed 2> /dev/null | grep -qx wasm32-unknown-unknown; then
    check --features cpu --target wasm32-unknown-unknown
else
    echo "no wasm32-unknown-unknown here: not checked (rustup target add wasm32-unknown-unknown)"
fi

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# A program with flashcore and a cudarc of its own: features of flashcore, those of cudarc, the program's main function.
neighbour() {
    mkdir -p "$scratch/src"
    cp Cargo.lock "$scratch/Cargo.lock" # the versions that are here already
    cat > "$scratch/Cargo.toml" << TOML
[package]
name = "neighbour"
version = "0.0.0"
edition = "2024"

[dependencies]
flashcore = { path = "$PWD/crates/flashcore", features = [$1] }
cudarc = { version = "0.19", default-features = false, features = [$2] }

[workspace]

# As in the workspace, whose dependencies are compiled already.
[profile.dev]
opt-level = 1
debug = "line-tables-only"

[profile.dev.package."*"]
opt-level = 1
TOML
    cat > "$scratch/src/main.rs"
    CARGO_TARGET_DIR="$PWD/target" cargo check --quiet --manifest-path "$scratch/Cargo.toml"
}

echo "flashcore beside cudarc for CUDA 13: addresses and a raw stream go into a launch"
neighbour '' '"std", "driver", "fallback-dynamic-loading", "cuda-13000"' << 'RUST'
use cudarc::driver::{CudaStream, sys};
use flashcore::{DeviceTensors, Error, Plan};

fn launch(plan: &Plan, stream: &CudaStream, query: sys::CUdeviceptr) -> Result<(), Error> {
    let tensors = DeviceTensors::new(query, query, query, query);
    unsafe { plan.launch(stream.cu_stream(), tensors) }
}

fn main() {
    let _ = launch;
}
RUST

# As candle has it: linked against the driver's library, which a check does not need.
for link in fallback-dynamic-loading dynamic-linking; do
    echo "flashcore with the feature cudarc beside cudarc for CUDA 13 and $link: typed buffers go into a launch"
    neighbour '"cudarc"' "\"driver\", \"$link\", \"cuda-13000\"" << 'RUST'
#![forbid(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use flashcore::cudarc::{TypedTensors, launch};
use flashcore::half::bf16;
use flashcore::{Error, Plan};

fn attend(
    plan: &Plan,
    stream: &Arc<CudaStream>,
    query: &CudaSlice<bf16>,
    cache: &CudaSlice<bf16>,
    lengths: &CudaSlice<u32>,
    output: &mut CudaSlice<bf16>,
) -> Result<(), Error> {
    let (key, value) = cache.split_at(cache.len() / 2);
    launch(plan, stream, TypedTensors::new(query, key, value, output).with_seqused_k(lengths))
}

fn main() {
    let _ = attend;
}
RUST
done
