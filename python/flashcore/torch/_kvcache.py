"""Operator `kvcache_forward`: new keys and values into a cache, then attention over it (flash_attn_with_kvcache).

`_append` composes the first half of the append operator and torch's index operations, which know slots and positions on
the device without a copy to the host. It is the one place that a fused call of the library replaces.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .._errors import InvalidArgument
from ._launch import attend, refuse_grad
from ._ops import define, fake_of, new_outputs, operands_of
from ._serving import append


def _tokens(
    x: torch.Tensor, cu_seqlens: "Optional[torch.Tensor]", batch: int
) -> "Tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Of every token of new keys or of a query: its sequence, its index there; and the tokens of each sequence."""
    device = x.device
    if cu_seqlens is None:
        rows = x.shape[1]
        sequence = torch.arange(batch, device=device).repeat_interleave(rows, output_size=batch * rows)
        index = torch.arange(rows, device=device).repeat(batch)
        return sequence, index, torch.full((batch,), rows, dtype=torch.int32, device=device)
    ends = cu_seqlens.to(torch.int64)
    token = torch.arange(x.shape[0], device=device)
    # Tokens past the last offset belong to no sequence: `batch` is one past the last.
    sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    index = token - ends[sequence.clamp(max=batch - 1)]
    return sequence, index, (ends[1:] - ends[:-1]).to(torch.int32)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding of `[token, head, column]` in float32."""
    half = cos.shape[1]
    positions = positions.clamp(0, cos.shape[0] - 1)
    cosine, sine = (table[positions].float().unsqueeze(1) for table in (cos, sin))
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cosine - second * sine, first * sine + second * cosine)
    result = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([result.to(x.dtype), rest], -1)


def _append(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    rotary_seqlens: "Optional[torch.Tensor]",
    cos: "Optional[torch.Tensor]",
    sin: "Optional[torch.Tensor]",
    interleaved: bool,
    is_causal: bool,
    kv_batch_idx: "Optional[torch.Tensor]",
    leftpad_k: "Optional[torch.Tensor]",
    page_table: "Optional[torch.Tensor]",
    cu_seqlens_q: "Optional[torch.Tensor]",
    cu_seqlens_k_new: "Optional[torch.Tensor]",
) -> "Tuple[torch.Tensor, torch.Tensor]":
    """Appends, and returns the rotated query and the lengths after it."""
    batch = lengths.shape[0]
    sequence, index, new = _tokens(k, cu_seqlens_k_new, batch)
    known = sequence.clamp(max=batch - 1)
    row = lengths.to(torch.int64)[known] + index
    cache = known if kv_batch_idx is None else kv_batch_idx.to(torch.int64)[known]
    page_size = k_cache.shape[1]
    if page_table is None:
        slot, is_inside = cache * page_size + row, row < page_size
    else:
        entry = row // page_size
        is_inside = entry < page_table.shape[1]
        page = page_table[cache, entry.clamp(max=page_table.shape[1] - 1)].to(torch.int64)
        slot = torch.where(page >= 0, page * page_size + row % page_size, -1)
    slot = torch.where(is_inside & (sequence < batch), slot, -1)
    flat_k, flat_v = (x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v))
    start = lengths if rotary_seqlens is None else rotary_seqlens
    start = start.to(torch.int64)
    if cos is None or sin is None:
        append(flat_k, flat_v, k_cache, v_cache, slot)
        return q, lengths + new
    flat_q = q.flatten(0, 1) if q.dim() == 4 else q
    q_sequence, q_index, _ = _tokens(q, cu_seqlens_q, batch)
    # Without a causal mask or a window, FlashAttention gives all rows of a query the position of the first new key.
    at = start[q_sequence.clamp(max=batch - 1)] + (q_index if is_causal else 0)
    rotated = rotate(flat_q, cos, sin, at, interleaved).view(q.shape)
    append(flat_k, flat_v, k_cache, v_cache, slot, None, start[known] + index, cos.contiguous(), sin.contiguous(), interleaved)
    return rotated, lengths + new


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
) -> "Tuple[torch.Tensor, torch.Tensor]":
    """Attention over a KV cache, after `k` and `v` were appended to it."""
    refuse_grad(q, k_cache, v_cache, k, v)
    if (k is None) != (v is None):
        raise InvalidArgument("one of k and v is given; both must be, or none")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("one of rotary_cos and rotary_sin is given; both must be, or none")
    if rotary_cos is not None and k is None:
        raise InvalidArgument("rotary_cos is given without k; the rotary embedding is applied when k is appended")
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise InvalidArgument("k is given without cache_seqlens, which says where it goes")
        q, cache_seqlens = _append(
            q, k_cache, v_cache, k, v, cache_seqlens, rotary_seqlens, rotary_cos, rotary_sin, rotary_interleaved,
            causal or window_left >= 0 or window_right >= 0, kv_batch_idx, leftpad_k, page_table, cu_seqlens_q,
            cu_seqlens_k_new,
        )  # fmt: skip
    is_packed = cu_seqlens_q is not None
    out, lse = new_outputs(q, v_cache.shape[-1], is_packed, return_lse, False)
    operands = operands_of(
        cu_seqlens_q=cu_seqlens_q, alibi_slopes=alibi_slopes, sinks=sinks, seqused_k=cache_seqlens, leftpad_k=leftpad_k,
        kv_batch_idx=kv_batch_idx, page_table=page_table,
    )  # fmt: skip
    attend(
        q, k_cache, v_cache, out, lse if return_lse else None, scale, causal, window_left, window_right, softcap, False,
        max_seqlen_q if is_packed else None, None, operands,
    )  # fmt: skip
    return out, lse


_SCHEMA: Any = (
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k=None, Tensor? v=None, Tensor? cache_seqlens=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=True, Tensor? rotary_seqlens=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? page_table=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k_new=None, SymInt? max_seqlen_q=None, float? scale=None, bool causal=False, int window_left=-1, "
    "int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, bool return_lse=False) "
    "-> (Tensor, Tensor)"
)
define("kvcache_forward", _SCHEMA, kvcache_forward, fake_of(kvcache_forward, (3, 4), "v_cache"))
