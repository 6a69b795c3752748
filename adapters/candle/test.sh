#!/usr/bin/env bash
# Everything that must hold for the candle adapter on a machine without a GPU and without nvcc.
set -euo pipefail
cd "$(dirname "$0")"

cargo fmt --all --check
cargo clippy --locked --all-targets -- -D warnings
cargo test --locked
cargo test --locked -p flashcore-candle-renamed
RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --lib
cargo run --locked --release --example generate
bash check-cuda.sh
