"""`flash_attn.layers.rotary.apply_rotary_emb`, in torch."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._errors import InvalidArgument
from ..torch._fast import is_dynamo_compiling
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
    _check_positions(positions, cos.shape[0])
    flat = x if cu_seqlens is not None else x.flatten(0, 1)
    result = rotate(flat, cos, sin, positions.flatten().long(), interleaved).view(x.shape)
    return x.copy_(result) if inplace else result


def _check_positions(positions: torch.Tensor, rows: int) -> None:
    """Refuses positions that the tables do not have; on a GPU and in a graph, where they are not known, the last row is taken."""
    if is_dynamo_compiling() or type(positions) is not torch.Tensor or not positions.is_cpu or not positions.numel():
        return
    first, last = (int(end) for end in positions.aminmax())
    if first < 0 or last >= rows:
        raise InvalidArgument(f"positions go from {first} to {last}, and cos and sin have {rows} rows: give longer tables")
