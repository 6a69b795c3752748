#!/usr/bin/env bash
# Runs FlashAttention's own suites, unchanged, with flashcore.compat in place of flash_attn and flash_attn_interface.
#
#     bench/third_party/flash_attn.sh [--help] [--cpu] [--sample N] [CHECKOUT] [-- ARGUMENTS]
#
# CHECKOUT is a folder with FlashAttention at the revision below; without one it is cloned. Everything past -- is pytest's,
# --largest N among it: no case of more than N products of query and key length, which take minutes each on a CPU.
# --sample N draws N cases of each test, and as many as it takes to have every value of every parameter and every three
# values together, lengths and head dims aside: all cases are 600,000. SEED is its seed.
# --cpu makes tensors on the CPU that the suites ask for on CUDA: the same references and tolerances judge the CPU backend.
# SUITES is "fa3 fa2"; PYTHON the interpreter, which needs torch, einops, pytest, and for CUDA triton. The package is the
# one beside this script with target/release/libflashcore.so, unless FLASHCORE_SITE=1 takes the one that is installed.
# FLASHCORE_PACKAGES is a folder with packages that the interpreter lacks.
#
# Forward only, 16 bits: FlashAttention 3's switches leave backward and FP8 out. For FlashAttention 2 see
# flash_attn_plugin.py: cases that assert their output and then a gradient count as "forward only", not as passed.
# flash_attn_deselected.toml has the cases that are left out, with a reason each.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"

revision=0251105a2fb19d2957484b7f023cd8c115286ced # 2026-08-15, version 2.8.4
on=cuda
sample=()
checkout=""
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h)
            sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
            exit
            ;;
        --cpu) on=cpu ;;
        --sample)
            sample=(--sample "$2" --seed "${SEED:-0}")
            shift
            ;;
        --)
            shift
            break
            ;;
        -*)
            echo "unknown option $1; --help lists them" >&2
            exit 2
            ;;
        *) checkout="$(cd "$1" && pwd)" ;;
    esac
    shift
done
if [ -z "$checkout" ]; then
    checkout="$root/target/flash-attention"
    if [ ! -d "$checkout" ]; then
        git init --quiet "$checkout"
        git -C "$checkout" fetch --quiet --depth 1 https://github.com/Dao-AILab/flash-attention "$revision"
        git -C "$checkout" checkout --quiet FETCH_HEAD
    fi
fi
# The files that run are those of the revision, by content.
(cd "$checkout" && sha256sum --check --quiet "$here/flash_attn.sha256")

export PYTHONPATH="$here"
if [ "${FLASHCORE_SITE:-0}" != 1 ]; then
    export PYTHONPATH="$here:$root/python"
    export FLASHCORE_LIBRARY="${FLASHCORE_LIBRARY:-$root/target/release/libflashcore.so}"
fi
export PYTHONPATH="$PYTHONPATH${FLASHCORE_PACKAGES:+:$FLASHCORE_PACKAGES}"
export FLASH_ATTENTION_DISABLE_BACKWARD=TRUE FLASH_ATTENTION_DISABLE_FP8=TRUE
status=0
for suite in ${SUITES:-fa3 fa2}; do
    case "$suite" in
        fa3) file=hopper/test_flash_attn.py ;;
        fa2) file=tests/test_flash_attn.py ;;
    esac
    "${PYTHON:-python3}" -m pytest -p flash_attn_plugin -p no:cacheprovider --rootdir "$checkout" -c /dev/null -q \
        --suite "$suite" --checkout "$checkout" --on "$on" "${sample[@]}" "$checkout/$file" "$@" || status=1
done
exit $status
