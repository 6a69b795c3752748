"""The C library by ctypes: structs of flashcore.h, functions with their argument types, and where the file is found."""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, NoReturn, Optional

from ._errors import FlashcoreError, of_status

F16, BF16, F32, F64, E4M3, E5M2, I32, I64 = range(1, 9)
MASK_NONE, MASK_CAUSAL, MASK_WINDOW = range(3)
TOP_LEFT, BOTTOM_RIGHT = range(2)
LAYOUT_STRIDED = 3
CPU, CUDA = range(2)
OPERATION_CONTINUE = 2
ROTARY_NONE, ROTARY_NEOX, ROTARY_GPTJ = range(3)
LSE_NATURAL, LSE_BASE_2 = range(2)

ITEM_BYTES = {F16: 2, BF16: 2, F32: 4, F64: 8, E4M3: 1, E5M2: 1}
DTYPE_NAMES = {
    F16: "float16", BF16: "bfloat16", F32: "float32", F64: "float64", E4M3: "float8_e4m3fn", E5M2: "float8_e5m2",
}  # fmt: skip
FLOAT8 = (E4M3, E5M2)
# Types of operands: those of tensors, and integers.
CODES: "dict[Any, int]" = {**{dtype: dtype for dtype in ITEM_BYTES}, "int32": I32, "int64": I64}
OPERAND_BYTES = {**ITEM_BYTES, I32: 4, I64: 8}
SCALES = ("q_scale", "k_scale", "v_scale")
# Numbers of operands, from 1 on, and what takes the place of one.
OPERANDS = {
    name: number
    for number, name in enumerate(
        ["query", "key", "value", "output", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k"]
        + ["kv_batch_idx", "page_table", "alibi_slopes", "sinks", "aux_f32", "aux_i32", "bias", *SCALES]
        + ["new_key", "new_value", "slot_mapping", "positions", "cu_seqlens_k_new", "rotary_seqlens", "cos", "sin"]
        + ["query_norm", "key_norm", "key_cache", "value_cache", "query_output", "part_outputs", "part_lses"],
        1,
    )
}
OPERANDS["workspace"] = -1
# 64-bit words of flashcore_tensor_t: operand and type, address, bytes, five strides.
TENSOR_WORDS = 8


def _words(*names: str) -> list:
    return [(name, c_uint64) for name in names]


def _ints(*names: str) -> list:
    return [(name, c_int32) for name in names]


class Base(Structure):
    """flashcore_problem_t"""

    _fields_ = [("operation", c_int32), ("struct_size", c_uint32)]


class Strides(Structure):
    """flashcore_strides_t"""

    _fields_ = _words("batch", "head", "row")


class Problem(Structure):
    """flashcore_attention_problem_t"""

    _fields_ = (
        [("base", Base)]
        + _words("batch", "query_heads", "key_heads", "query_length", "key_length", "head_dim", "value_dim")
        + [("scale", c_double)]
        + _ints("dtype", "kv_dtype", "out_dtype", "layout", "mask", "alignment")
        + [("window_left", c_int64), ("window_right", c_int64), ("softcap", c_float)]
        + _ints("alibi", "sinks", "bias", "lse", "lse_base", "lse_without_sink", "cu_seqlens_q", "cu_seqlens_k")
        + _ints("seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx", "page_table", *SCALES)
        + _words("total_q", "total_k", "kv_batch", "page_size", "num_pages", "table_width", "table_stride")
        + [(f"{tensor}_strides", Strides) for tensor in ("query", "key", "value", "output")]
        + [("score_mod", c_char_p), ("mask_mod", c_char_p)]
        + _words("aux_f32", "aux_i32")
    )


class Rotary(Structure):
    """flashcore_rotary_t"""

    _fields_ = _ints("style", "table_dtype") + _words("dim", "max_position", "table_stride")


class AppendProblem(Structure):
    """flashcore_append_problem_t"""

    _fields_ = (
        [("base", Base)]
        + _words("tokens", "query_heads", "key_heads", "head_dim", "value_dim", "num_pages", "page_size")
        + _ints("dtype", "cache_dtype", "position_dtype", "qk_norm")
        + [("norm_eps", c_float)]
        + _ints("k_scale", "v_scale", "compute_scales")
        + [("rotary", Rotary)]
        + [
            (f"{tensor}_strides", Strides)
            for tensor in ("query", "query_output", "key", "value", "key_cache", "value_cache")
        ]
    )


class KvCacheProblem(Structure):
    """flashcore_kvcache_problem_t"""

    _fields_ = (
        [("base", Base), ("attention", Problem)]
        + _words("new_length", "total_new")
        + [("rotary", Rotary)]
        + _ints("rotary_seqlens", "qk_norm")
        + [("norm_eps", c_float)]
        + _ints("compute_scales")
        + [(f"{tensor}_strides", Strides) for tensor in ("new_key", "new_value")]
    )


class MergeProblem(Structure):
    """flashcore_merge_problem_t"""

    _fields_ = (
        [("base", Base)]
        + _words("num_parts", "tokens", "heads", "value_dim")
        + _ints("part_dtype", "dtype", "lse_base", "lse")
        + [(f"{tensor}_strides", Strides) for tensor in ("part", "part_lse", "output", "lse")]
    )


def path() -> str:
    """The library's file: $FLASHCORE_LIBRARY, or the one inside of the package."""
    chosen = os.environ.get("FLASHCORE_LIBRARY")
    if chosen:
        return chosen
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "libflashcore.so")


def _load(file: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(file)
    except OSError as error:
        raise ImportError(
            f"flashcore cannot load its library {file}: {error}; install a wheel for this platform (Linux, x86-64, glibc "
            "2.28 or newer), or set FLASHCORE_LIBRARY to a libflashcore.so"
        ) from error
    status, text, word, plan, address = c_int32, c_char_p, c_uint64, c_void_p, c_void_p
    signatures = {
        "last_error": (text, []),
        "status_name": (text, [status]),
        "version": (text, []),
        "configs": (text, []),
        "attention_problem_init": (status, [POINTER(Problem)] + [word] * 4 + [c_int32]),
        "append_problem_init": (status, [POINTER(AppendProblem)] + [word] * 6 + [c_int32]),
        "kvcache_problem_init": (status, [POINTER(KvCacheProblem), POINTER(Problem), word]),
        "merge_problem_init": (status, [POINTER(MergeProblem)] + [word] * 4 + [c_int32]),
        "plan_create": (status, [address, c_int32, c_int32, text, POINTER(plan)]),
        "plan_workspace_bytes": (word, [plan]),
        "plan_describe": (text, [plan]),
        "plan_destroy": (status, [plan]),
        "run": (status, [plan, address, word]),
        "launch": (status, [plan, address, address, word]),
    }
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(library, f"flashcore_{name}")
        except AttributeError as error:
            raise ImportError(
                f"{file} has no flashcore_{name}; it is older than this package: install both from one wheel"
            ) from error
        function.restype, function.argtypes = result, arguments
    return library


LIBRARY = _load(path())
_last_error = LIBRARY.flashcore_last_error


def version() -> str:
    """Version of the library."""
    return LIBRARY.flashcore_version().decode()


# Tensors of a call, and what the functions here call them.
_FIELD = re.compile(r"\btensors\.(\w+)")
_ARGUMENTS = {
    "query": "q", "key": "k", "value": "v", "new_key": "k", "new_value": "v", "output": "out", "key_cache": "k_cache", "value_cache": "v_cache",
    "query_norm": "q_norm", "key_norm": "k_norm", "part_outputs": "parts", "part_lses": "lses",
}  # fmt: skip


def error_of(status: int) -> FlashcoreError:
    """The exception for the status of the last call on this thread."""
    text = _last_error().decode(errors="replace")
    return of_status(status, _FIELD.sub(lambda field: _ARGUMENTS.get(field[1], field[1]), text))


def fail(status: int) -> NoReturn:
    """Raises the exception for the status of the last call on this thread."""
    raise error_of(status)


def check(status: int) -> None:
    """Raises unless the status is 0."""
    if status:
        fail(status)


def describe(handle: Optional[int]) -> str:
    """Problem, device and kernel of a plan."""
    text = LIBRARY.flashcore_plan_describe(handle)
    return text.decode() if text else ""
