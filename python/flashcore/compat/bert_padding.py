"""`flash_attn.bert_padding`: from padded batches to packed sequences and back."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences"]


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of x."""
    return x.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """A tensor of zeros with rows that are the values."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def _packed(x: torch.Tensor, is_there: torch.Tensor, lengths: torch.Tensor) -> "Tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]":
    indices = is_there.flatten().nonzero().flatten()
    ends = lengths.cumsum(0, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(x.flatten(0, 1), indices), indices, cu_seqlens, longest


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: "Optional[torch.Tensor]" = None
) -> "Tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]":
    """Packs `[batch, row, ...]`: tokens, their indices, cu_seqlens, the longest sequence, and the tokens in use of each.

    Tokens of `unused_mask` are packed too, and are not in use.
    """
    is_there = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = is_there.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return (*_packed(hidden_states, is_there, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> "Tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]":
    """Packs batches that hold several sequences: a row of the mask has their lengths, then zeros."""
    rows = attention_mask_in_length.sum(-1, keepdim=True)
    is_there = torch.arange(attention_mask_in_length.shape[-1], device=rows.device) < rows
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()]
    return _packed(hidden_states, is_there, lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Unpacks into `[batch, row, ...]`, zeros where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
