"""flashcore for PyTorch: operators `torch.ops.flashcore.*`, and functions that call them.

    import torch, flashcore.torch
    q = k = v = torch.randn(1, 8, 1024, 64)
    out = flashcore.torch.attention(q, k, v, causal=True)

The operators work on CPU and CUDA tensors, under `torch.compile(fullgraph=True)` and with dynamic shapes. There is no
backward: a gradient that is asked for raises `flashcore.NoBackward`.
Functions here skip torch's dispatcher where nothing listens to it: eager calls of plain tensors without grad.
`is_fast()` says whether they skip the interpreter too, and `NAMESPACE` where the operators are: a second copy of the package
in one process has a namespace of its own.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .._errors import InvalidArgument
from .._resolve import check_number, window_sides
from . import _float8, _kvcache, _ops, _sdpa, _serving
from ._fast import is_dynamo_compiling, is_fast, operation
from ._launch import check_given, check_optional, check_table
from ._namespace import NAMESPACE, OPERATORS

__all__ = [
    "NAMESPACE",
    "append",
    "attention",
    "continue_forward",
    "forward",
    "is_fast",
    "kvcache_forward",
    "merge",
    "varlen_forward",
]

Tensors = Tuple[torch.Tensor, torch.Tensor]
_sdpa.offer()
_forward = operation(_ops.miss_forward, OPERATORS.forward.default)
_varlen_forward = operation(_ops.miss_varlen_forward, OPERATORS.varlen_forward.default)
_kvcache_forward = operation(_kvcache.miss_kvcache_forward, OPERATORS.kvcache_forward.default)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    return_lse: bool = False,
) -> Tensors:
    """`torch.ops.flashcore.forward`: output and LSE of `[batch, row, head, column]`."""
    call = OPERATORS.forward if is_dynamo_compiling() else _forward
    return call(
        q, k, v, scale, causal, window_left, window_right, softcap, top_left, alibi_slopes, sinks, bias, seqused_q,
        seqused_k, leftpad_k, return_lse,
    )  # fmt: skip


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: "Optional[torch.Tensor]",
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    top_left: bool = False,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
    kv_batch_idx: "Optional[torch.Tensor]" = None,
    page_table: "Optional[torch.Tensor]" = None,
    return_lse: bool = False,
) -> Tensors:
    """`torch.ops.flashcore.varlen_forward`: output and LSE of packed sequences `[row, head, column]`."""
    call = OPERATORS.varlen_forward if is_dynamo_compiling() else _varlen_forward
    return call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, softcap,
        top_left, alibi_slopes, sinks, seqused_q, seqused_k, leftpad_k, kv_batch_idx, page_table, return_lse,
    )  # fmt: skip


def kvcache_forward(
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
) -> Tensors:
    """`torch.ops.flashcore.kvcache_forward`: append to a KV cache and attend it."""
    call = OPERATORS.kvcache_forward if is_dynamo_compiling() else _kvcache_forward
    return call(
        q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, kv_batch_idx,
        leftpad_k, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, scale, causal, window_left, window_right,
        softcap, alibi_slopes, sinks, return_lse,
    )  # fmt: skip


def continue_forward(q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> None:
    """`torch.ops.flashcore.continue_forward`: attention over more keys, merged into `out` and `lse`."""
    OPERATORS.continue_forward(q, k, v, out, lse, **options)


def append(*args: Any, **options: Any) -> torch.Tensor:
    """`torch.ops.flashcore.append`: keys and values to slots of a cache, with rotary embedding and norm."""
    return OPERATORS.append(*args, **options)


def merge(parts: Any, lses: Any, **options: Any) -> "Tuple[torch.Tensor, torch.Tensor]":
    """`torch.ops.flashcore.merge`: partial results over disjoint keys become one."""
    return OPERATORS.merge(parts, lses, **options)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bhsd",
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: "Tuple[int, int]" = (-1, -1),
    alignment: str = "bottom_right",
    softcap: float = 0.0,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    bias: "Optional[torch.Tensor]" = None,
    cu_seqlens_q: "Optional[torch.Tensor]" = None,
    cu_seqlens_k: "Optional[torch.Tensor]" = None,
    max_seqlen_q: "Optional[int]" = None,
    max_seqlen_k: "Optional[int]" = None,
    seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
    kv_batch_idx: "Optional[torch.Tensor]" = None,
    page_table: "Optional[torch.Tensor]" = None,
    out: "Optional[torch.Tensor]" = None,
    return_lse: bool = False,
    q_scale: "Optional[torch.Tensor]" = None,
    k_scale: "Optional[torch.Tensor]" = None,
    v_scale: "Optional[torch.Tensor]" = None,
    kv_dtype: Any = None,
    out_dtype: Any = None,
) -> Any:
    """`flashcore.attention` for torch tensors: on the CPU, or on the current stream of their GPU."""
    if layout not in ("bhsd", "bshd"):
        raise InvalidArgument(f"layout is {layout!r}; it must be 'bhsd' or 'bshd'")
    if alignment not in ("bottom_right", "top_left"):
        raise InvalidArgument(f"alignment is {alignment!r}; it must be 'bottom_right' or 'top_left'")
    is_packed, is_bhsd = cu_seqlens_q is not None, layout == "bhsd"

    def ordered(name: str, tensor: torch.Tensor) -> torch.Tensor:
        check_given(**{name: tensor})
        tensor = tensor.transpose(1, 2) if is_bhsd and tensor.dim() == 4 else tensor
        is_apart = name != "out" and tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
        return tensor.contiguous() if is_apart else tensor

    left, right = window_sides(window_size)
    if scale is not None:
        check_number("scale", scale)
    check_number("softcap", softcap)
    if kv_dtype is not None:
        k, v = _float8.codes("k", k, kv_dtype), _float8.codes("v", v, kv_dtype)
    check_optional(cu_seqlens_q=cu_seqlens_q, page_table=page_table, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    scales = (q_scale, k_scale, v_scale)
    if _float8.is_float8(q, k, v) or any(x is not None for x in scales):
        # A scale for each row lies like its tensor.
        scales = tuple(x.transpose(1, 2) if is_bhsd and x is not None and x.dim() == 3 else x for x in scales)
        q, k, v = ordered("q", q), ordered("k", k), ordered("v", v)
        out_dtype = getattr(torch, out_dtype) if isinstance(out_dtype, str) else out_dtype
        if out is not None and out_dtype is None:
            out_dtype = out.dtype
        result, lse = _float8.forward(
            q, k, v, *scales, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, left, right, softcap,
            alignment == "top_left", alibi_slopes, sinks, bias, seqused_q, seqused_k, leftpad_k, kv_batch_idx, page_table,
            return_lse, out_dtype,
        )  # fmt: skip
        result = result.transpose(1, 2) if is_bhsd and not is_packed else result
        if out is not None:
            result = out.copy_(result)
        return (result, lse) if return_lse else result
    given: Any = dict(
        scale=scale, causal=causal, window_left=left, window_right=right, softcap=softcap,
        top_left=alignment == "top_left", alibi_slopes=alibi_slopes, sinks=sinks, seqused_q=seqused_q,
        seqused_k=seqused_k, leftpad_k=leftpad_k,
    )  # fmt: skip

    q, k, v = ordered("q", q), ordered("k", k), ordered("v", v)
    target = None if out is None else ordered("out", out)
    lse = None
    if is_packed:
        if bias is not None:
            raise InvalidArgument("bias is given with cu_seqlens_q; packed sequences take no bias: pad them")
        keys = k.shape[0] if cu_seqlens_k is not None else k.shape[1]
        if page_table is not None:
            check_table("page_table", page_table)
            keys = page_table.shape[1] * k.shape[1]
        bounds = (
            q.shape[0] if max_seqlen_q is None else max_seqlen_q,
            keys if max_seqlen_k is None else max_seqlen_k,
        )
        arguments: Any = (q, k, v, cu_seqlens_q, cu_seqlens_k, *bounds)
        given.update(kv_batch_idx=kv_batch_idx, page_table=page_table)
        function, written = varlen_forward, OPERATORS.varlen_forward_out
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else ()
    elif page_table is not None or kv_batch_idx is not None or cu_seqlens_k is not None:
        if cu_seqlens_k is not None or bias is not None or seqused_q is not None or alignment == "top_left":
            raise InvalidArgument(
                "a cache with page_table or kv_batch_idx, without cu_seqlens_q, takes no cu_seqlens_k, bias, seqused_q or "
                "top_left alignment"
            )
        for name in ("top_left", "seqused_q", "seqused_k"):
            given.pop(name)
        given.update(kv_batch_idx=kv_batch_idx, page_table=page_table, cache_seqlens=seqused_k)
        result, lse = kvcache_forward(q, k, v, return_lse=return_lse, **given)
        if target is not None:
            target.copy_(result)
        result = result.transpose(1, 2) if is_bhsd else result
        result = out if out is not None else result
        return (result, lse) if return_lse else result
    else:
        arguments = (q, k, v)
        given.update(bias=bias)
        function, written = forward, OPERATORS.forward_out
        shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else ()
    if target is None:
        result, lse = function(*arguments, return_lse=return_lse, **given)
        result = result.transpose(1, 2) if is_bhsd and not is_packed else result
    else:
        lse = q.new_empty(shape, dtype=torch.float32) if return_lse else None
        written(*arguments, out=target, lse=lse, **given)
        result = out
    return (result, lse) if return_lse else result
