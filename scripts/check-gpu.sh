#!/usr/bin/env bash
# Everything that only a GPU can show: the suites and random cases on its kernels, the tests that need one, the sanitizer,
# and the times of serving beside other libraries.
#
#   scripts/check-gpu.sh [--quick] [FOLDER]      records go to FOLDER, target/gpu if none is given
#
# Programs that were built before are taken from FLASHCORE_PROGRAM (flashcore), FLASHCORE_LIBRARY (libflashcore.so),
# FLASHCORE_TESTS (test programs, separated by spaces), FLASHCORE_OPERANDS (all_operands, where there is no C compiler) and
# FLASHCORE_WHEEL, so that a machine without Rust will do; else cargo builds them. FLASHCORE_FA3 is the folder of
# FlashAttention-3, FLASHCORE_FLASH_ATTENTION a checkout of its repository at the revision of
# bench/third_party/flash_attn.sh, for its suites, which need torch, einops, pytest and triton.
# Each step says how long it took; a step that fails is named at the end, and the others run all the same.
set -uo pipefail
cd "$(dirname "$0")/.."

quick=""
if [ "${1:-}" = --quick ]; then
    quick=--quick
    shift
fi
folder="${1:-target/gpu}"
mkdir -p "$folder"
if [ -z "${FLASHCORE_PROGRAM:-}" ]; then
    cargo build --release --locked -p flashcore-cli -p flashcore-c || exit 1
fi
flashcore="${FLASHCORE_PROGRAM:-target/release/flashcore}"
library="${FLASHCORE_LIBRARY:-target/release/libflashcore.so}"
failed=()

step() {
    local name="$1" begun=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@" || failed+=("$name")
    echo "($name: $((SECONDS - begun)) s)"
}
last() { # the last line of a command, and its status
    local output status
    output="$("$@" 2> /dev/null)"
    status=$?
    tail -n 1 <<< "$output"
    grep -m 5 ' failed  ' <<< "$output"
    return $status
}

jobs="$(nproc)"
random=20000
[ -n "$quick" ] && random=1000
step "suite serving" last "$flashcore" verify --backend cuda --suite serving --jobs "$jobs"
step "suite features" last "$flashcore" verify --backend cuda --suite features --jobs "$jobs"
step "suite configs" last "$flashcore" verify --backend cuda --suite configs --jobs "$jobs"
step "random cases, FP8 among them" last "$flashcore" verify --backend cuda --fuzz $((random / 4)) --jobs "$jobs"
step "random cases of serving" last "$flashcore" verify --backend cuda --suite serving --fuzz $random --jobs "$jobs"
if [ -n "${FLASHCORE_TESTS:-}" ]; then
    for test in $FLASHCORE_TESTS; do
        step "tests of $(basename "$test")" "$test" --quiet
    done
elif [ -z "${FLASHCORE_PROGRAM:-}" ]; then
    step "tests" cargo test --quiet --workspace --locked
fi
step "conformance, and how tensor cores add" "$flashcore" conformance --record "$folder/conformance.json"
step "sums of the tensor cores" "$flashcore" conformance --replay "$folder/conformance.json" --sums
# Table in the log; the record has every sample.
step "conversions of FP8, products of mma.sync" "$flashcore" microbench --backend cuda --record "$folder/microbench.json"
step "accuracy of FP8" "$flashcore" accuracy --gate --backend cuda --record "$folder/accuracy.json"
programs=crates/flashcore-c/examples
operands() { # every operand, launched from C, against the CPU; 3 means that there is no GPU
    if command -v cc > /dev/null; then
        cc -std=c11 -Icrates/flashcore-c/include "$programs/all_operands.c" "$library" -ldl -lm -o "$folder/all_operands" || return
        ln -sf "$(realpath "$library")" "$folder/libflashcore.so.0.1"
        LD_LIBRARY_PATH="$folder" "$folder/all_operands"
    elif [ -n "${FLASHCORE_OPERANDS:-}" ]; then
        "$FLASHCORE_OPERANDS"
    else
        echo "no C compiler here, and FLASHCORE_OPERANDS names no all_operands: not run"
    fi
}
step "every operand from C" operands
if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck synccheck; do
        step "$tool" compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 \
            "$flashcore" verify --backend cuda --suite serving --part 0/60 --jobs 1
    done
else
    echo "no compute-sanitizer here: not run"
fi
if [ -n "${FLASHCORE_WHEEL:-}" ]; then
    step "Python package" env FLASHCORE_SITE=1 bash scripts/check-python.sh "$FLASHCORE_WHEEL"
fi
# Other projects' suites and models, with the package beside this script.
export FLASHCORE_LIBRARY="$(realpath "$library")"
sample=400
[ -n "$quick" ] && sample=40
if [ -n "${FLASHCORE_FLASH_ATTENTION:-}" ]; then
    step "FlashAttention's suites" bash bench/third_party/flash_attn.sh --sample $sample "$FLASHCORE_FLASH_ATTENTION"
else
    echo "FLASHCORE_FLASH_ATTENTION is not set: FlashAttention's suites were not run"
fi
if python3 -c "import torch, transformers" 2> /dev/null; then
    step "models of transformers" python3 bench/third_party/transformers_models.py --device cuda
else
    echo "no transformers here: its models were not run"
fi
fa3=()
[ -n "${FLASHCORE_FA3:-}" ] && fa3=(--fa3 "$FLASHCORE_FA3")
for suite in decode paged; do
    step "bench $suite" "$flashcore" bench --backend cuda --suite $suite --dtype bf16 --record "$folder/$suite.json"
done
for dtype in bf16 'bf16 kv e4m3'; do
    step "decode, $dtype" "$flashcore" bench --backend cuda --suite decode --dtype "$dtype"
done
for form in tensor head token; do
    step "decode, bf16 kv e4m3, scales per $form" "$flashcore" bench --backend cuda \
        --shape "8x32/8x1,8192x128+scales=$form" --dtype 'bf16 kv e4m3'
done
for kernel in hopper-128x128-2stage-overlap-persistent hopper-128x128-2stage-overlap-persistent-dynamic; do
    step "varlen, $kernel" "$flashcore" bench --backend cuda --suite varlen --dtype bf16 --kernel "$kernel"
done
for shape in 4x16x4096x128 1x16x16384x128; do
    step "FP8 prefill $shape" "$flashcore" bench --backend cuda --shape "$shape" --dtype 'e4m3 out bf16'
done
step "serving beside other libraries" env FLASHCORE_SELF_CHECK=off python3 bench/peers/serving.py --library "$library" \
    "${fa3[@]}" $quick --out "$folder/serving.json"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all is well"
