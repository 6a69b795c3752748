"""flashcore for PyTorch: operators `torch.ops.flashcore.*`, and functions that call them.

    import torch, flashcore.torch
    q = k = v = torch.randn(1, 8, 1024, 64)
    out = flashcore.torch.attention(q, k, v, causal=True)

The operators work on CPU and CUDA tensors, under `torch.compile(fullgraph=True)` and with dynamic shapes. There is no
backward: a gradient that is asked for raises `flashcore.NoBackward`.
Functions here skip torch's dispatcher where nothing listens to it: eager calls of plain tensors without grad.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .._errors import InvalidArgument
from . import _kvcache, _ops, _serving
from ._launch import attend_new

__all__ = ["append", "attention", "forward", "kvcache_forward", "merge", "varlen_forward"]

_Tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack


def is_plain(q: Any, k: Any, v: Any) -> bool:
    """True for an eager call of plain tensors that need no grad: nothing but the kernel would see the call."""
    return (
        not _is_compiling()
        and type(q) is _Tensor
        and type(k) is _Tensor
        and type(v) is _Tensor
        and not _dispatch_modes()
        and not (_is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    )


def forward(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> "Tuple[torch.Tensor, torch.Tensor]":
    """`torch.ops.flashcore.forward`: output and LSE of `[batch, row, head, column]`."""
    if is_plain(q, k, v):
        return _ops.forward(q, k, v, *args, **options)
    return torch.ops.flashcore.forward(q, k, v, *args, **options)


def output(
    q: Any, k: Any, v: Any, scale: "Optional[float]", causal: bool, left: int, right: int, softcap: float
) -> torch.Tensor:
    """The output of `forward` alone, without further operands: the shortest way."""
    if is_plain(q, k, v):
        return attend_new(q, k, v, scale, causal, left, right, softcap)
    return torch.ops.flashcore.forward(q, k, v, scale, causal, left, right, softcap)[0]


def varlen_forward(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> "Tuple[torch.Tensor, torch.Tensor]":
    """`torch.ops.flashcore.varlen_forward`: output and LSE of packed sequences `[row, head, column]`."""
    if is_plain(q, k, v):
        return _ops.varlen_forward(q, k, v, *args, **options)
    return torch.ops.flashcore.varlen_forward(q, k, v, *args, **options)


def kvcache_forward(q: Any, k_cache: Any, v_cache: Any, *args: Any, **options: Any) -> "Tuple[torch.Tensor, torch.Tensor]":
    """`torch.ops.flashcore.kvcache_forward`: append to a KV cache and attend it."""
    if is_plain(q, k_cache, v_cache):
        return _kvcache.kvcache_forward(q, k_cache, v_cache, *args, **options)
    return torch.ops.flashcore.kvcache_forward(q, k_cache, v_cache, *args, **options)


def append(*args: Any, **options: Any) -> torch.Tensor:
    """`torch.ops.flashcore.append`: keys and values to slots of a cache, with rotary embedding and norm."""
    return torch.ops.flashcore.append(*args, **options)


def merge(parts: Any, lses: Any, **options: Any) -> "Tuple[torch.Tensor, torch.Tensor]":
    """`torch.ops.flashcore.merge`: partial results over disjoint keys become one."""
    return torch.ops.flashcore.merge(parts, lses, **options)


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
) -> Any:
    """`flashcore.attention` for torch tensors: on the CPU, or on the current stream of their GPU."""
    if layout not in ("bhsd", "bshd"):
        raise InvalidArgument(f"layout is {layout!r}; it must be 'bhsd' or 'bshd'")
    if alignment not in ("bottom_right", "top_left"):
        raise InvalidArgument(f"alignment is {alignment!r}; it must be 'bottom_right' or 'top_left'")
    is_packed, is_bhsd = cu_seqlens_q is not None, layout == "bhsd"
    left, right = window_size
    given: Any = dict(
        scale=scale, causal=causal, window_left=left, window_right=right, softcap=softcap,
        top_left=alignment == "top_left", alibi_slopes=alibi_slopes, sinks=sinks, seqused_q=seqused_q,
        seqused_k=seqused_k, leftpad_k=leftpad_k,
    )  # fmt: skip

    def ordered(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"{name} is a {type(tensor).__name__} and q a torch tensor; all must be torch tensors")
        return tensor.transpose(1, 2) if is_bhsd and tensor.dim() == 4 else tensor

    q, k, v = ordered("q", q), ordered("k", k), ordered("v", v)
    target = None if out is None else ordered("out", out)
    lse = None
    if is_packed:
        if bias is not None:
            raise InvalidArgument("bias is given with cu_seqlens_q; packed sequences take no bias: pad them")
        keys = k.shape[0] if cu_seqlens_k is not None else k.shape[1]
        if page_table is not None:
            keys = page_table.shape[1] * k.shape[1]
        bounds = (
            q.shape[0] if max_seqlen_q is None else max_seqlen_q,
            keys if max_seqlen_k is None else max_seqlen_k,
        )
        arguments: Any = (q, k, v, cu_seqlens_q, cu_seqlens_k, *bounds)
        given.update(kv_batch_idx=kv_batch_idx, page_table=page_table)
        function, written = varlen_forward, torch.ops.flashcore.varlen_forward_out
        shape = (q.shape[1], q.shape[0])
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
        function, written = forward, torch.ops.flashcore.forward_out
        shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else ()
    if target is None:
        result, lse = function(*arguments, return_lse=return_lse, **given)
        result = result.transpose(1, 2) if is_bhsd and not is_packed else result
    else:
        lse = q.new_empty(shape, dtype=torch.float32) if return_lse else None
        written(*arguments, out=target, lse=lse, **given)
        result = out
    return (result, lse) if return_lse else result
