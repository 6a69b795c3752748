"""The functions of `flash_attn` 2 by their names and signatures, on CPU and CUDA tensors.

    from flashcore.compat.flash_attn import flash_attn_func

Forward only: dropout is refused, and a gradient that is asked for raises `flashcore.NoBackward`.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch

from .._errors import NoBackward, Unsupported
from ..torch._fast import is_dynamo_compiling
from . import _short, bert_padding
from ._common import dense, packed, parts_of, refuse_dropout

__version__ = "2.8.4"  # the version whose signatures these are
USE_TRITON_ROCM = False

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = Tuple[int, int]
# Builtins, and the same in Python for graphs.
_dense, _dense_python = _short.dense, _short.dense_python
_packed, _packed_python = _short.packed, _short.packed_python
_cached, _cached_python = _short.cached_as("block_table")


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of `[batch, row, head, column]`; the mask is bottom-right."""
    if dropout_p:
        refuse_dropout(dropout_p)
    call = _dense_python if is_dynamo_compiling() else _dense
    result = call(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    # The third result is the matrix of dropout, of which there is none.
    return (*result, None) if return_attn_probs else result


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of kv `[batch, row, 2, head, column]`, without a copy."""
    return flash_attn_func(
        q, *parts_of("kv", kv, 2, 5), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv `[batch, row, 3, head, column]`, without a copy."""
    return flash_attn_func(
        *parts_of("qkv", qkv, 3, 5), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: "Optional[torch.Tensor]" = None,
) -> Any:
    """Attention of packed sequences `[row, head, column]`; with block_table, k and v are `[page, row, head, column]`."""
    if dropout_p:
        refuse_dropout(dropout_p)
    call = _packed_python if is_dynamo_compiling() else _packed
    result = call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap,
        alibi_slopes, return_attn_probs, None, None, block_table,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of kv `[row, 2, head, column]`, without a copy."""
    return flash_attn_varlen_func(
        q, *parts_of("kv", kv, 2, 4), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv `[row, 3, head, column]`, without a copy."""
    return flash_attn_varlen_func(
        *parts_of("qkv", qkv, 3, 4), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: "Optional[torch.Tensor]" = None,
    v: "Optional[torch.Tensor]" = None,
    rotary_cos: "Optional[torch.Tensor]" = None,
    rotary_sin: "Optional[torch.Tensor]" = None,
    cache_seqlens: "Union[int, torch.Tensor, None]" = None,
    cache_batch_idx: "Optional[torch.Tensor]" = None,
    cache_leftpad: "Optional[torch.Tensor]" = None,
    block_table: "Optional[torch.Tensor]" = None,
    softmax_scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Appends k and v to a cache `[batch, row, head, column]` or to pages, and attends it."""
    call = _cached_python if is_dynamo_compiling() else _cached
    return call(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, return_softmax_lse,
    )  # fmt: skip


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: "Optional[torch.Tensor]",
    return_softmax: bool,
) -> "Tuple[torch.Tensor, torch.Tensor, None, None]":
    """Output, LSE, and None for what dropout needs: the function that context-parallel libraries call."""
    refuse_dropout(dropout_p)
    window = (window_size_left, window_size_right)
    return (*dense(q, k, v, softmax_scale, causal, window, softcap, alibi_slopes, True), None, None)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    return_softmax: bool = False,
    block_table: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> "Tuple[torch.Tensor, torch.Tensor, None, None]":
    """`_flash_attn_forward` of packed sequences."""
    refuse_dropout(dropout_p)
    if num_splits > 1:
        raise Unsupported(f"num_splits is {num_splits}; num_splits > 1 is not supported here: plans choose by themselves, pass 0")
    window = (window_size_left, window_size_right)
    out, lse = packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, softcap,
        alibi_slopes, True, None, seqused_k, block_table, leftpad_k=leftpad_k,
    )  # fmt: skip
    return out, lse, None, None


def _wrapped_flash_attn_backward(*arguments: Any, **options: Any) -> Any:
    """Refuses: diffusers imports the name beside `_wrapped_flash_attn_forward`."""
    raise NoBackward("flashcore computes the forward pass only, and a gradient was asked of it; call it under torch.no_grad()")


_wrapped_flash_attn_forward = _flash_attn_forward


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys of a tile, for tests of dropout masks; there is no dropout here, so that any number is right."""
    return 64
