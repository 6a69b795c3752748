"""`flash_attn.layers.rotary.apply_rotary_emb`, in torch."""

from __future__ import annotations

from typing import Optional, Union

import torch

from ..torch._rotary import rotate

__all__ = ["apply_rotary_emb"]


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: "Union[int, torch.Tensor]" = 0,
    cu_seqlens: "Optional[torch.Tensor]" = None,
    max_seqlen: "Optional[int]" = None,
) -> torch.Tensor:
    """Rotary embedding of `[batch, row, head, column]`, or of packed rows with cu_seqlens."""
    if cu_seqlens is None:
        batch, rows = x.shape[:2]
        positions = torch.arange(rows, device=x.device).repeat(batch, 1)
    else:
        rows = x.shape[0]
        token = torch.arange(rows, device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token.to(cu_seqlens.dtype), right=True)
        positions = token - cu_seqlens[sequence]
    if isinstance(seqlen_offsets, torch.Tensor):
        offsets = seqlen_offsets.to(torch.int64)
        positions = positions + (offsets[:, None] if cu_seqlens is None else offsets[sequence])
    else:
        positions = positions + seqlen_offsets
    flat = x if cu_seqlens is not None else x.flatten(0, 1)
    result = rotate(flat, cos, sin, positions.flatten().long(), interleaved).view(x.shape)
    return x.copy_(result) if inplace else result
