"""attention_chunk of FlashAttention 3: rows see the keys of their own chunk alone.

Every chunk of a sequence becomes a sequence of its own, by lengths that are computed on the device: the kernels of packed
sequences do the rest, and causal masks and windows are the same within a chunk.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

import torch

from ..torch import varlen_forward


class Chunks(NamedTuple):
    """Sequences of one chunk each; those of one sequence follow one another."""

    cu_seqlens_q: torch.Tensor
    seqused_q: torch.Tensor
    first_key: torch.Tensor  # [batch, chunk], from the first key of the sequence
    end_key: torch.Tensor


def _chunks(
    cu_seqlens_q: torch.Tensor, seqused_q: "Optional[torch.Tensor]", keys: torch.Tensor, chunk: int, most_keys: int
) -> Chunks:
    """The chunks of sequences of `keys` keys; the last row stands at the last key.

    Rows before the first key, of which there are some where a sequence has more rows than keys, see nothing: they are the
    first chunk, without keys.
    """
    start = cu_seqlens_q[:-1]
    rows = cu_seqlens_q[1:] - start if seqused_q is None else seqused_q
    edges = torch.arange(-(-most_keys // chunk) + 1, dtype=torch.int32, device=keys.device) * chunk
    key_edges = torch.minimum(edges, keys[:, None])
    row_edges = torch.minimum((edges - (keys - rows)[:, None]).clamp(min=0), rows[:, None])
    none = torch.zeros_like(start)[:, None]
    row_edges = torch.cat([none, row_edges], 1)
    return Chunks(
        torch.cat([(start[:, None] + row_edges[:, :-1]).flatten(), cu_seqlens_q[-1:]]),
        (row_edges[:, 1:] - row_edges[:, :-1]).flatten(),
        torch.cat([none, key_edges[:, :-1]], 1),
        torch.cat([none, key_edges[:, 1:]], 1),
    )


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, most_q: int,
    most_k: int, seqused_q: "Optional[torch.Tensor]", seqused_k: "Optional[torch.Tensor]", chunk: int, scale: float,
    causal: bool, left: int, right: int, softcap: float, return_lse: bool,
) -> "Tuple[torch.Tensor, torch.Tensor]":  # fmt: skip
    """Attention of packed rows over packed keys."""
    start = cu_seqlens_k[:-1]
    keys = cu_seqlens_k[1:] - start if seqused_k is None else seqused_k
    parts = _chunks(cu_seqlens_q, seqused_q, keys, chunk, most_k)
    cu_k = torch.cat([(start[:, None] + parts.first_key).flatten(), cu_seqlens_k[-1:]])
    used_k = (parts.end_key - parts.first_key).flatten()
    return varlen_forward(
        q, k, v, parts.cu_seqlens_q, cu_k, most_q, most_k, scale, causal, left, right, softcap,
        seqused_q=parts.seqused_q, seqused_k=used_k, return_lse=return_lse,
    )  # fmt: skip


def cached(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: "Optional[torch.Tensor]",
    kv_batch_idx: "Optional[torch.Tensor]", leftpad_k: "Optional[torch.Tensor]", page_table: "Optional[torch.Tensor]",
    cu_seqlens_q: "Optional[torch.Tensor]", max_seqlen_q: "Optional[int]", chunk: int, scale: float, causal: bool,
    left: int, right: int, softcap: float, return_lse: bool,
) -> "Tuple[torch.Tensor, torch.Tensor]":  # fmt: skip
    """Attention of `[batch, row, head, column]` or packed rows over keys `[batch, row, head, column]` or pages."""
    capacity = k_cache.shape[1] if page_table is None else page_table.shape[1] * k_cache.shape[1]
    shape = q.shape
    device = q.device
    if cu_seqlens_q is None:
        max_seqlen_q = shape[1]
        cu_seqlens_q = torch.arange(shape[0] + 1, dtype=torch.int32, device=device) * shape[1]
        q = q.flatten(0, 1)
    batch = cu_seqlens_q.shape[0] - 1
    if lengths is None:
        lengths = torch.full((batch,), capacity, dtype=torch.int32, device=device)
    if kv_batch_idx is None:
        kv_batch_idx = torch.arange(batch, dtype=torch.int32, device=device)
    first = torch.zeros_like(lengths) if leftpad_k is None else leftpad_k
    parts = _chunks(cu_seqlens_q, None, lengths - first, chunk, capacity)
    count = parts.first_key.shape[1]
    out, lse = varlen_forward(
        q, k_cache, v_cache, parts.cu_seqlens_q, None, q.shape[0] if max_seqlen_q is None else max_seqlen_q, capacity,
        scale, causal, left, right, softcap, seqused_q=parts.seqused_q, seqused_k=(first[:, None] + parts.end_key).flatten(),
        leftpad_k=(first[:, None] + parts.first_key).flatten(),
        kv_batch_idx=kv_batch_idx.repeat_interleave(count, output_size=batch * count), page_table=page_table,
        return_lse=return_lse,
    )  # fmt: skip
    if len(shape) == 3:
        return out, lse
    if return_lse:
        lse = lse.unflatten(1, shape[:2]).transpose(0, 1)
    return out.unflatten(0, shape[:2]), lse
