"""New keys and values into a KV cache as a step of its own, ahead of attention that `kvcache_forward` does not have."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from .._errors import InvalidArgument
from ..torch import append
from ..torch._rotary import is_known, rotate


def _tokens(
    x: torch.Tensor, cu_seqlens: "Optional[torch.Tensor]", batch: int
) -> "Tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Of every token: its sequence, which is `batch` for none, and its index there; and the tokens of each sequence."""
    device = x.device
    if cu_seqlens is None:
        rows = x.shape[1]
        sequence = torch.arange(batch, device=device).repeat_interleave(rows, output_size=batch * rows)
        return sequence, torch.arange(rows, device=device).repeat(batch), torch.full((batch,), rows, dtype=torch.int32, device=device)
    ends = cu_seqlens.to(torch.int64)
    token = torch.arange(x.shape[0], device=device)
    sequence = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    return sequence, token - ends[sequence.clamp(max=batch - 1)], (ends[1:] - ends[:-1]).to(torch.int32)


def append_new(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    lengths: torch.Tensor, cos: "Optional[torch.Tensor]", sin: "Optional[torch.Tensor]", interleaved: bool,
    rotary_seqlens: "Optional[torch.Tensor]", kv_batch_idx: "Optional[torch.Tensor]",
    page_table: "Optional[torch.Tensor]", cu_seqlens_q: "Optional[torch.Tensor]",
    cu_seqlens_k_new: "Optional[torch.Tensor]", is_ordered: bool,
) -> "Tuple[torch.Tensor, torch.Tensor]":  # fmt: skip
    """Appends, and returns the rotated query and the lengths with what is new; they never leave the device."""
    batch, page_size = lengths.shape[0], k_cache.shape[1]
    sequence, index, new = _tokens(k, cu_seqlens_k_new, batch)
    known = sequence.clamp(max=batch - 1)
    row = lengths.to(torch.int64)[known] + index
    cache = known if kv_batch_idx is None else kv_batch_idx.to(torch.int64)[known]
    if page_table is None:
        slot, is_inside = cache * page_size + row, row < page_size
    else:
        entry = row // page_size
        is_inside = entry < page_table.shape[1]
        page = page_table[cache, entry.clamp(max=page_table.shape[1] - 1)].to(torch.int64)
        slot = torch.where(page >= 0, page * page_size + row % page_size, -1)
    # Where pages are known, their table was checked.
    if page_table is None and is_known(row) and not bool((is_inside | (sequence >= batch)).all()):
        raise InvalidArgument(
            f"a sequence has {int(row.max()) + 1} keys with those that are appended, and the cache has {page_size} rows"
        )
    slot = torch.where(is_inside & (sequence < batch), slot, -1)
    flat_k, flat_v = (x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v))
    if cos is None or sin is None:
        append(flat_k, flat_v, k_cache, v_cache, slot)
        return q, lengths + new
    start = lengths if rotary_seqlens is None else rotary_seqlens
    start = start.to(torch.int64)
    q_sequence, q_index, _ = _tokens(q, cu_seqlens_q, batch)
    # Without a causal mask or a window, FlashAttention gives all rows of a query the position of the first new key.
    at = start[q_sequence.clamp(max=batch - 1)] + (q_index if is_ordered else 0)
    rotated = rotate(q.flatten(0, 1) if q.dim() == 4 else q, cos, sin, at, interleaved).view(q.shape)
    append(flat_k, flat_v, k_cache, v_cache, slot, None, start[known] + index, cos.contiguous(), sin.contiguous(), interleaved)
    return rotated, lengths + new
