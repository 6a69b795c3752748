"""Operators of a KV cache: append with rotary embedding, merge by LSE."""

from __future__ import annotations

from ctypes import byref
from typing import Any, Optional, Tuple

import torch

from .. import _library as lib
from .._errors import InvalidArgument
from .._plans import CACHE, Plan, create
from .._resolve import Tensor, check_scale, check_tensor, dtype_name, operand_of, row_strides
from ._launch import check_given, check_out, describe, run
from ._ops import define

_find = CACHE.find


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q: "Optional[torch.Tensor]" = None,
    positions: "Optional[torch.Tensor]" = None,
    cos: "Optional[torch.Tensor]" = None,
    sin: "Optional[torch.Tensor]" = None,
    interleaved: bool = False,
    q_norm: "Optional[torch.Tensor]" = None,
    k_norm: "Optional[torch.Tensor]" = None,
    norm_eps: float = 1e-6,
    k_scale: "Optional[torch.Tensor]" = None,
    v_scale: "Optional[torch.Tensor]" = None,
    compute_scales: bool = False,
) -> torch.Tensor:
    """Writes keys and values `[token, head, column]` to slots `page * page_size + row` of the caches.

    Query and key are normalized (q_norm, k_norm) and rotated (positions, cos, sin) first. Returns the query, which has no
    elements if there is none. Caches of float8_e4m3fn or float8_e5m2 are quantised to: keys and values are divided by
    k_scale and v_scale, float32 of one element, `[head]` or `[page, row, head]`, and rounded, saturating. With
    compute_scales, both are `[page, row, head]`, and the scale of each row and head is computed and written.
    """
    check_given(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    result = k.new_empty((0,)) if q is None else q.new_empty(q.shape)
    named = {
        "new_key": k, "new_value": v, "key_cache": k_cache, "value_cache": v_cache, "slot_mapping": slot_mapping, "query": q,
        "query_output": None if q is None else result, "positions": positions, "cos": cos, "sin": sin,
        "query_norm": q_norm, "key_norm": k_norm, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    given = [(name, tensor) for name, tensor in named.items() if tensor is not None]
    device = k.get_device()
    key: Any = ("append", interleaved, norm_eps, compute_scales)
    addresses = []
    for name, tensor in given:
        key += (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
        addresses.append(tensor.data_ptr())
    plan = _find(key)
    if plan is None:
        described = {name: describe(_NAMES.get(name, name), tensor) for name, tensor in given}
        if k.shape[0] == 0:
            return result
        plan = CACHE.add(key, lambda: _append_plan(described, interleaved, norm_eps, compute_scales))
    run(plan, addresses, device)
    return result


_NAMES = {
    "new_key": "k", "new_value": "v", "key_cache": "k_cache", "value_cache": "v_cache", "query": "q", "query_norm": "q_norm",
    "key_norm": "k_norm",
}  # fmt: skip


def _append_plan(
    named: "dict[str, Tensor]", interleaved: bool, norm_eps: float, compute_scales: bool
) -> Plan:
    k, v, k_cache, v_cache = (named[name] for name in ("new_key", "new_value", "key_cache", "value_cache"))
    q, slots = named.get("query"), named["slot_mapping"]
    if k.dtype not in lib.ITEM_BYTES or k.dtype in lib.FLOAT8:
        raise InvalidArgument(
            f"k is {dtype_name(k.dtype)}; rows that are appended must be float16, bfloat16, float32 or, on the CPU, float64: "
            "convert it"
        )
    dtype: int = k.dtype  # type: ignore[assignment]
    for name, tensor in named.items():
        if name in ("key_cache", "value_cache") and tensor.dtype in lib.FLOAT8:
            check_tensor(_NAMES[name], tensor, k_cache.dtype, k.device, of="k_cache")  # type: ignore[arg-type]
        elif name not in ("slot_mapping", "positions", "cos", "sin", "k_scale", "v_scale"):
            check_tensor(_NAMES.get(name, name), tensor, dtype, k.device, of="k")
        elif tensor.device != k.device:
            check_tensor(name, tensor._replace(dtype=dtype), dtype, k.device, of="k")
    for name, tensor, dimensions in (("k", k, 3), ("v", v, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
        if len(tensor.shape) != dimensions:
            wanted = "[token, head, column]" if dimensions == 3 else "[page, row, head, column]"
            raise InvalidArgument(f"{name} has shape {tensor.shape}; it must be {wanted}")
    tokens, heads, dim = k.shape
    if v.shape[:2] != k.shape[:2]:
        raise InvalidArgument(f"v has shape {v.shape}; it must have the tokens and heads of k, {k.shape[:2]}")
    expected = (*k_cache.shape[:2], heads)
    if k_cache.shape[2:] != (heads, dim) or v_cache.shape != (*expected, v.shape[2]):
        raise InvalidArgument(
            f"k_cache has shape {k_cache.shape} and v_cache {v_cache.shape}; they must be {(*expected, dim)} and "
            f"{(*expected, v.shape[2])}"
        )
    if slots.dtype != "int64" or slots.shape != (tokens,) or slots.strides != (1,) and tokens > 1:
        raise InvalidArgument(
            f"slot_mapping is {slots.dtype} of shape {slots.shape}; it must be int64 of shape {(tokens,)}, contiguous"
        )
    if q is not None and (len(q.shape) != 3 or q.shape[0] != tokens or q.shape[2] != dim):
        raise InvalidArgument(f"q has shape {q.shape}; it must be {(tokens, 'heads', dim)}")
    for name, cache in (("k_scale", k_cache), ("v_scale", v_cache)):
        if name in named:
            check_scale(name, named[name], cache, -1, heads)
    problem = lib.AppendProblem()
    query_heads = 0 if q is None else q.shape[1]
    lib.check(
        lib.LIBRARY.flashcore_append_problem_init(
            byref(problem), tokens, query_heads, heads, dim, k_cache.shape[0], k_cache.shape[1], dtype
        )
    )
    problem.value_dim = v.shape[2]
    problem.cache_dtype = k_cache.dtype if k_cache.dtype in lib.FLOAT8 else 0
    problem.k_scale, problem.v_scale = int("k_scale" in named), int("v_scale" in named)
    problem.compute_scales = int(compute_scales)
    _rotary(problem, named, interleaved, dtype, tokens)
    norms = [name for name in ("query_norm", "key_norm") if name in named]
    if norms:
        if len(norms) == 1 and q is not None:
            raise InvalidArgument("one of q_norm and k_norm is given; both must be, or none")
        for name in norms:
            if named[name].shape != (dim,):
                raise InvalidArgument(f"{_NAMES[name]} has shape {named[name].shape}; it must be {(dim,)}")
        problem.qk_norm, problem.norm_eps = 1, norm_eps
    for name in ("query", "query_output", "new_key", "new_value", "key_cache", "value_cache"):
        if name in named:
            setattr(problem, f"{name.replace('new_', '')}_strides", row_strides(named[name]))
    tensors = [operand_of(name, tensor, heads, heads) for name, tensor in named.items()]
    return Plan(create(problem, *k.device), k.device, tensors, None, k.device[0] == lib.CPU)


def _rotary(problem: lib.AppendProblem, named: "dict[str, Tensor]", interleaved: bool, dtype: int, tokens: int) -> None:
    given = [name for name in ("positions", "cos", "sin") if name in named]
    if not given:
        return
    if len(given) < 3:
        raise InvalidArgument(f"of positions, cos and sin there is {', '.join(given)}; all must be given, or none")
    positions, cos, sin = (named[name] for name in given)
    if positions.dtype not in ("int32", "int64") or positions.shape != (tokens,):
        raise InvalidArgument(
            f"positions is {positions.dtype} of shape {positions.shape}; it must be int32 or int64 of shape {(tokens,)}"
        )
    if len(cos.shape) != 2 or cos.shape != sin.shape or cos.strides != sin.strides or cos.dtype != sin.dtype:
        raise InvalidArgument(
            f"cos has shape {cos.shape} and sin {sin.shape}; both must be [max_position, rotary_dim / 2], of one type and "
            "with the same strides"
        )
    if cos.dtype not in (dtype, lib.F32):
        raise InvalidArgument("cos and sin must have the type of k, or float32: convert them")
    problem.rotary.style = lib.ROTARY_GPTJ if interleaved else lib.ROTARY_NEOX
    problem.rotary.dim, problem.rotary.max_position = 2 * cos.shape[1], cos.shape[0]
    problem.rotary.table_stride = cos.strides[0] if cos.shape[0] > 1 else cos.shape[1]
    problem.rotary.table_dtype = cos.dtype
    problem.position_dtype = lib.CODES[positions.dtype]


def _append_fake(k, v, k_cache, v_cache, slot_mapping, q=None, *args, **options):  # type: ignore[no-untyped-def]
    return k.new_empty((0,)) if q is None else q.new_empty(q.shape)


def merge(
    parts: torch.Tensor, lses: torch.Tensor, out_dtype: "Optional[torch.dtype]" = None
) -> "Tuple[torch.Tensor, torch.Tensor]":
    """Merges partial results over disjoint keys: parts `[part, token, head, column]`, float32 lses `[part, head, token]`."""
    check_given(parts=parts, lses=lses)
    out = parts.new_empty(parts.shape[1:], dtype=parts.dtype if out_dtype is None else out_dtype)
    lse = lses.new_empty(lses.shape[1:])
    _merge(parts, lses, out, lse)
    return out, lse


def merge_out(parts: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor, lse: "Optional[torch.Tensor]" = None) -> None:
    """`merge` into `out` and `lse`."""
    check_out("out", out, tuple(parts.shape[1:]), out.dtype, parts.device)
    if lse is not None:
        check_out("lse", lse, tuple(lses.shape[1:]), torch.float32, parts.device)
    _merge(parts, lses, out, lse)


def _merge(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: "Optional[torch.Tensor]") -> None:
    if parts.dim() != 4 or lses.dim() != 3 or lses.shape != (parts.shape[0], parts.shape[2], parts.shape[1]):
        raise InvalidArgument(
            f"parts has shape {tuple(parts.shape)} and lses {tuple(lses.shape)}; they must be [part, token, head, column] "
            "and [part, head, token]"
        )
    if lses.dtype != torch.float32:
        raise InvalidArgument(f"lses is {lses.dtype}; it must be torch.float32")
    if parts.shape[0] == 1:
        out.copy_(parts[0].masked_fill(lses[0].t().unsqueeze(-1).isinf(), 0))
        if lse is not None:
            lse.copy_(lses[0])
        return
    if out.numel() == 0:
        return
    device = parts.get_device()
    key = (
        "merge", parts.shape, parts.stride(), lses.stride(), out.stride(), None if lse is None else lse.stride(),
        parts.dtype, out.dtype, device, lses.get_device(),
    )  # fmt: skip
    plan = _find(key)
    if plan is None:
        plan = CACHE.add(key, lambda: _merge_plan(parts, lses, out, lse))
    addresses = [parts.data_ptr(), lses.data_ptr(), out.data_ptr()]
    if lse is not None:
        addresses.append(lse.data_ptr())
    run(plan, addresses, device)


def _merge_plan(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: "Optional[torch.Tensor]") -> Plan:
    part, merged, logs = describe("parts", parts), describe("out", out), describe("lses", lses)
    for name, tensor in (("parts", part), ("out", merged)):
        if tensor.dtype not in (lib.F16, lib.BF16, lib.F32):
            raise InvalidArgument(f"{name} is {tensor.dtype}; it must be float16, bfloat16 or float32: convert it")
        check_tensor(name, tensor, tensor.dtype, part.device, of="parts")  # type: ignore[arg-type]
    if logs.device != part.device:
        raise InvalidArgument(f"lses is on {lses.device} and parts on {parts.device}; move them to one device")
    problem = lib.MergeProblem()
    count, tokens, heads, dim = part.shape
    lib.check(lib.LIBRARY.flashcore_merge_problem_init(byref(problem), count, tokens, heads, dim, part.dtype))
    problem.dtype, problem.lse = merged.dtype, int(lse is not None)
    problem.part_strides = row_strides(Tensor(part.shape[1:], part.strides[1:], part.dtype, part.device))
    problem.output_strides = row_strides(merged)
    problem.part_lse_strides = lib.Strides(0, logs.strides[1], logs.strides[2])
    if lse is not None:
        problem.lse_strides = lib.Strides(0, lse.stride(0), lse.stride(1))
    tensors = [
        operand_of("part_outputs", part)._replace(strides=part.strides[:1]),
        operand_of("part_lses", logs)._replace(strides=logs.strides[:1]),
        operand_of("output", merged),
    ]
    if lse is not None:
        tensors.append(operand_of("lse", describe("lse", lse)))
    return Plan(create(problem, *part.device), part.device, tensors, None, part.device[0] == lib.CPU)


def _merge_fake(parts, lses, out_dtype=None):  # type: ignore[no-untyped-def]
    dtype = parts.dtype if out_dtype is None else out_dtype
    return parts.new_empty(parts.shape[1:], dtype=dtype), lses.new_empty(lses.shape[1:])


define(
    "append",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor? q=None, "
    "Tensor? positions=None, Tensor? cos=None, Tensor? sin=None, bool interleaved=False, Tensor? q_norm=None, "
    "Tensor? k_norm=None, float norm_eps=1e-06, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, "
    "bool compute_scales=False) -> Tensor",
    append,
    _append_fake,
)
define("merge", "(Tensor parts, Tensor lses, ScalarType? out_dtype=None) -> (Tensor, Tensor)", merge, _merge_fake)
define(
    "merge_out",
    "(Tensor parts, Tensor lses, *, Tensor(a!) out, Tensor(b!)? lse=None) -> ()",
    merge_out,
    lambda *args, **options: None,
)
