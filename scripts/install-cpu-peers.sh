#!/usr/bin/env bash
# Installs what bench/peers/cpu.py compares with, PyTorch and ONNX Runtime, and prints the path of the Python to run it.
# PyTorch's build on PyPI brings CUDA with it: about 6 GB on disk.
#
#   scripts/install-cpu-peers.sh [directory]      default: .venv/peers in the repository root
#
# Running it again changes nothing and prints the same path.
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
directory="${1:-$repository/.venv/peers}"
python="$directory/bin/python"

if ! "$python" -c "import numpy, onnx, onnxruntime, torch" 2>/dev/null; then
    [ -x "$python" ] || python3 -m venv "$directory" >&2
    "$python" -m pip install --quiet --disable-pip-version-check numpy onnx onnxruntime torch >&2
fi
echo "$python"
