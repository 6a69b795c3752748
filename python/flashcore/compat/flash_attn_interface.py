"""The functions of FlashAttention 3 (`flash_attn_interface`) by their names and signatures, on CPU and CUDA tensors.

    from flashcore.compat.flash_attn_interface import flash_attn_func

num_splits, pack_gqa, sm_margin, deterministic and scheduler_metadata are accepted: plans choose for themselves, and every
result is deterministic. qv is refused, and descales but for FP8 tensors.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch

from .._errors import InvalidArgument
from ..torch import merge
from ..torch._fast import is_dynamo_compiling
from ..torch._launch import check_given
from . import _float8, _short
from ._common import parts_of, refuse_descales, refuse_given

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = Tuple[int, int]
# Builtins, and the same in Python for graphs.
_dense, _dense_python = _short.dense, _short.dense_python
_packed, _packed_python = _short.packed, _short.packed_python
_cached, _cached_python = _short.cached_as("page_table")


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    qv: "Optional[torch.Tensor]" = None,
    q_descale: "Optional[torch.Tensor]" = None,
    k_descale: "Optional[torch.Tensor]" = None,
    v_descale: "Optional[torch.Tensor]" = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: "Optional[bool]" = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of `[batch, row, head, column]`; the mask is bottom-right."""
    if _float8.is_float8(q, k, v):
        refuse_given(qv=qv)
        result = _float8.dense(
            q, k, v, softmax_scale, causal, window_size, softcap, return_attn_probs, attention_chunk, q_descale, k_descale,
            v_descale,
        )  # fmt: skip
        return result if return_attn_probs else result[0]
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None:
        refuse_given(qv=qv)
        refuse_descales(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    call = _dense_python if is_dynamo_compiling() else _dense
    return call(q, k, v, softmax_scale, causal, window_size, softcap, None, return_attn_probs, attention_chunk)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    q_descale: "Optional[torch.Tensor]" = None,
    k_descale: "Optional[torch.Tensor]" = None,
    v_descale: "Optional[torch.Tensor]" = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: "Optional[int]" = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv `[batch, row, 3, head, column]`, or with the heads of q, k and v one after another."""
    check_given(qkv=qkv)
    if qkv.dim() != 4:
        q, k, v = parts_of("qkv", qkv, 3, 5)
    elif num_heads_q is None:
        raise InvalidArgument(f"qkv has shape {tuple(qkv.shape)} and num_heads_q is not given; it says which heads are q")
    else:
        heads, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if num_heads_q < 1 or heads < 1 or rest:
            raise InvalidArgument(f"num_heads_q is {num_heads_q} of {qkv.shape[2]} heads of qkv; k and v have half of the others each")
        q, k, v = qkv.split([num_heads_q, heads, heads], -2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    qv: "Optional[torch.Tensor]" = None,
    q_descale: "Optional[torch.Tensor]" = None,
    k_descale: "Optional[torch.Tensor]" = None,
    v_descale: "Optional[torch.Tensor]" = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: "Optional[bool]" = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences `[row, head, column]`; the LSE is `[head, row]`."""
    if _float8.is_float8(q, k, v):
        refuse_given(qv=qv)
        result = _float8.packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale, causal,
            window_size, softcap, return_attn_probs, attention_chunk, q_descale, k_descale, v_descale,
        )  # fmt: skip
        return result if return_attn_probs else result[0]
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None:
        refuse_given(qv=qv)
        refuse_descales(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    call = _packed_python if is_dynamo_compiling() else _packed
    return call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap,
        None, return_attn_probs, seqused_q, seqused_k, None, None, None, attention_chunk,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: "Optional[torch.Tensor]" = None,
    out_dtype: "Optional[torch.dtype]" = None,
) -> "Tuple[torch.Tensor, torch.Tensor]":
    """Merges out_partial `[split, batch, row, head, column]` by lse_partial `[split, batch, row, head]`."""
    batch, rows = out_partial.shape[1:3]
    if out_partial.stride(-1) != 1:
        out_partial = out_partial.contiguous()
    parts = out_partial.flatten(1, 2)
    lses = lse_partial.permute(0, 3, 1, 2).flatten(2)
    dtype = out.dtype if out is not None else out_dtype or out_partial.dtype
    merged, lse = merge(parts, lses, out_dtype=dtype)
    merged = merged.unflatten(0, (batch, rows))
    if out is not None:
        merged = out.copy_(merged)
    return merged, lse.unflatten(1, (batch, rows)).permute(1, 2, 0)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: "Optional[torch.Tensor]" = None,
    v: "Optional[torch.Tensor]" = None,
    qv: "Optional[torch.Tensor]" = None,
    rotary_cos: "Optional[torch.Tensor]" = None,
    rotary_sin: "Optional[torch.Tensor]" = None,
    cache_seqlens: "Union[int, torch.Tensor, None]" = None,
    cache_batch_idx: "Optional[torch.Tensor]" = None,
    cache_leftpad: "Optional[torch.Tensor]" = None,
    page_table: "Optional[torch.Tensor]" = None,
    cu_seqlens_q: "Optional[torch.Tensor]" = None,
    cu_seqlens_k_new: "Optional[torch.Tensor]" = None,
    max_seqlen_q: "Optional[int]" = None,
    rotary_seqlens: "Optional[torch.Tensor]" = None,
    q_descale: "Optional[torch.Tensor]" = None,
    k_descale: "Optional[torch.Tensor]" = None,
    v_descale: "Optional[torch.Tensor]" = None,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: "Optional[torch.Tensor]" = None,
    num_splits: int = 0,
    pack_gqa: "Optional[bool]" = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Appends k and v to a cache `[batch, row, head, column]` or to pages, and attends it."""
    if rotary_cos is None:
        rotary_seqlens = None  # positions of an embedding that is not asked for: FlashAttention 3 ignores them
    if _float8.is_float8(q, k_cache, v_cache):
        refuse_given(qv=qv)
        result = _float8.cached(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
            softmax_scale, causal, window_size, softcap, rotary_interleaved, return_softmax_lse, cu_seqlens_q,
            cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, attention_chunk, q_descale, k_descale, v_descale,
        )  # fmt: skip
        return result if return_softmax_lse else result[0]
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None:
        refuse_given(qv=qv)
        refuse_descales(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    call = _cached_python if is_dynamo_compiling() else _cached
    return call(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, None, return_softmax_lse, cu_seqlens_q,
        cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, attention_chunk,
    )  # fmt: skip


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: "Optional[int]" = None,
    cu_seqlens_q: "Optional[torch.Tensor]" = None,
    cu_seqlens_k_new: "Optional[torch.Tensor]" = None,
    cache_leftpad: "Optional[torch.Tensor]" = None,
    page_size: "Optional[int]" = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: "Optional[bool]" = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """An empty tensor: kernels find their tiles from the lengths on the device."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
