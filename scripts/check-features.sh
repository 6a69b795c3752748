#!/usr/bin/env bash
# Checks every combination of cargo features that the README promises, and that a program can have flashcore beside a
# crate that chooses a CUDA version of its own.
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
without "" flashcore-cpu flashcore-cuda flashcore-kernels cudarc libloading sha2 serde
without "cpu" flashcore-cuda flashcore-kernels flashcore-ir cudarc libloading sha2 serde
without "cpu,cuda" cudarc

echo "what is said where a backend is left out"
cargo test --quiet --locked -p flashcore --no-default-features --test backends
cargo test --quiet --locked -p flashcore --no-default-features --features cpu --test backends

if rustup target list --installed 2> /dev/null | grep -qx wasm32-unknown-unknown; then
    check --features cpu --target wasm32-unknown-unknown
else
    echo "no wasm32-unknown-unknown here: not checked (rustup target add wasm32-unknown-unknown)"
fi

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/src"
cp Cargo.lock "$scratch/Cargo.lock" # the versions that are here already
cat > "$scratch/Cargo.toml" << TOML
[package]
name = "beside"
version = "0.0.0"
edition = "2024"

[dependencies]
flashcore = { path = "$PWD/crates/flashcore" }
cudarc = { version = "0.19", default-features = false, features = ["std", "driver", "fallback-dynamic-loading", "cuda-13000"] }

[workspace]

# As in the workspace, whose dependencies are compiled already.
[profile.dev]
opt-level = 1
debug = "line-tables-only"

[profile.dev.package."*"]
opt-level = 1
TOML
cat > "$scratch/src/main.rs" << 'RUST'
//! Buffers and a stream of cudarc, of another CUDA version, go into a launch.
use std::error::Error;

use cudarc::driver::{CudaStream, sys};
use flashcore::{DType, Device, DeviceTensors, Plan, Problem, supports};

fn launch(plan: &Plan, stream: &CudaStream, query: sys::CUdeviceptr) -> Result<(), Box<dyn Error>> {
    let tensors = DeviceTensors::new(query, query, query, query);
    unsafe { plan.launch(stream.cu_stream(), tensors) }?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let plan = supports(&Problem::new(1, 1, 1, 8, DType::F16), &Device::cpu())?;
    let _ = (launch, plan);
    Ok(())
}
RUST
echo "flashcore beside cudarc for CUDA 13"
CARGO_TARGET_DIR="$PWD/target" cargo check --quiet --manifest-path "$scratch/Cargo.toml"
