"""Operator `kvcache_forward`: new keys and values into a cache, then attention over it (flash_attn_with_kvcache)."""

from __future__ import annotations

from ctypes import byref
from typing import Any, Dict, Optional, Sequence, Tuple

import torch

from .. import _library as lib
from .._errors import InvalidArgument
from .._plans import CACHE, Plan, create
from .._resolve import Options, Tensor, attention_problem, check_tensor, operand_of, operands_of_plan, row_strides
from ._fast import launch_of, places_of
from ._launch import attend, check_given, describe, run
from ._ops import MASK, define_launched, fake_of, new_outputs, operands_of

_find = CACHE.find
_ARGUMENTS = {"new_key": "k", "new_value": "v", "cos": "rotary_cos", "sin": "rotary_sin"}


def _kvcache_plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    options: Options,
    operands: "Dict[str, Tensor]",
    new: "Dict[str, Tensor]",
    is_interleaved: bool,
    compute_scales: bool = False,
) -> Plan:
    """The plan of an append and attention; its operands are query, caches, output, lse, `operands`, then `new`."""
    attention = attention_problem(q, k_cache, v_cache, out, options, operands)
    problem = _append_problem(attention, k_cache, v_cache, new, is_interleaved)
    problem.compute_scales = int(compute_scales)
    handle = create(problem, *q.device)
    caches = {"query": q, "key_cache": k_cache, "value_cache": v_cache, "output": out}
    tensors = operands_of_plan(attention, caches, options.lse, operands)
    tensors += [operand_of(name, tensor) for name, tensor in new.items()]
    return Plan(handle, q.device, tensors, attention, q.device[0] == lib.CPU)


def _append_problem(
    attention: lib.Problem, k_cache: Tensor, v_cache: Tensor, new: "Dict[str, Tensor]", is_interleaved: bool
) -> lib.KvCacheProblem:
    dtype, device = attention.dtype, k_cache.device
    for name, tensor in new.items():
        if name in ("new_key", "new_value"):
            check_tensor(_ARGUMENTS[name], tensor, dtype, device)
        elif tensor.device != device:
            check_tensor(_ARGUMENTS.get(name, name), tensor._replace(dtype=dtype), dtype, device)
    k, v = new["new_key"], new["new_value"]
    offsets = new.get("cu_seqlens_k_new")
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        is_right = len(tensor.shape) == (4 if offsets is None else 3) and tensor.shape[-2:] == cache.shape[-2:]
        if offsets is None and is_right:
            is_right = tensor.shape[0] == attention.batch
        if not is_right or tensor.shape[:-2] != k.shape[:-2]:
            wanted = "rows of all sequences" if offsets is not None else f"{attention.batch}, rows"
            raise InvalidArgument(
                f"{name} has shape {tensor.shape}; it must be [{wanted}, {cache.shape[-2]}, {cache.shape[-1]}], with as many "
                "rows as k, and 3 dimensions with cu_seqlens_k_new"
            )
    problem = lib.KvCacheProblem()
    lib.check(lib.LIBRARY.flashcore_kvcache_problem_init(byref(problem), byref(attention), k.shape[-3]))
    for name, size in (("cu_seqlens_k_new", attention.batch + 1), ("rotary_seqlens", attention.batch)):
        if name in new and (new[name].dtype != "int32" or new[name].shape != (size,) or new[name].strides != (1,) and size > 1):
            raise InvalidArgument(
                f"{name} is {new[name].dtype} of shape {new[name].shape}; it must be int32 of shape {(size,)}, contiguous"
            )
    problem.total_new = 0 if offsets is None else k.shape[0]
    problem.rotary_seqlens = int("rotary_seqlens" in new)
    problem.new_key_strides, problem.new_value_strides = row_strides(k), row_strides(v)
    if "cos" in new:
        cos, sin = new["cos"], new["sin"]
        if len(cos.shape) != 2 or cos[:3] != sin[:3] or cos.strides[1] != 1 and cos.shape[1] > 1:
            raise InvalidArgument(
                f"rotary_cos has shape {cos.shape} and rotary_sin {sin.shape}; both must be [max_position, rotary_dim / 2], "
                "of one type and with the same strides, their columns adjacent"
            )
        if cos.dtype not in (dtype, lib.F32):
            raise InvalidArgument("rotary_cos and rotary_sin must have the type of q, or float32: convert them")
        problem.rotary.style = lib.ROTARY_GPTJ if is_interleaved else lib.ROTARY_NEOX
        problem.rotary.dim, problem.rotary.max_position = 2 * cos.shape[1], cos.shape[0]
        problem.rotary.table_stride = cos.strides[0] if cos.shape[0] > 1 else cos.shape[1]
        problem.rotary.table_dtype = cos.dtype
    return problem


def check_append(
    k: "Optional[torch.Tensor]",
    rotary_cos: "Optional[torch.Tensor]",
    rotary_sin: "Optional[torch.Tensor]",
    cache_seqlens: "Optional[torch.Tensor]",
) -> None:
    """Checks what a plan of an append does not see, or would name otherwise."""
    if k is not None and cache_seqlens is None:
        raise InvalidArgument("k is given without cache_seqlens, which says where it goes")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("one of rotary_cos and rotary_sin is given; both must be, or none")
    if cache_seqlens is not None and cache_seqlens.dtype not in (torch.int32, torch.uint32):
        raise InvalidArgument(f"cache_seqlens is {cache_seqlens.dtype}; it must be torch.int32: convert it")


def append_and_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    lse: "Optional[torch.Tensor]",
    options: Options,
    operands: "Sequence[Tuple[str, torch.Tensor]]",
    new: "Sequence[Tuple[str, torch.Tensor]]",
    is_interleaved: bool,
    compute_scales: bool = False,
) -> "Optional[Plan]":
    """Appends to the caches and attends them, into `out` and `lse`. The plan, if one was run."""
    tensors = [("query", q), ("key_cache", k_cache), ("value_cache", v_cache), ("output", out)]
    tensors += [("lse", lse)] if lse is not None else []
    device = q.get_device()
    key: Any = ("kvcache", options, is_interleaved, compute_scales)
    for name, tensor in (*tensors, *operands, *new):
        key += (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    plan = _find(key)
    if plan is None:
        described = [describe(name, x) for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out))]
        more = [{name: describe(_ARGUMENTS.get(name, name), x) for name, x in given} for given in (operands, new)]
        if out.numel() == 0 and new[0][1].numel() == 0:
            return None
        plan = CACHE.add(key, lambda: _kvcache_plan(*described, options, *more, is_interleaved, compute_scales))
    run(plan, [x.data_ptr() for _, x in (*tensors, *operands, *new)], device)
    return plan


def miss_kvcache_forward(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: "Optional[torch.Tensor]" = None,
    v: "Optional[torch.Tensor]" = None,
    cache_seqlens: "Optional[torch.Tensor]" = None,
    rotary_cos: "Optional[torch.Tensor]" = None,
    rotary_sin: "Optional[torch.Tensor]" = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: "Optional[torch.Tensor]" = None,
    kv_batch_idx: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
    page_table: "Optional[torch.Tensor]" = None,
    cu_seqlens_q: "Optional[torch.Tensor]" = None,
    cu_seqlens_k_new: "Optional[torch.Tensor]" = None,
    max_seqlen_q: "Optional[int]" = None,
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    return_lse: bool = False,
) -> "Tuple[Tuple[torch.Tensor, torch.Tensor], Any]":
    """Attention over a KV cache, after `k` and `v` were appended to it."""
    check_given(q=q, k_cache=k_cache, v_cache=v_cache)
    if (k is None) != (v is None):
        raise InvalidArgument("one of k and v is given; both must be, or none")
    check_append(k, rotary_cos, rotary_sin, cache_seqlens)
    if rotary_cos is not None and k is None:
        raise InvalidArgument("rotary_cos is given without k; the rotary embedding is applied when k is appended")
    is_packed = cu_seqlens_q is not None
    out, lse = new_outputs(q, v_cache.shape[-1], is_packed, return_lse, False)
    written = lse if return_lse else None
    operands = operands_of(
        cu_seqlens_q=cu_seqlens_q, alibi_slopes=alibi_slopes, sinks=sinks, seqused_k=cache_seqlens, leftpad_k=leftpad_k,
        kv_batch_idx=kv_batch_idx, page_table=page_table,
    )  # fmt: skip
    max_q = max_seqlen_q if is_packed else None
    if k is None:
        plan = attend(
            q, k_cache, v_cache, out, written, scale, causal, window_left, window_right, softcap, False, max_q, None, operands
        )
        return (out, lse), launch_of(plan, _WITHOUT, 24, (out, lse), True)
    new = operands_of(
        new_key=k, new_value=v, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, cos=rotary_cos, sin=rotary_sin
    )
    options = Options(scale, causal, window_left, window_right, softcap, return_lse, False, max_q)
    plan = append_and_attend(q, k_cache, v_cache, out, written, options, operands, new, rotary_interleaved)
    return (out, lse), launch_of(plan, _WITH, 24, (out, lse), True)


_WITHOUT = places_of(miss_kvcache_forward, {"q": "query", "k_cache": "key", "v_cache": "value", "cache_seqlens": "seqused_k"})
APPENDED = {
    "q": "query", "cache_seqlens": "seqused_k", "k_cache": "key_cache", "v_cache": "value_cache", "k": "new_key",
    "v": "new_value", "rotary_cos": "cos", "rotary_sin": "sin",
}  # fmt: skip
_WITH = places_of(miss_kvcache_forward, APPENDED)

ROTARY_TO_RESULTS = (
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=True, Tensor? rotary_seqlens=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? page_table=None, Tensor? cu_seqlens_q=None, "
    f"Tensor? cu_seqlens_k_new=None, SymInt? max_seqlen_q=None, {MASK}, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "bool return_lse=False) -> (Tensor, Tensor)"
)
_SCHEMA: Any = (
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k=None, Tensor? v=None, Tensor? cache_seqlens=None, "
    + ROTARY_TO_RESULTS
)
define_launched("kvcache_forward", _SCHEMA, miss_kvcache_forward, fake_of(miss_kvcache_forward, (3, 4), "v_cache"), True)
