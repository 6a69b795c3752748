#!/usr/bin/env bash
# Installs the wheel into a fresh virtual environment and runs its tests there.
#
#   scripts/check-python.sh WHEEL [torch]
#
# Without `torch`, the tests that need numpy alone: under a minute. With it, torch and transformers are installed too and
# all tests run. FLASHCORE_PYTHON names the interpreter (python3). FLASHCORE_SITE=1 runs all tests with what the
# interpreter has already installed, without a network; FLASHCORE_PACKAGES is a folder with packages that it lacks.
set -euo pipefail

if [ $# -lt 1 ] || [ ! -f "$1" ]; then
    echo "usage: [FLASHCORE_PYTHON=python3.9] $0 WHEEL [torch]; scripts/build-wheel.sh makes a wheel" >&2
    exit 2
fi
wheel="$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"
with="${2:-}"
repository="$(cd "$(dirname "$0")/.." && pwd)"
python="${FLASHCORE_PYTHON:-python3}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

packages="${FLASHCORE_PACKAGES:-}"
into=()
if [ "${FLASHCORE_SITE:-0}" = 1 ]; then
    # A folder: an environment made from another one would not see the packages of that one.
    into=(--target "$folder/site")
    packages="$folder/site:$packages"
    with=torch
else
    "$python" -m venv "$folder/venv"
    python="$folder/venv/bin/python"
fi
unset PYTHONPATH FLASHCORE_LIBRARY
# The installation comes first and alone: nothing but the wheel is needed to import it and to be told what is there.
# The whole of it, from the file to the first answer, is to stay below ten seconds.
start="$(date +%s.%N)"
"$python" -m pip install --quiet --no-index --no-deps "${into[@]}" "$wheel"
(cd "$folder" && PYTHONPATH="$packages" "$python" -m flashcore)
end="$(date +%s.%N)"
echo "from the wheel to a first plan: $(echo "$end $start" | awk '{printf "%.1f s", $1 - $2}')"
if [ "${FLASHCORE_SITE:-0}" != 1 ]; then
    "$python" -m pip install --quiet numpy ml_dtypes pytest
    if [ "$with" = torch ]; then
        "$python" -m pip install --quiet "torch${FLASHCORE_TORCH:-}" transformers
    fi
fi
cp -r "$repository/python/tests" "$folder/tests"
export PYTHONPATH="$packages"
export FLASHCORE_DOCS="$repository/docs"
cd "$folder"
if [ "$with" = torch ]; then
    "$python" -m pytest -q tests
    # Once more with operators in Python, and without libflashcore_python.so: the Python way of every call.
    FLASHCORE_STABLE=0 "$python" -m pytest -q tests/test_torch.py tests/test_float8.py tests/test_bad_input.py
    FLASHCORE_FAST=0 "$python" -m pytest -q tests/test_torch.py tests/test_float8.py tests/test_bad_input.py
else
    "$python" -m pytest -q tests/test_attention.py tests/test_protocols.py tests/test_wheel.py tests/test_build_wheel.py
fi
