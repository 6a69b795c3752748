"""Rotary embedding in torch, for the functions of `flash_attn`."""

from __future__ import annotations

import torch

from .._errors import InvalidArgument
from ._fast import is_dynamo_compiling


def is_known(x: torch.Tensor) -> bool:
    """True for numbers that can be looked at without waiting: not on a GPU, and not in a graph."""
    return not is_dynamo_compiling() and type(x) is torch.Tensor and x.is_cpu and x.numel() > 0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding of `[token, head, column]` in float32, or float64 where x is that.

    Refuses positions that the tables do not have; where they are not known, the last row is taken."""
    if is_known(positions):
        first, last = (int(end) for end in positions.aminmax())
        if first < 0 or last >= cos.shape[0]:
            raise InvalidArgument(
                f"positions go from {first} to {last}, and cos and sin have {cos.shape[0]} rows: give longer tables"
            )
    half, wide = cos.shape[1], torch.float64 if x.dtype == torch.float64 else torch.float32
    positions = positions.clamp(0, cos.shape[0] - 1)
    cosine, sine = (table[positions].to(wide).unsqueeze(1) for table in (cos, sin))
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cosine - second * sine, first * sine + second * cosine)
    result = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([result.to(x.dtype), rest], -1)
