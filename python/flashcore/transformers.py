"""flashcore as an attention implementation of Hugging Face transformers.

    import flashcore.transformers
    flashcore.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashcore")

Padding costs no copies: keys of a batch are a range `[leftpad_k, seqused_k)`, for left and for right padding, and for
caches of fixed size. Masks that are no such range (packed sequences, image blocks, holes) become a bias.
A model's output is that of eager attention, or the model is refused by its name.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, NamedTuple, NoReturn, Optional, Tuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from ._errors import InvalidArgument, Unsupported
from ._lazy_mask import LEAST, LazyMask, bias_of, lazy_mask
from ._transformers_name import answer_for
from .compat._common import adjacent, columns
from .torch import forward, kvcache_forward, varlen_forward

__all__ = ["attention_forward", "attention_mask", "register"]


def register(name: str = "flashcore") -> None:
    """Makes `attn_implementation=name` work."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    answer_for(name)


# transformers 4 makes no masks for encoders by functions.
_bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)


class _Pattern(NamedTuple):
    """A mask function in numbers: which keys a row attends, seen from the row."""

    causal: bool = False
    left: int = -1
    right: int = -1
    is_packed: bool = False

    def __and__(self, other: "_Pattern") -> "_Pattern":
        def least(a: int, b: int) -> int:
            return max(a, b) if min(a, b) < 0 else min(a, b)

        return _Pattern(
            self.causal or other.causal, least(self.left, other.left), least(self.right, other.right),
            self.is_packed or other.is_packed,
        )  # fmt: skip


def _captured(function: Callable, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents  # type: ignore[index]


def _pattern(function: Callable) -> "Optional[_Pattern]":
    """The pattern of a mask function of transformers, or None for a function that is not known."""
    if function is masking_utils.causal_mask_function:
        return _Pattern(causal=True)
    if function is _bidirectional:
        return _Pattern()
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    maker = function.__qualname__.split(".<locals>")[0]
    if maker == "and_masks":
        parts = [_pattern(part) for part in _captured(function, "mask_functions")]
        return None if None in parts else functools.reduce(_Pattern.__and__, parts)  # type: ignore[arg-type]
    if maker in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
        window = _captured(function, "sliding_window")
        if not isinstance(window, int) or window < 1:
            return None
        # Of the first the row itself is one of the keys, of the second it is not.
        return _Pattern(left=window - 1) if maker == "sliding_window_overlay" else _Pattern(left=window, right=window)
    if maker == "packed_sequence_mask_function":
        return _Pattern(is_packed=True)
    if maker == "remap_positions_for_packed_sequence":
        return _pattern(_captured(function, "mask_function"))
    return None


def attention_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: "Optional[Callable]" = None,
    attention_mask: "Optional[torch.Tensor]" = None,
    device: Any = "cpu",
    cache_position: "Optional[torch.Tensor]" = None,
    **options: Any,
) -> LazyMask:
    """The mask of a forward pass: the pattern and the range of keys, or a bias.

    A mask without a hole is none to eager attention; here it is one, as layers may take None for causal.

    transformers 4 gives the positions of all rows, `cache_position`, in place of their number and the first of them.
    """
    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    if cache_position is not None:
        q_length, device = cache_position.shape[0], cache_position.device
        q_offset = cache_position[0] if torch.compiler.is_compiling() else int(cache_position[0])
    if attention_mask is not None:
        device = attention_mask.device
    # Where the first row stands among the keys of this layer.
    first_row = q_offset - kv_offset
    keys: "Optional[_Keys]" = None
    if torch.compiler.is_compiling():
        # Nothing may depend on the numbers in a mask, nor on what a function is made of.
        is_plain = mask_function in (masking_utils.causal_mask_function, _bidirectional)
        pattern: "Optional[_Pattern]" = _Pattern(causal=mask_function is not _bidirectional) if is_plain else None
        if is_plain and attention_mask is None:
            is_ordered = mask_function is not _bidirectional
            keys = _keys(batch_size, q_length, kv_length, first_row, 0, None, is_ordered, -1, -1, device)
    else:
        pattern = _pattern(mask_function)
        if pattern is not None and not pattern.is_packed:
            is_ordered = mask_function is not _bidirectional
            keys = _keys(
                batch_size, q_length, kv_length, first_row, kv_offset, attention_mask, is_ordered, pattern.left,
                0 if pattern.causal else pattern.right, device,
            )  # fmt: skip
    for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
        options[name] = False
    if cache_position is not None:
        rows: "Dict[str, Any]" = {"cache_position": cache_position}
    else:
        rows = {"q_length": q_length, "q_offset": q_offset, "device": device}
    allowed = functools.partial(
        masking_utils.sdpa_mask, batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, **rows, **options,
    )  # fmt: skip
    causal, left, right, is_packed = pattern or _Pattern()
    dtype = options.get("dtype", torch.float32)
    if keys is not None:
        return lazy_mask(
            (batch_size, 1, q_length, kv_length), dtype, device, allowed, causal, left, right, keys.leftpad, keys.used,
            keys.is_top_left, empty_rows=keys.empty_rows,
        )  # fmt: skip
    mask = allowed()
    return lazy_mask(
        mask.shape, dtype, device, lambda: mask, causal, left, right, bias=bias_of(mask),
        is_packed=is_packed and attention_mask is None,
    )  # fmt: skip


class _Keys(NamedTuple):
    """Keys of each batch, `[leftpad, used)`; None for 0 and for all."""

    leftpad: "Optional[torch.Tensor]" = None
    used: "Optional[torch.Tensor]" = None
    # The first row is at the first key; else the last row is at the last key.
    is_top_left: bool = False
    # `[batch, row]`, or None where every row has a key.
    empty_rows: "Optional[torch.Tensor]" = None


def _keys(
    batch: int,
    q_length: int,
    kv_length: int,
    first_row: Any,
    kv_offset: int,
    padding: "Optional[torch.Tensor]",
    is_ordered: bool,
    left: int,
    right: int,
    device: Any,
) -> "Optional[_Keys]":
    """The ranges of keys, or None for a mask with holes."""
    end = first_row + q_length if is_ordered else kv_length
    if padding is None:
        if isinstance(end, int) and end == kv_length:
            return _Keys()
        return _Keys(used=(torch.zeros((batch,), dtype=torch.int32, device=device) + end).to(torch.int32))
    there = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    if there.shape[1] < kv_length:
        there = torch.nn.functional.pad(there, (0, kv_length - there.shape[1]))
    count = there.sum(-1)
    numbers = torch.arange(1, kv_length + 1, device=there.device)
    last = (there * numbers).amax(-1)
    first = torch.where(count > 0, (there * numbers.flip(0)).amax(-1).neg() + kv_length, 0)
    rows = torch.arange(q_length, device=there.device) + first_row
    empty = (count == 0).unsqueeze(1).expand(-1, q_length)
    if right >= 0:
        empty = empty | (rows + right < first.unsqueeze(1))
    if left >= 0:
        empty = empty | (rows - left >= last.unsqueeze(1))
    checks = [
        (count == last - first).all(),  # no holes
        (first == 0).all(),
        (last == end).all(),
        (last == kv_length).all(),
        torch.as_tensor(first_row == 0, device=there.device).all(),
        empty.any(),
    ]
    is_range, from_start, to_end, is_full, is_first, has_empty = torch.stack(checks).tolist()
    if not is_range:
        return None
    if is_full and from_start and (to_end or not is_ordered):
        return _Keys()
    used, empty_rows = last.to(torch.int32), empty if has_empty else None
    if to_end or not is_ordered:
        return _Keys(None if from_start else first.to(torch.int32), used, empty_rows=empty_rows)
    if from_start and is_first:
        return _Keys(used=used, is_top_left=True, empty_rows=empty_rows)
    return None


class _Lengths(NamedTuple):
    """Packed sequences, or a cache of pages, among the keywords of an attention layer."""

    cu_seq_lens_q: Any
    cu_seq_lens_k: Any
    max_length_q: Any
    max_length_k: Any
    block_table: Any
    k_cache: Any
    v_cache: Any


def _packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: _Lengths, scale: float, causal: bool, left: int,
    right: int, softcap: float, sinks: "Optional[torch.Tensor]",
) -> torch.Tensor:  # fmt: skip
    """Attention of sequences that lie one after another in one batch."""
    cu_q, cu_k = lengths.cu_seq_lens_q.to(torch.int32), lengths.cu_seq_lens_k.to(torch.int32)
    if lengths.block_table is not None and lengths.k_cache is not None:
        # Decode of continuous batching: one row of each sequence, whose keys go into the pages first.
        rows = [x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v)]
        count = rows[0].shape[0]
        before = (cu_k[1 : count + 1] - cu_k[:count] - 1).contiguous()
        out, _ = kvcache_forward(
            rows[0], lengths.k_cache, lengths.v_cache, rows[1], rows[2], before,
            page_table=lengths.block_table[:count].to(torch.int32), scale=scale, causal=causal, window_left=left,
            window_right=right, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return out
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    most_q = q.shape[0] if lengths.max_length_q is None else int(lengths.max_length_q)
    most_k = k.shape[0] if lengths.max_length_k is None else int(lengths.max_length_k)
    out, _ = varlen_forward(q, k, v, cu_q, cu_k, most_q, most_k, scale, causal, left, right, softcap, sinks=sinks)
    return out


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "Optional[torch.Tensor]",
    dropout: float = 0.0,
    scaling: "Optional[float]" = None,
    sliding_window: "Optional[int]" = None,
    softcap: "Optional[float]" = None,
    is_causal: "Optional[bool]" = None,
    s_aux: "Optional[torch.Tensor]" = None,
    position_bias: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    indices: "Optional[torch.Tensor]" = None,
    cache: Any = None,
    **kwargs: Any,
) -> "Tuple[torch.Tensor, None]":
    """Attention of `[batch, head, row, column]`; the output is `[batch, row, head, column]`.

    What a mask of ours says goes before `is_causal` and `sliding_window`, as eager attention sees nothing but the mask.
    `s_aux` has a sink of each head, `sinks` one of each row, `[batch, head, row, 1]`; `indices` has the keys that an
    indexer chose for each row, `[batch, row, count]`.
    """

    def refuse(error: "Callable[[str], Exception]", reason: str) -> NoReturn:
        raise error(f"{type(module).__name__} cannot have flashcore attention: {reason}")

    if dropout:
        refuse(Unsupported, f"dropout is {dropout}, and flashcore has none: call model.eval(), or set the config's to 0")
    if cache is not None and hasattr(cache, "update") and hasattr(module, "layer_idx"):
        # Continuous batching: the cache gives the keys of all sequences of the batch, or a table of its pages.
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        cache.has_flashcore_layers = True
    if query.dtype != value.dtype:
        # Rotary embeddings and norms may have been computed in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
    scale, value_dim = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    q, k, v = (adjacent(x.transpose(1, 2)) for x in (query, key, value))
    head_sinks = None if s_aux is None else s_aux.detach().float()
    cap = float(softcap) if softcap else 0.0

    mask = attention_mask
    if isinstance(mask, LazyMask):
        causal, left, right = mask.causal, mask.left, mask.right
    else:
        # Eager attention without a mask attends every key, whatever the layer is. Packed sequences and masks of two
        # dimensions come from models that make no mask for FlashAttention, and the layer says what it is.
        is_flash = mask is not None or kwargs.get("cu_seq_lens_q") is not None
        causal = bool((is_flash and getattr(module, "is_causal", False)) if is_causal is None else is_causal)
        left = right = -1
        if sliding_window is not None and sliding_window > 0 and (is_flash or causal):
            left, right = sliding_window - 1, -1 if causal else sliding_window - 1

    if kwargs.get("block_indices") is not None:
        refuse(Unsupported, "it chooses blocks of keys for each row (block_indices)")
    lengths = _Lengths(*(kwargs.get(name) for name in _Lengths._fields))
    if (lengths.cu_seq_lens_q is None) != (lengths.cu_seq_lens_k is None):
        missing = "cu_seq_lens_q" if lengths.cu_seq_lens_q is None else "cu_seq_lens_k"
        refuse(InvalidArgument, f"{missing} is not given; packed sequences need cu_seq_lens_q and cu_seq_lens_k")
    if lengths.cu_seq_lens_q is not None:
        for name, given in (("position_bias", position_bias), ("sinks of each row", sinks), ("indices", indices)):
            if given is not None:
                refuse(Unsupported, f"packed sequences (cu_seq_lens_q) have {name}: pad the sequences instead")
        is_plain = isinstance(mask, LazyMask) and mask.used is None and (mask.bias is None or mask.is_packed)
        if mask is not None and not is_plain:
            refuse(Unsupported, "packed sequences (cu_seq_lens_q) have an attention_mask too: give one of them")
        out = _packed(q, k, v, lengths, scale, causal, left, right, cap, head_sinks)
        return columns(out, value_dim).reshape(*q.shape[:3], value_dim), None

    is_top_left, leftpad, used, bias, is_added, empty_rows = False, None, None, None, False, None
    if mask is not None and mask.dim() == 2:
        end = k.shape[1] - q.shape[1]
        keys = _keys(q.shape[0], q.shape[1], k.shape[1], end, 0, mask, causal or left >= 0, -1, -1, mask.device)
        if keys is None:
            refuse(InvalidArgument, f"attention_mask has shape {tuple(mask.shape)} and holes; give one of four dimensions")
        leftpad, used, is_top_left = keys[:3]
    elif mask is not None:
        if mask.dim() != 4:
            refuse(InvalidArgument, f"attention_mask has shape {tuple(mask.shape)}; it must have 2 or 4 dimensions")
        if not isinstance(mask, LazyMask):
            if mask.dtype != torch.bool and not mask.is_floating_point():
                refuse(
                    InvalidArgument,
                    f"attention_mask is {mask.dtype}, which eager attention would add to the scores; give bool (true: "
                    "attended), or floating point (added)",
                )
            if mask.dtype == torch.bool:
                bias = bias_of(mask)
            else:
                is_added, added = True, mask.float()
                bias = torch.where(added.isneginf(), added, added.clamp(min=LEAST))
        elif mask.shape[3] != k.shape[1] or (mask.shape[2] != q.shape[1] and (mask.shape[2] != 1 or causal or left >= 0)):
            refuse(
                InvalidArgument,
                f"its mask was made for {mask.shape[2]} rows and {mask.shape[3]} keys, and it has {q.shape[1]} and {k.shape[1]}",
            )
        elif mask.bias is not None:
            bias = mask.bias
        elif position_bias is not None and mask.leftpad is not None:
            # The kernel's columns of a bias are the keys after the padding, those of transformers all of them.
            bias = bias_of(mask.allowed())
        else:
            leftpad, used, is_top_left, empty_rows = mask.leftpad, mask.used, mask.is_top_left, mask.empty_rows
    if indices is not None:
        chosen = torch.zeros(q.shape[0], 1, q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        chosen = chosen.scatter(-1, indices.long().unsqueeze(1), True)
        if not isinstance(mask, LazyMask):
            refuse(Unsupported, "an indexer chose keys for each row, and attention_mask is not the model's own")
        bias, leftpad, used, empty_rows = bias_of(mask.allowed() & chosen), None, None, None
    if bias is not None:
        # The mask says everything: neither causal nor window are added to it.
        causal, left, right = False, -1, -1
    if position_bias is not None:
        added = position_bias.float()
        bias = added if bias is None else bias + added
    out, lse = forward(
        q, k, v, scale, causal, left, right, cap, is_top_left, None, head_sinks, bias, None, used, leftpad,
        sinks is not None or is_added,
    )  # fmt: skip
    if is_added:
        # Eager attention divides by 0 where all that is added is minus infinity.
        out.masked_fill_(lse.isneginf().transpose(1, 2).unsqueeze(-1), float("nan"))
    if empty_rows is not None and head_sinks is None and sinks is None:
        # Models with convolutions and states mix these rows into others.
        heads = out.unflatten(2, (v.shape[2], -1))
        torch.where(empty_rows[:, :, None, None, None], v.mean(1)[:, None, :, None], heads, out=heads)
    if sinks is not None:
        weight = torch.sigmoid(lse.unsqueeze(-1) - sinks.float())
        out = (out * weight.transpose(1, 2)).to(out.dtype)
    return columns(out, value_dim), None
