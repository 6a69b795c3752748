"""The C library by ctypes: structs of flashcore.h, functions with their argument types, and where the file is found.

Structs here grow at their end like those of the header: `struct_size` tells the library which version it reads.
"""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Dict, NoReturn, Optional, Tuple

from ._errors import FlashcoreError, of_status

F16, BF16, F32, F64, E4M3, E5M2 = range(6)
MASK_NONE, MASK_CAUSAL, MASK_WINDOW = range(3)
TOP_LEFT, BOTTOM_RIGHT = range(2)
LAYOUT_STRIDED = 3
CPU, CUDA = range(2)
ROTARY_NONE, ROTARY_NEOX, ROTARY_GPTJ = range(3)
LSE_NATURAL, LSE_BASE_2 = range(2)

ITEM_BYTES = {F16: 2, BF16: 2, F32: 4, F64: 8, E4M3: 1, E5M2: 1}
DTYPE_NAMES = {
    F16: "float16", BF16: "bfloat16", F32: "float32", F64: "float64", E4M3: "float8_e4m3fn", E5M2: "float8_e5m2",
}  # fmt: skip
FLOAT8 = (E4M3, E5M2)
SCALES = ("q_scale", "k_scale", "v_scale")
SCALE_STRIDES = ("sequence", "batch", "row", "key_head", "query_head")


def _words(*names: str) -> list:
    return [(name, c_uint64) for name in names]


def _ints(*names: str) -> list:
    return [(name, c_int32) for name in names]


def _scales(*names: str) -> "list[str]":
    """Scales of FP8 tensors: the address of each, and its strides."""
    return [word for name in names for word in (name, *(f"{name}.{dimension}" for dimension in SCALE_STRIDES))]


class Strides(Structure):
    """flashcore_strides_t"""

    _fields_ = _words("batch", "head", "row")


class Problem(Structure):
    """flashcore_problem_t"""

    _fields_ = (
        _words("struct_size", "batch", "query_heads", "key_heads", "query_length", "key_length", "head_dim", "value_dim")
        + [("scale", c_double)]
        + _ints("dtype", "mask", "alignment", "layout")
        + [("window_left", c_int64), ("window_right", c_int64), ("softcap", c_float)]
        + _ints("alibi", "sinks", "bias", "seqused_k", "lse")
        + [("reserved", c_int64)]
        + [(f"{tensor}_strides", Strides) for tensor in ("query", "key", "value", "output")]
        + _ints("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "leftpad_k", "kv_batch_idx", "page_table")
        + _words("total_q", "total_k", "kv_batch", "page_size", "num_pages", "table_width", "table_stride")
        + _ints("lse_base", "lse_without_sink")
        + [("score_mod", c_char_p), ("mask_mod", c_char_p)]
        + _words("aux_f32", "aux_i32")
        + _ints("kv_dtype", "out_dtype", *SCALES, "reserved_scales")
    )


class AppendProblem(Structure):
    """flashcore_append_problem_t"""

    _fields_ = (
        _words("struct_size", "tokens", "query_heads", "key_heads", "head_dim", "value_dim", "num_pages", "page_size")
        + _ints("dtype", "rotary")
        + _words("rotary_dim", "max_position", "table_stride")
        + _ints("table_dtype", "position_bits", "qk_norm")
        + [("norm_eps", c_float)]
        + [
            (f"{tensor}_strides", Strides)
            for tensor in ("query", "query_output", "key", "value", "key_cache", "value_cache")
        ]
        + _ints("cache_dtype", "k_scale", "v_scale", "compute_scales")
    )


class KvCacheProblem(Structure):
    """flashcore_kvcache_problem_t"""

    _fields_ = (
        _words("struct_size", "new_length", "total_new")
        + _ints("rotary", "rotary_seqlens")
        + _words("rotary_dim", "max_position", "table_stride")
        + _ints("table_dtype", "qk_norm")
        + [("norm_eps", c_float)]
        + _ints("reserved")
        + [(f"{tensor}_strides", Strides) for tensor in ("new_key", "new_value")]
        + _ints("compute_scales", "reserved_scales")
    )


class MergeProblem(Structure):
    """flashcore_merge_problem_t"""

    _fields_ = (
        _words("struct_size", "num_parts", "tokens", "heads", "value_dim")
        + _ints("part_dtype", "dtype", "lse_base", "lse")
        + [(f"{tensor}_strides", Strides) for tensor in ("part", "part_lse", "output", "lse")]
    )


# The other structs hold nothing but 64-bit words, so that calls fill them by index: name -> index of the word.
DEVICE_TENSORS = {
    name: index
    for index, name in enumerate(
        ["struct_size", "query", "key", "value", "output", "lse", "seqused_k", "alibi_slopes", "sinks", "bias"]
        + [f"bias_strides.{dimension}" for dimension in ("batch", "head", "row", "key")]
        + ["aux_f32", "aux_i32", "workspace"]
        + ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "leftpad_k", "kv_batch_idx", "page_table"]
        + _scales(*SCALES)
    )
}
APPEND_TENSORS = {
    name: index
    for index, name in enumerate(
        ["struct_size", "key", "value", "key_cache", "value_cache", "slot_mapping", "query", "query_output"]
        + ["positions", "cos", "sin", "query_norm", "key_norm", "tokens"]
        + _scales("k_scale", "v_scale")
    )
}
KVCACHE_TENSORS = {
    name: index
    for index, name in enumerate(
        ["struct_size", "new_key", "new_value", "cu_seqlens_k_new", "rotary_seqlens", "cos", "sin"]
        + ["query_norm", "key_norm"]
    )
}
MERGE_TENSORS = {
    name: index
    for index, name in enumerate(
        ["struct_size", "part", "part_lse", "part_stride", "part_lse_stride", "output", "lse"]
        + ["second_part", "second_part_lse", "tokens"]
    )
}


def _host(*names: str) -> "dict[str, int]":
    """Words of a struct for host memory: an operand has two, its address and its bytes."""
    places, next_word = {"struct_size": 0}, 1
    for name in names:
        places[name] = next_word
        next_word += 1 if "." in name else 2
    places[""] = next_word
    return places


INPUTS = _host(
    *["query", "key", "value", "alibi_slopes", "sinks", "bias"],
    *[f"bias_strides.{dimension}" for dimension in ("batch", "head", "row", "key")],
    *["seqused_k", "aux_f32", "aux_i32", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "leftpad_k", "kv_batch_idx"],
    "page_table",
    *_scales(*SCALES),
)
OUTPUTS = _host("output", "lse")
APPEND_INPUTS = _host(
    "key", "value", "slot_mapping", "query", "positions", "cos", "sin", "query_norm", "key_norm",
    *_scales("k_scale", "v_scale"),
)
APPEND_OUTPUTS = _host("key_cache", "value_cache", "value.offset", "query", *_scales("k_scale", "v_scale"))
KVCACHE_INPUTS = _host("cu_seqlens_k_new", "rotary_seqlens", "cos", "sin", "query_norm", "key_norm")
KVCACHES = _host("key_cache", "value_cache", "value.offset", *_scales("k_scale", "v_scale"))
MERGE_INPUTS = {"struct_size": 0, "part_outputs": 1, "part_lses": 2, "": 3}
MERGE_OUTPUTS = _host("output", "lse")


Words = Dict[str, int]


def joined(*structs: "Tuple[Words, Dict[str, str]]") -> "Tuple[Words, Tuple[int, ...]]":
    """Structs one after the other: the words of all of them, some under other names, and the number of words of each."""
    words: Words = {}
    sizes, start = [], 0
    for table, names in structs:
        size = table.get("", len(table))
        for name, word in table.items():
            if name not in ("", "struct_size"):
                words[names.get(name, name)] = start + word
        sizes.append(size)
        start += size
    return words, tuple(sizes)


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
        "problem_init_sized": (status, [POINTER(Problem)] + [word] * 5 + [c_int32]),
        "plan_create_with_config": (status, [POINTER(Problem), c_int32, c_int32, text, POINTER(plan)]),
        "plan_launch_tensors": (status, [plan, address, address]),
        "plan_workspace_bytes": (word, [plan]),
        "plan_run_host": (status, [plan, address, address]),
        "plan_describe": (text, [plan]),
        "plan_destroy": (status, [plan]),
        "append_problem_init_sized": (status, [POINTER(AppendProblem)] + [word] * 7 + [c_int32]),
        "append_create": (status, [POINTER(AppendProblem), c_int32, c_int32, POINTER(plan)]),
        "append_launch": (status, [plan, address, address]),
        "append_run_host": (status, [plan, address, address]),
        "append_destroy": (status, [plan]),
        "kvcache_problem_init_sized": (status, [POINTER(KvCacheProblem), word, POINTER(Problem), word]),
        "kvcache_create": (
            status, [POINTER(Problem), POINTER(KvCacheProblem), c_int32, c_int32, POINTER(plan)],
        ),
        "kvcache_launch": (status, [plan, address, address, address]),
        "kvcache_workspace_bytes": (word, [plan]),
        "kvcache_run_host": (status, [plan, address, address, address, address]),
        "kvcache_destroy": (status, [plan]),
        "continue_create": (status, [POINTER(Problem), c_int32, c_int32, POINTER(plan)]),
        "continue_launch": (status, [plan, address, address]),
        "continue_workspace_bytes": (word, [plan]),
        "continue_run_host": (status, [plan, address, address]),
        "continue_destroy": (status, [plan]),
        "merge_problem_init": (status, [POINTER(MergeProblem)] + [word] * 4 + [c_int32]),
        "merge_create": (status, [POINTER(MergeProblem), c_int32, c_int32, POINTER(plan)]),
        "merge_launch": (status, [plan, address, address]),
        "merge_run_host": (status, [plan, address, address]),
        "merge_destroy": (status, [plan]),
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


# Fields of the structs for host memory, and what the functions here call them.
_FIELD = re.compile(r"\b(?:an entry of )?(?:inputs|outputs|caches)\.(\w+)")
_ARGUMENTS = {
    "query": "q", "key": "k", "value": "v", "output": "out", "key_cache": "k_cache", "value_cache": "v_cache",
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
