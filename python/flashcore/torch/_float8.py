"""Operators of FP8 tensors: float8_forward, and float8_kvcache_forward, which quantises what it appends.

They are beside those of other types, whose schemas stay; `flashcore.torch.attention` and `flashcore.compat` choose.
Scales are float32: of one element, `[KV head]`, `[batch, KV head]`, or `[batch or page, row, head]`.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .. import _library as lib
from .._errors import InvalidArgument
from .._plans import CACHE
from .._resolve import Options
from ._kvcache import _ARGUMENTS, _kvcache_plan
from ._launch import attend, describe, refuse_grad, run
from ._ops import define, operands_of
from ._serving import value_offset

_find = CACHE.find
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_float8(*tensors: "Optional[torch.Tensor]") -> bool:
    """True if one of the tensors is FP8."""
    return any(tensor is not None and tensor.dtype in FLOAT8 for tensor in tensors)


def codes(name: str, tensor: torch.Tensor, kv_dtype: Any) -> torch.Tensor:
    """A tensor of bytes as codes of an FP8 type."""
    found = getattr(torch, str(kv_dtype).replace("torch.", ""), None)
    if found not in FLOAT8:
        raise InvalidArgument(f"kv_dtype is {kv_dtype!r}; it must be 'float8_e4m3fn' or 'float8_e5m2'")
    if tensor.dtype not in (torch.uint8, found):
        raise InvalidArgument(f"{name} is {tensor.dtype} and kv_dtype is {kv_dtype}; it must be uint8 codes of that type")
    return tensor.view(found)


def _outputs(
    q: torch.Tensor, value_dim: int, is_packed: bool, return_lse: bool, is_partial: bool, out_dtype: "Optional[torch.dtype]"
) -> "Tuple[torch.Tensor, torch.Tensor]":
    """Output and LSE; where rows may be left unwritten, they are 0 and minus infinity."""
    dtype = q.dtype if q.dtype not in FLOAT8 else out_dtype or torch.bfloat16
    make = torch.zeros if is_partial else torch.empty
    out = make((*q.shape[:-1], value_dim), dtype=dtype, device=q.device)
    if not return_lse:
        return out, torch.empty((0,), dtype=torch.float32, device=q.device)
    shape = (q.shape[1], q.shape[0]) if is_packed else (q.shape[0], q.shape[2], q.shape[1])
    return out, torch.full(shape, -float("inf"), dtype=torch.float32, device=q.device)


def float8_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: "Optional[torch.Tensor]" = None,
    k_scale: "Optional[torch.Tensor]" = None,
    v_scale: "Optional[torch.Tensor]" = None,
    cu_seqlens_q: "Optional[torch.Tensor]" = None,
    cu_seqlens_k: "Optional[torch.Tensor]" = None,
    max_seqlen_q: "Optional[int]" = None,
    max_seqlen_k: "Optional[int]" = None,
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    top_left: bool = False,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    bias: "Optional[torch.Tensor]" = None,
    seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
    kv_batch_idx: "Optional[torch.Tensor]" = None,
    page_table: "Optional[torch.Tensor]" = None,
    return_lse: bool = False,
    out_dtype: "Optional[torch.dtype]" = None,
) -> "Tuple[torch.Tensor, torch.Tensor]":
    """Attention over FP8 keys and values, dense, packed or paged, under a query of any type."""
    refuse_grad(q, k, v, sinks, bias)
    is_packed = cu_seqlens_q is not None
    if q.dim() != (3 if is_packed else 4):
        raise InvalidArgument(
            f"q has shape {tuple(q.shape)}; it must be [batch, row, head, column], or [row, head, column] with cu_seqlens_q"
        )
    is_partial = is_packed or seqused_q is not None
    out, lse = _outputs(q, v.shape[-1], is_packed, return_lse, is_partial, out_dtype)
    operands = operands_of(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, alibi_slopes=alibi_slopes, sinks=sinks, bias=bias,
        seqused_q=seqused_q, seqused_k=seqused_k, leftpad_k=leftpad_k, kv_batch_idx=kv_batch_idx, page_table=page_table,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    attend(
        q, k, v, out, lse if return_lse else None, scale, causal, window_left, window_right, softcap, top_left,
        max_seqlen_q, max_seqlen_k, operands,
    )  # fmt: skip
    return out, lse


def float8_kvcache_forward(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    k_scale: "Optional[torch.Tensor]" = None,
    v_scale: "Optional[torch.Tensor]" = None,
    compute_scales: bool = False,
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
) -> "Tuple[torch.Tensor, torch.Tensor]":
    """Appends `k` and `v` to an FP8 cache and attends it.

    Scales are given, or with `compute_scales` `[batch or page, row, head]`, of which those of new rows are written.
    """
    refuse_grad(q, k_cache, v_cache, k, v)
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("one of rotary_cos and rotary_sin is given; both must be, or none")
    if cache_seqlens.dtype not in (torch.int32, torch.uint32):
        raise InvalidArgument(f"cache_seqlens is {cache_seqlens.dtype}; it must be torch.int32: convert it")
    is_packed, device = cu_seqlens_q is not None, q.get_device()
    out, lse = _outputs(q, v_cache.shape[-1], is_packed, return_lse, is_packed, None)
    tensors = [("query", q), ("key_cache", k_cache), ("value_cache", v_cache), ("output", out)]
    if return_lse:
        tensors.append(("lse", lse))
    operands = operands_of(
        cu_seqlens_q=cu_seqlens_q, alibi_slopes=alibi_slopes, sinks=sinks, seqused_k=cache_seqlens, leftpad_k=leftpad_k,
        kv_batch_idx=kv_batch_idx, page_table=page_table, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    new = operands_of(
        new_key=k, new_value=v, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, cos=rotary_cos, sin=rotary_sin
    )
    offset = value_offset(k_cache, v_cache) if device < 0 and k_cache.dim() == 4 and v_cache.dim() == 4 else 0
    max_q = max_seqlen_q if is_packed else None
    key: Any = (
        "float8_kvcache", scale, causal, window_left, window_right, softcap, max_q, rotary_interleaved, offset, compute_scales,
    )  # fmt: skip
    for name, tensor in (*tensors, *operands, *new):
        key += (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    plan = _find(key)
    if plan is None:
        described = [describe(name, x) for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out))]
        options = Options(scale, causal, window_left, window_right, softcap, return_lse, False, max_q, None)
        more = [{name: describe(_ARGUMENTS.get(name, name), x) for name, x in given} for given in (operands, new)]
        if out.numel() == 0 and k.numel() == 0:
            return out, lse
        plan = CACHE.add(
            key, lambda: _kvcache_plan(*described, options, *more, rotary_interleaved, offset, compute_scales)
        )
    addresses = [x.data_ptr() for name, x in (*tensors, *operands, *new) if not (offset and name == "value_cache")]
    run(plan, addresses, device)
    return out, lse


def _fake(q, value, is_packed, return_lse, out_dtype=None):  # type: ignore[no-untyped-def]
    return _outputs(q, value.shape[-1], is_packed, return_lse, False, out_dtype)


def _forward_fake(q, k, v, *args, return_lse=False, out_dtype=None, **options):  # type: ignore[no-untyped-def]
    # Positional arguments end with return_lse and out_dtype.
    return_lse = args[21] if len(args) > 21 else return_lse
    out_dtype = args[22] if len(args) > 22 else out_dtype
    return _fake(q, v, q.dim() == 3, return_lse, out_dtype)


def _kvcache_fake(q, k_cache, v_cache, *args, return_lse=False, **options):  # type: ignore[no-untyped-def]
    return _fake(q, v_cache, q.dim() == 3, args[23] if len(args) > 23 else return_lse)


_MASK = "float? scale=None, bool causal=False, int window_left=-1, int window_right=-1, float softcap=0.0"
define(
    "float8_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    + _MASK
    + ", bool top_left=False, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? bias=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, Tensor? leftpad_k=None, Tensor? kv_batch_idx=None, Tensor? page_table=None, "
    "bool return_lse=False, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
    float8_forward,
    _forward_fake,
)
define(
    "float8_kvcache_forward",
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, bool compute_scales=False, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, bool rotary_interleaved=True, Tensor? rotary_seqlens=None, Tensor? kv_batch_idx=None, "
    "Tensor? leftpad_k=None, Tensor? page_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k_new=None, "
    "SymInt? max_seqlen_q=None, "
    + _MASK
    + ", Tensor? alibi_slopes=None, Tensor? sinks=None, bool return_lse=False) -> (Tensor, Tensor)",
    float8_kvcache_forward,
    _kvcache_fake,
)
