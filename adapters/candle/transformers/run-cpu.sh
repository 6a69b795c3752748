#!/usr/bin/env bash
# Runs the Llama of candle-transformers with its feature flash-attn on CPU tensors, on a machine without nvcc.
#
#     adapters/candle/transformers/run-cpu.sh
#
# That feature turns on CUDA in candle, for which nvcc is needed although nothing here uses it. So a copy of
# candle-transformers, of the version in Cargo.lock, gets two lines of its Cargo.toml changed, which this prints: the feature
# no longer asks for CUDA, and neither does its dependency on candle-flash-attn, which is flashcore. The code is unchanged.
set -euo pipefail
workspace="$(cd "$(dirname "$0")/.." && pwd)"

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
cd "$workspace"
# Downloads what is not there, and says where it is.
original="$(cargo metadata --locked --format-version 1 |
    python3 -c 'import json, sys; print(*(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "candle-transformers"))')"
cp -r "$(dirname "$original")" "$scratch/candle-transformers"
python3 - "$original" "$scratch/candle-transformers/Cargo.toml" << 'PYTHON'
import difflib, re, sys

before = open(sys.argv[1], encoding="utf-8").read()
after, features = re.subn(r'(flash-attn = \[\s*)"cuda",\s*', r"\1", before)
after, dependencies = re.subn(r"(\[dependencies\.candle-flash-attn\]\n)", r"\1default-features = false\n", after)
if (features, dependencies) != (1, 1):
    sys.exit("candle-transformers has another Cargo.toml than this script knows")
open(sys.argv[2], "w", encoding="utf-8").write(after)
lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "candle-transformers", "the copy", lineterm="", n=1)
print(*lines, sep="\n")
PYTHON

mkdir "$scratch/program"
cp -r transformers/src "$scratch/program/src"
cp Cargo.lock "$scratch/program/Cargo.lock"
sed '/^\[dependencies\]/q' transformers/Cargo.toml > "$scratch/program/Cargo.toml"
cat >> "$scratch/program/Cargo.toml" << TOML
candle-core = { version = "0.11", default-features = false }
candle-nn = { version = "0.11", default-features = false }
candle-transformers = { version = "0.11", default-features = false }

[patch.crates-io]
candle-flash-attn = { path = "$workspace/shims/candle-flash-attn" }
candle-transformers = { path = "$scratch/candle-transformers" }

[workspace]
TOML
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$workspace/target}"
cd "$scratch/program"
cargo run --release --features flash-attn -- --cpu
