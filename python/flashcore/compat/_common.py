"""What the functions of both versions share: refusals, padding of head dims, slopes of each batch."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch

from .._errors import InvalidArgument, Unsupported
from .._resolve import check_number, integer
from .._resolve import window_sides as sides
from ..torch import forward, kvcache_forward, varlen_forward
from ..torch._dispatch import autocast
from ..torch._launch import check_given, check_optional, check_table, refuse_grad
from ..torch._namespace import OPERATORS
from . import _chunks
from ._append import append_new

Slopes = Optional[torch.Tensor]
Attend = Callable[..., Tuple[torch.Tensor, torch.Tensor]]


def refuse_dropout(dropout_p: float) -> None:
    """Refuses dropout."""
    if dropout_p:
        raise Unsupported(f"dropout_p is {dropout_p}; flashcore has no dropout: pass 0.0, which is right for inference")


def refuse_given(**arguments: Any) -> None:
    """Refuses arguments for features that are not there."""
    for name, value in arguments.items():
        if value is not None and value is not False and (isinstance(value, torch.Tensor) or value != 0):
            value = "given" if isinstance(value, torch.Tensor) else value
            raise Unsupported(f"{name} is {value}; flashcore does not have it: leave it out")


def refuse_descales(q: torch.Tensor, **descales: "Optional[torch.Tensor]") -> None:
    """Refuses descales of tensors that are not FP8."""
    for name, descale in descales.items():
        if descale is not None:
            raise Unsupported(f"{name} is given and {name[0]} is {q.dtype}; descales are for FP8 tensors: leave it out")


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """Columns side by side, as FlashAttention makes them; the head dim a multiple of 8 on GPUs."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.is_cuda and x.shape[-1] % 8:
        x = torch.nn.functional.pad(x, (0, 8 - x.shape[-1] % 8))
    return x


def columns(out: torch.Tensor, value_dim: int) -> torch.Tensor:
    """The output without the columns that were added."""
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


def parts_of(name: str, x: torch.Tensor, count: int, dimensions: int) -> "Tuple[torch.Tensor, ...]":
    """Tensors packed side by side `[..., count, head, column]`, without a copy."""
    check_given(**{name: x})
    if x.dim() != dimensions or x.shape[-3] != count:
        rows = "batch, row" if dimensions == 5 else "row"
        raise InvalidArgument(f"{name} has shape {tuple(x.shape)}; it must be [{rows}, {count}, head, column]")
    return x.unbind(-3)


def scale_of(q: torch.Tensor, scale: "Optional[float]") -> float:
    """The scale of the head dim before padding."""
    return max(q.shape[-1], 1) ** -0.5 if scale is None else scale


def check_numbers(scale: Any, softcap: Any) -> None:
    """Refuses what is no number."""
    if scale is not None:
        check_number("softmax_scale", scale)
    check_number("softcap", softcap)


MOST_VALUE_COLUMNS = 256  # of a kernel of GPUs


def _has_limit(v: torch.Tensor) -> bool:
    return v.is_cuda


def _by_columns(attend: "Callable[[torch.Tensor], Any]", v: torch.Tensor) -> "Tuple[torch.Tensor, torch.Tensor]":
    """Attention in as many calls as the columns of the values need: each has the same weights."""
    parts = [attend(columns) for columns in v.split(MOST_VALUE_COLUMNS, -1)]
    return torch.cat([out for out, _ in parts], -1), parts[0][1]


class _Refusing(torch.autograd.Function):
    """The output of a call in parts, whose gradient is refused like that of one call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return (None, *OPERATORS.no_backward(grad, *ctx.saved_tensors))


def shared(slopes: Slopes, batch: int) -> "Tuple[Slopes, bool]":
    """Slopes of one dimension, and whether each of the batches has its own."""
    check_optional(alibi_slopes=slopes)
    if slopes is None or slopes.dim() == 1:
        return slopes, False
    if slopes.dim() != 2 or slopes.shape[0] not in (1, batch):
        raise InvalidArgument(f"alibi_slopes has shape {tuple(slopes.shape)}; it must be (heads,) or ({batch}, heads)")
    if slopes.shape[0] == 1 or slopes.stride(0) == 0:
        return slopes[0], False
    return slopes, True


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: "Optional[float]", causal: bool,
    window: "Sequence[int]", softcap: float, slopes: "Optional[torch.Tensor]", return_lse: bool, chunk: int = 0,
    attend: Attend = forward,
) -> "Tuple[torch.Tensor, torch.Tensor]":  # fmt: skip
    """Attention of `[batch, row, head, column]`, by `attend`: `forward`, or what stands for it."""
    check_given(q=q, k=k, v=v)
    check_numbers(scale, softcap)
    left, right = sides(window)
    value_dim = v.shape[-1]
    if value_dim > MOST_VALUE_COLUMNS and _has_limit(v):
        options = (scale, causal, window, softcap, slopes, return_lse, chunk)
        return _by_columns(lambda v: dense(q, k, v, *options), v)
    if value_dim % 8 or q.shape[-1] % 8 or q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        scale = scale_of(q, scale)
        q, k, v = adjacent(q), adjacent(k), adjacent(v)
    if chunk:
        chunk, scale = integer("attention_chunk", chunk) or 0, scale_of(q, scale)
        out, lse = _chunks.cached(
            q, k, v, None, None, None, None, None, None, chunk, scale, causal, left, right, softcap, return_lse
        )
        return columns(out, value_dim), lse
    slopes, is_batched = shared(slopes, q.shape[0])
    if is_batched and slopes is not None:
        # The library has one slope for each head: batch after batch.
        results = [
            forward(q[b : b + 1], k[b : b + 1], v[b : b + 1], scale, causal, left, right, softcap, False, slopes[b],
                    return_lse=return_lse)
            for b in range(q.shape[0])
        ]  # fmt: skip
        out, lse = (torch.cat(parts) for parts in zip(*results))
    else:
        out, lse = attend(
            q, k, v, scale, causal, left, right, softcap, False, slopes, None, None, None, None, None, return_lse
        )
    return columns(out, value_dim), lse


def _bound(name: str, bound: Any) -> Any:
    """A length, which may be a tensor of one number."""
    if not isinstance(bound, torch.Tensor):
        return bound
    if bound.numel() != 1:
        raise InvalidArgument(f"{name} has shape {tuple(bound.shape)}; it must be one integer")
    return int(bound)


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: "Optional[torch.Tensor]",
    max_seqlen_q: Any, max_seqlen_k: Any, scale: "Optional[float]", causal: bool, window: "Sequence[int]", softcap: float,
    slopes: "Optional[torch.Tensor]", return_lse: bool, seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None, page_table: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None, leftpad_k: "Optional[torch.Tensor]" = None, chunk: int = 0,
    attend: Attend = varlen_forward,
) -> "Tuple[torch.Tensor, torch.Tensor]":  # fmt: skip
    """Attention of packed sequences, over packed keys or pages, by `attend`: `varlen_forward`, or what stands for it."""
    check_given(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    check_numbers(scale, softcap)
    scale, value_dim = scale_of(q, scale), v.shape[-1]
    if value_dim > MOST_VALUE_COLUMNS and _has_limit(v):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = (scale, causal, window, softcap, slopes, return_lse, seqused_q, seqused_k, page_table, sinks, leftpad_k, chunk)
        return _by_columns(lambda v: packed(q, k, v, *lengths, *options), v)
    q, k, v = adjacent(q), adjacent(k), adjacent(v)
    left, right = sides(window)
    if page_table is not None:
        if seqused_k is None:
            if cu_seqlens_k is None:
                raise InvalidArgument("pages are given without cu_seqlens_k or seqused_k, which have the lengths")
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
    bounds = [_bound(*bound) for bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))]
    slopes, is_batched = shared(slopes, cu_seqlens_q.shape[0] - 1)
    chunk = integer("attention_chunk", chunk) or 0 if chunk else 0
    if chunk and cu_seqlens_k is not None:
        out, lse = _chunks.packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, bounds[0], bounds[1], seqused_q, seqused_k, chunk, scale, causal, left,
            right, softcap, return_lse,
        )  # fmt: skip
    elif is_batched and slopes is not None:
        if leftpad_k is not None:
            raise Unsupported("alibi_slopes of each batch with leftpad_k; pass slopes of shape (heads,)")
        q, k, v = autocast(q, k, v)
        with torch.no_grad():
            out, lse = _packed_by_sequence(
                q, k, v, cu_seqlens_q, cu_seqlens_k, bounds, scale, causal, left, right, softcap, slopes, return_lse,
                seqused_q, seqused_k, page_table,
            )  # fmt: skip
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            out = _Refusing.apply(out, q, k, v)
    else:
        out, lse = attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, bounds[0], bounds[1], scale, causal, left, right, softcap, False, slopes,
            sinks, seqused_q, seqused_k, leftpad_k, None, page_table, return_lse,
        )  # fmt: skip
    return columns(out, value_dim), lse


def _packed_by_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: "Optional[torch.Tensor]",
    bounds: "List[Any]", scale: float, causal: bool, left: int, right: int, softcap: float, slopes: torch.Tensor,
    return_lse: bool, used_q: "Optional[torch.Tensor]", used_k: "Optional[torch.Tensor]",
    pages: "Optional[torch.Tensor]",
) -> "Tuple[torch.Tensor, torch.Tensor]":  # fmt: skip
    """One call for each sequence, whose slopes are its own. Lengths stay on the device.

    A call has two sequences: everything before, of which no row is used, and the sequence itself.
    """
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full((q.shape[1], q.shape[0]) if return_lse else (0,), -float("inf"), dtype=torch.float32)
    zero = torch.zeros(1, dtype=torch.int32, device=q.device)
    rows = cu_q[1:] - cu_q[:-1] if used_q is None else used_q
    # Everything before may be longer than the longest sequence.
    bounds = [q.shape[0], bounds[1] if cu_k is None else k.shape[0]]
    for b in range(cu_q.shape[0] - 1):
        two_q = torch.cat([zero, cu_q[b : b + 2]])
        two_k = None if cu_k is None else torch.cat([zero, cu_k[b : b + 2]])
        two_rows = torch.cat([zero, rows[b : b + 1]])
        two_keys = None if used_k is None else torch.cat([zero, used_k[b : b + 1]])
        two_pages = None if pages is None else pages[b : b + 1].expand(2, -1).contiguous()
        OPERATORS.varlen_forward_out(
            q, k, v, two_q, two_k, bounds[0], bounds[1], scale, causal, left, right, softcap, False, slopes[b], None,
            two_rows, two_keys, None, None, two_pages, out=out, lse=lse if return_lse else None,
        )  # fmt: skip
    return out, lse


def _check_table(
    name: str, table: torch.Tensor, page_size: int, lengths: torch.Tensor, k: "Optional[torch.Tensor]",
    cu_seqlens_k_new: "Optional[torch.Tensor]",
) -> None:  # fmt: skip
    """Refuses lengths beyond the pages of a table."""
    check_table(name, table)
    if k is not None:
        lengths = lengths + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1])
    longest, most = int(lengths.max()) if lengths.numel() else 0, table.shape[1] * page_size
    if longest > most:
        raise InvalidArgument(
            f"a sequence has {longest} keys with those that are appended, and {name} of shape {tuple(table.shape)} has pages "
            f"for {most}: give it more columns"
        )


def cached(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: "Optional[torch.Tensor]",
    v: "Optional[torch.Tensor]", cos: "Optional[torch.Tensor]", sin: "Optional[torch.Tensor]",
    cache_seqlens: "Union[int, torch.Tensor, None]", cache_batch_idx: "Optional[torch.Tensor]",
    cache_leftpad: "Optional[torch.Tensor]", page_table: "Optional[torch.Tensor]", scale: "Optional[float]",
    causal: bool, window: "Sequence[int]", softcap: float, interleaved: bool, slopes: "Optional[torch.Tensor]",
    return_lse: bool, cu_seqlens_q: "Optional[torch.Tensor]" = None, cu_seqlens_k_new: "Optional[torch.Tensor]" = None,
    max_seqlen_q: "Optional[int]" = None, rotary_seqlens: "Optional[torch.Tensor]" = None, chunk: int = 0,
    attend: Attend = kvcache_forward, table_name: str = "page_table",
) -> "Tuple[torch.Tensor, torch.Tensor]":  # fmt: skip
    """Append to a KV cache and attend it, by `attend`: `kvcache_forward`, or what stands for it."""
    check_given(q=q, k_cache=k_cache, v_cache=v_cache)
    check_optional(**{table_name: page_table})
    check_given(**{name: x for name, x in (("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q)) if x is not None})
    check_numbers(scale, softcap)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(-1) != 1:
            raise InvalidArgument(f"the columns of {name} are {cache.stride(-1)} elements apart; they must be adjacent")
    if q.is_cuda and (k_cache.shape[-1] % 8 or v_cache.shape[-1] % 8):
        raise Unsupported(
            f"the head dims of the caches are {k_cache.shape[-1]} and {v_cache.shape[-1]}; on GPUs they must be multiples "
            "of 8: allocate the caches with padded columns"
        )
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if page_table is not None and isinstance(cache_seqlens, torch.Tensor) and not cache_seqlens.is_cuda:
        # On a GPU it would have to be waited for; there, kernels attend no more keys than the table has.
        # Every call has to be checked: its lengths are no part of a key.
        _check_table(table_name, page_table, k_cache.shape[1], cache_seqlens, k, cu_seqlens_k_new)
        attend = kvcache_forward
    q = adjacent(q)
    k, v = (None if x is None else adjacent(x) for x in (k, v))
    left, right = sides(window)
    slopes, is_batched = shared(slopes, batch)
    if chunk:
        chunk, scale = integer("attention_chunk", chunk) or 0, scale_of(q, scale)
        refuse_grad(q, k_cache, v_cache, k, v)
        if k is not None:
            if v is None or cache_seqlens is None:
                raise InvalidArgument("k is given without v or cache_seqlens; all must be given to append")
            q, cache_seqlens = append_new(
                q, k_cache, v_cache, k, v, cache_seqlens, cos, sin, interleaved, rotary_seqlens, cache_batch_idx,
                page_table, cu_seqlens_q, cu_seqlens_k_new, causal or left >= 0 or right >= 0,
            )  # fmt: skip
        return _chunks.cached(
            q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_q, max_seqlen_q,
            chunk, scale, causal, left, right, softcap, return_lse,
        )  # fmt: skip

    def call(q: Any, k: Any, v: Any, lengths: Any, index: Any, leftpad: Any, table: Any, slopes: Any, caches: Any) -> Any:
        return attend(
            q, *caches, k, v, lengths, cos, sin, interleaved, rotary_seqlens, index, leftpad, table, cu_seqlens_q,
            cu_seqlens_k_new, max_seqlen_q, scale, causal, left, right, softcap, slopes, None, return_lse,
        )  # fmt: skip

    caches = (k_cache, v_cache)
    if not is_batched or slopes is None:
        return call(q, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, slopes, caches)
    if cu_seqlens_q is not None:
        raise Unsupported("alibi_slopes of each batch with cu_seqlens_q; pass slopes of shape (heads,)")
    results = []
    for b in range(batch):
        one = slice(b, b + 1)
        rest = [None if x is None else x[one] for x in (q, k, v, cache_seqlens, cache_batch_idx, cache_leftpad)]
        table = None if page_table is None else page_table if cache_batch_idx is not None else page_table[one]
        own = caches
        if page_table is None and cache_batch_idx is None:
            own = (k_cache[one], v_cache[one])
        results.append(call(*rest, table, slopes[b], own))
    out, lse = (torch.cat(parts) for parts in zip(*results))
    return out, lse
