"""Operators of FP8 tensors: float8_forward, and float8_kvcache_forward, which quantises what it appends.

They are beside those of other types, whose schemas stay; `flashcore.torch.attention` and `flashcore.compat` choose.
Scales are float32: of one element, `[KV head]`, `[batch, KV head]`, or `[batch or page, row, head]`.
Functions whose name begins with `miss_` return (result, launch or None) for `_fast.operation`.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .._errors import InvalidArgument
from .._resolve import Options
from ._fast import is_dynamo_compiling, launch_of, operation, places_of
from ._kvcache import APPENDED, ROTARY_TO_RESULTS, append_and_attend, check_append
from ._launch import FLOAT8, attend, bias_of, check_given
from ._namespace import OPERATORS
from ._ops import OPTIONS, PAGES, QUERY_KEY_VALUE, define_launched, fake_of, new_outputs, operands_of


def is_float8(*tensors: "Optional[torch.Tensor]") -> bool:
    """True if one of the tensors is FP8."""
    return any(getattr(tensor, "dtype", None) in FLOAT8 for tensor in tensors)


def codes(name: str, tensor: torch.Tensor, kv_dtype: Any) -> torch.Tensor:
    """A tensor of bytes as codes of an FP8 type."""
    found = getattr(torch, str(kv_dtype).replace("torch.", ""), None)
    if found not in FLOAT8:
        raise InvalidArgument(f"kv_dtype is {kv_dtype!r}; it must be 'float8_e4m3fn' or 'float8_e5m2'")
    if tensor.dtype not in (torch.uint8, found):
        raise InvalidArgument(f"{name} is {tensor.dtype} and kv_dtype is {kv_dtype}; it must be uint8 codes of that type")
    return tensor.view(found)


def miss_forward(
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
) -> "Tuple[Tuple[torch.Tensor, torch.Tensor], Any]":
    """Attention over FP8 keys and values, dense, packed or paged, under a query of any type."""
    check_given(q=q, k=k, v=v)
    is_packed = cu_seqlens_q is not None
    if q.dim() != (3 if is_packed else 4):
        raise InvalidArgument(
            f"q has shape {tuple(q.shape)}; it must be [batch, row, head, column], or [row, head, column] with cu_seqlens_q"
        )
    out, lse = new_outputs(q, v.shape[-1], is_packed, return_lse, seqused_q is not None, out_dtype)
    bias, is_converted = bias_of(bias)
    operands = operands_of(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, alibi_slopes=alibi_slopes, sinks=sinks, bias=bias,
        seqused_q=seqused_q, seqused_k=seqused_k, leftpad_k=leftpad_k, kv_batch_idx=kv_batch_idx, page_table=page_table,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    plan = attend(
        q, k, v, out, lse if return_lse else None, scale, causal, window_left, window_right, softcap, top_left,
        max_seqlen_q, max_seqlen_k, operands,
    )  # fmt: skip
    if seqused_q is not None or is_converted:
        return (out, lse), None  # as for `_ops.miss_forward`
    return (out, lse), launch_of(plan, _FORWARD, 26, (out, lse), True, out.dtype != q.dtype)


def miss_kvcache_forward(
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
) -> "Tuple[Tuple[torch.Tensor, torch.Tensor], Any]":
    """Appends `k` and `v` to an FP8 cache and attends it.

    Scales are given, or with `compute_scales` `[batch or page, row, head]`, of which those of new rows are written.
    """
    check_given(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    check_append(k, rotary_cos, rotary_sin, cache_seqlens)
    is_packed = cu_seqlens_q is not None
    out, lse = new_outputs(q, v_cache.shape[-1], is_packed, return_lse, False)
    operands = operands_of(
        cu_seqlens_q=cu_seqlens_q, alibi_slopes=alibi_slopes, sinks=sinks, seqused_k=cache_seqlens, leftpad_k=leftpad_k,
        kv_batch_idx=kv_batch_idx, page_table=page_table, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    new = operands_of(
        new_key=k, new_value=v, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, cos=rotary_cos, sin=rotary_sin
    )
    max_q = max_seqlen_q if is_packed else None
    options = Options(scale, causal, window_left, window_right, softcap, return_lse, False, max_q)
    plan = append_and_attend(
        q, k_cache, v_cache, out, lse if return_lse else None, options, operands, new, rotary_interleaved, compute_scales
    )
    return (out, lse), launch_of(plan, _KVCACHE, 27, (out, lse), True, out.dtype != q.dtype)


_FORWARD = places_of(miss_forward, QUERY_KEY_VALUE)
_KVCACHE = places_of(miss_kvcache_forward, APPENDED)
define_launched(
    "float8_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    f"{OPTIONS}{PAGES}, bool return_lse=False, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
    miss_forward,
    fake_of(miss_forward, (3, 4)),
    True,
)
define_launched(
    "float8_kvcache_forward",
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    f"Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, bool compute_scales=False, {ROTARY_TO_RESULTS}",
    miss_kvcache_forward,
    fake_of(miss_kvcache_forward, (3, 4), "v_cache"),
    True,
)
_forward = operation(miss_forward, OPERATORS.float8_forward.default)
_kvcache_forward = operation(miss_kvcache_forward, OPERATORS.float8_kvcache_forward.default)


def forward(*arguments: Any) -> "Tuple[torch.Tensor, torch.Tensor]":
    """`torch.ops.flashcore.float8_forward` of arguments by place."""
    return (OPERATORS.float8_forward if is_dynamo_compiling() else _forward)(*arguments)


def kvcache_forward(*arguments: Any) -> "Tuple[torch.Tensor, torch.Tensor]":
    """`torch.ops.flashcore.float8_kvcache_forward` of arguments by place."""
    return (OPERATORS.float8_kvcache_forward if is_dynamo_compiling() else _kvcache_forward)(*arguments)
