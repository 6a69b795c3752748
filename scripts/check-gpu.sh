#!/usr/bin/env bash
# Everything that only a GPU can show: the suites and random cases on its kernels, the tests that need one, the sanitizer,
# other projects' suites, and times beside other libraries.
#
#   scripts/check-gpu.sh [--quick] [--part PART]... [--seconds N] [FOLDER]      records go to FOLDER, default target/gpu
#
# Parts, in the order of a whole run; without --part, all:
#   right      suites, tests, conformance, accuracy, every operand from C
#   times      decode, FP8, f32, varlen and serving beside other libraries, held to aims
#   random     20,000 random cases of serving, and as many as a quarter of others
#   sanitizer  memcheck, racecheck, synccheck
#   adapters   the Python package, FlashAttention's suites, models of transformers
# --seconds N begins no step after N seconds and ends the one that is running: for machines that are lent by the minute.
#
# Programs that were built before are taken from FLASHCORE_PROGRAM (flashcore), FLASHCORE_LIBRARY (libflashcore.so),
# FLASHCORE_TESTS (test programs, separated by spaces), FLASHCORE_OPERANDS (all_operands, where there is no C compiler) and
# FLASHCORE_WHEEL, so that a machine without Rust will do; else cargo builds them. scripts/pack-gpu.sh makes a folder with
# all of them; `source FOLDER/env` sets the names. FLASHCORE_FA3 is the folder of FlashAttention-3,
# FLASHCORE_FLASH_ATTENTION a checkout of its repository at the revision of bench/third_party/flash_attn.sh, for its
# suites, which need torch, einops, pytest and triton.
# Each step says how long it took; a step that fails is named at the end, and the others run all the same.
set -uo pipefail
cd "$(dirname "$0")/.."

all_parts=(right times random sanitizer adapters)
quick=""
parts=()
limit=1000000
while [ $# -gt 0 ]; do
    case "$1" in
        --quick) quick=--quick ;;
        --part)
            [[ " ${all_parts[*]} " == *" ${2:-} "* ]] || {
                echo "--part is one of: ${all_parts[*]}" >&2
                exit 2
            }
            parts+=("$2")
            shift
            ;;
        --seconds)
            [[ "${2:-}" =~ ^[0-9]+$ ]] || {
                echo "--seconds takes a number of seconds" >&2
                exit 2
            }
            limit="$2"
            shift
            ;;
        -*)
            sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2
            exit 2
            ;;
        *) break ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=("${all_parts[@]}")
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
    if [ "$SECONDS" -ge "$limit" ]; then
        failed+=("$name (not run: out of time)")
        return
    fi
    printf '\n== %s\n' "$name"
    "$@" || failed+=("$name")
    echo "($name: $((SECONDS - begun)) s)"
}
within() { # a program, ended at the limit
    local left=$((limit - SECONDS))
    timeout --kill-after=5 $((left > 0 ? left : 1)) "$@"
}
last() { # the last line of a program, and its status
    local output status
    output="$(within "$@" 2> /dev/null)"
    status=$?
    tail -n 1 <<< "$output"
    grep -m 5 ' failed  ' <<< "$output"
    return $status
}

jobs="$(nproc)"
random=20000
[ -n "$quick" ] && random=1000

part_right() {
    step "suite serving" last "$flashcore" verify --backend cuda --suite serving --jobs "$jobs"
    step "suite features" last "$flashcore" verify --backend cuda --suite features --jobs "$jobs"
    step "suite configs" last "$flashcore" verify --backend cuda --suite configs --jobs "$jobs"
    if [ -n "${FLASHCORE_TESTS:-}" ]; then
        for test in $FLASHCORE_TESTS; do
            step "tests of $(basename "$test")" within "$test" --quiet
        done
    elif [ -z "${FLASHCORE_PROGRAM:-}" ]; then
        step "tests" within cargo test --quiet --workspace --locked
    fi
    step "conformance, and how tensor cores add" within "$flashcore" conformance --record "$folder/conformance.json"
    step "sums of the tensor cores" within "$flashcore" conformance --replay "$folder/conformance.json" --sums
    # Table in the log; the record has every sample.
    step "conversions of FP8, products of mma.sync" within "$flashcore" microbench --backend cuda \
        --record "$folder/microbench.json"
    step "accuracy of FP8" within "$flashcore" accuracy --gate --backend cuda --record "$folder/accuracy.json"
    step "every operand from C" operands
}

operands() { # every operand, launched from C, against the CPU; 3 means that there is no GPU
    if command -v cc > /dev/null; then
        cc -std=c11 -Icrates/flashcore-c/include crates/flashcore-c/examples/all_operands.c "$library" -ldl -lm \
            -o "$folder/all_operands" || return
        ln -sf "$(realpath "$library")" "$folder/libflashcore.so.0.1"
        LD_LIBRARY_PATH="$folder" within "$folder/all_operands"
    elif [ -n "${FLASHCORE_OPERANDS:-}" ]; then
        within "$FLASHCORE_OPERANDS"
    else
        echo "no C compiler here, and FLASHCORE_OPERANDS names no all_operands: not run"
    fi
}

part_times() {
    local fa3=() suite kernel form
    [ -n "${FLASHCORE_FA3:-}" ] && fa3=(--fa3 "$FLASHCORE_FA3")
    # With a time of its own: a part that is cut off leaves what it has measured in the record.
    step "serving beside other libraries" within env FLASHCORE_SELF_CHECK=off python3 bench/peers/serving.py \
        --library "$library" "${fa3[@]}" $quick --out "$folder/serving.json"
    step "aims" python3 bench/peers/serving_targets.py "$folder/serving.json"
    for suite in decode paged; do
        step "bench $suite" within "$flashcore" bench --backend cuda --suite $suite --dtype bf16 --record "$folder/$suite.json"
    done
    step "decode, FP8 cache" within "$flashcore" bench --backend cuda --suite decode --dtype 'bf16 kv e4m3'
    for form in tensor head token; do
        step "decode, FP8 cache, scales per $form" within "$flashcore" bench --backend cuda \
            --shape "8x32/8x1,8192x128+scales=$form" --dtype 'bf16 kv e4m3'
    done
    for kernel in hopper-128x128-2stage-overlap-persistent hopper-128x128-2stage-overlap-persistent-dynamic; do
        step "varlen, $kernel" within "$flashcore" bench --backend cuda --suite varlen --dtype bf16 --kernel "$kernel"
    done
}

part_random() {
    step "random cases, FP8 among them" last "$flashcore" verify --backend cuda --fuzz $((random / 4)) --jobs "$jobs"
    step "random cases of serving" last "$flashcore" verify --backend cuda --suite serving --fuzz $random --jobs "$jobs"
}

part_sanitizer() {
    local tool
    if ! command -v compute-sanitizer > /dev/null; then
        echo "no compute-sanitizer here: not run"
        return
    fi
    for tool in memcheck racecheck synccheck; do
        step "$tool" within compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 \
            "$flashcore" verify --backend cuda --suite serving --part 0/60 --jobs 1
    done
}

part_adapters() {
    local sample=400
    [ -n "$quick" ] && sample=40
    if [ -n "${FLASHCORE_WHEEL:-}" ]; then
        step "Python package" within env FLASHCORE_SITE=1 bash scripts/check-python.sh "$FLASHCORE_WHEEL"
    fi
    # Other projects' suites and models, with the package beside this script.
    export FLASHCORE_LIBRARY="$(realpath "$library")"
    if [ -n "${FLASHCORE_FLASH_ATTENTION:-}" ]; then
        step "FlashAttention's suites" within bash bench/third_party/flash_attn.sh --sample $sample "$FLASHCORE_FLASH_ATTENTION"
    else
        echo "FLASHCORE_FLASH_ATTENTION is not set: FlashAttention's suites were not run"
    fi
    if python3 -c "import torch, transformers" 2> /dev/null; then
        step "models of transformers" within python3 bench/third_party/transformers_models.py --device cuda
    else
        echo "no transformers here: its models were not run"
    fi
}

for part in "${parts[@]}"; do
    "part_$part"
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all is well"
