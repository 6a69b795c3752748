"""FP8 tensors of `flash_attn_interface`: descales `[batch, KV head]`, outputs of an FP8 query in bfloat16."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._errors import Unsupported
from ..torch._float8 import forward, is_float8, kvcache_forward
from ._common import check_numbers, refuse_descales, sides

__all__ = ["cached", "dense", "is_float8", "packed"]


def _refuse(q: torch.Tensor, scale: Any, softcap: Any, chunk: int, **descales: "Optional[torch.Tensor]") -> None:
    check_numbers(scale, softcap)
    if chunk:
        raise Unsupported(f"attention_chunk is {chunk} and tensors are FP8; pass 0, or use 16 bits")
    if not is_float8(q):
        refuse_descales(q, **descales)


def dense(
    q: Any, k: Any, v: Any, scale: Any, causal: bool, window: Any, softcap: float, return_lse: bool, chunk: int,
    q_descale: Any, k_descale: Any, v_descale: Any,
) -> Any:  # fmt: skip
    """Attention of `[batch, row, head, column]`."""
    _refuse(q, scale, softcap, chunk, q_descale=q_descale)
    return forward(
        q, k, v, q_descale, k_descale, v_descale, None, None, None, None, scale, causal, *sides(window), softcap, False, None,
        None, None, None, None, None, None, None, return_lse,
    )  # fmt: skip


def packed(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, used_q: Any, used_k: Any, scale: Any,
    causal: bool, window: Any, softcap: float, return_lse: bool, chunk: int, q_descale: Any, k_descale: Any,
    v_descale: Any,
) -> Any:  # fmt: skip
    """Attention of packed sequences."""
    _refuse(q, scale, softcap, chunk, q_descale=q_descale)
    return forward(
        q, k, v, q_descale, k_descale, v_descale, cu_q, cu_k, int(max_q), int(max_k), scale, causal, *sides(window), softcap,
        False, None, None, None, used_q, used_k, None, None, None, return_lse,
    )  # fmt: skip


def cached(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cos: Any, sin: Any, lengths: Any, batch_idx: Any, leftpad: Any,
    table: Any, scale: Any, causal: bool, window: Any, softcap: float, interleaved: bool, return_lse: bool, cu_q: Any,
    cu_k_new: Any, max_q: Any, rotary_seqlens: Any, chunk: int, q_descale: Any, k_descale: Any, v_descale: Any,
) -> Any:  # fmt: skip
    """Append to an FP8 cache, whose scales are the descales, and attention over it."""
    _refuse(q, scale, softcap, chunk, q_descale=q_descale)
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    if isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    left, right = sides(window)
    if k is None:
        return forward(
            q, k_cache, v_cache, q_descale, k_descale, v_descale, cu_q, None, max_q, None, scale, causal, left, right, softcap,
            False, None, None, None, None, lengths, leftpad, batch_idx, table, return_lse,
        )  # fmt: skip
    return kvcache_forward(
        q, k_cache, v_cache, k, v, lengths, k_descale, v_descale, False, cos, sin, interleaved, rotary_seqlens, batch_idx,
        leftpad, table, cu_q, cu_k_new, max_q, scale, causal, left, right, softcap, None, None, return_lse,
    )  # fmt: skip
