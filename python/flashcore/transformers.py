"""flashcore as an attention implementation of Hugging Face transformers.

    import flashcore.transformers
    flashcore.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashcore")

Padding costs no copies: keys of a batch are a range `[leftpad_k, seqused_k)`, for left and for right padding, and for
caches of fixed size. Masks that are no such range (packed sequences, image blocks, holes) become a bias.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from ._errors import InvalidArgument, Unsupported
from .compat._common import adjacent, columns
from .torch import forward, kvcache_forward, varlen_forward

__all__ = ["attention_forward", "attention_mask", "register"]

# A mask that is a range of keys is int32 of four dimensions, so that models pass it on as it is. Its shape says what it
# holds, which the host may look at without waiting for the GPU.
_USED = (1, 1)  # [batch, 1, 1, 1]: seqused_k, the last row at the last key
_PADDED = (1, 2)  # [batch, 1, 1, 2]: leftpad_k and seqused_k, the last row at the last key
_TOP_LEFT = (2, 1)  # [batch, 1, 2, 1]: seqused_k twice, the first row at the first key


def register(name: str = "flashcore") -> None:
    """Makes `attn_implementation=name` work."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    _answer_for(name)


_answered: "set[str]" = set()


def _answer_for(name: str) -> None:
    """Answers for our name where transformers takes every name with "flash" in it for a package or a kernel of the hub.

    Models that list the kernels they know would replace our name by one of those, and the functions of flash_attn are
    looked for when a model is made. Other names go on to transformers itself.
    """
    from transformers import modeling_flash_attention_utils as utils

    if name in _answered:
        return
    _answered.add(name)
    if hasattr(PreTrainedModel, "_check_and_adjust_attn_implementation"):
        check = PreTrainedModel._check_and_adjust_attn_implementation

        @functools.wraps(check)
        def check_implementation(self: Any, attn_implementation: "Optional[str]", *args: Any, **options: Any) -> Any:
            return name if attn_implementation == name else check(self, attn_implementation, *args, **options)

        PreTrainedModel._check_and_adjust_attn_implementation = check_implementation
    if not hasattr(utils, "_lazy_imports"):
        return
    from .compat import flash_attn as functions
    from .compat.bert_padding import pad_input, unpad_input

    original = utils._lazy_imports
    found: "Tuple[Any, ...]" = (functions.flash_attn_func, functions.flash_attn_varlen_func)
    if hasattr(utils, "_flash_with_kvcache_fn"):
        found += (functions.flash_attn_with_kvcache,)
    found += (pad_input, unpad_input)

    def lazy_imports(implementation: "Optional[str]", *args: Any, **options: Any) -> Any:
        return found if implementation == name else original(implementation, *args, **options)

    utils._lazy_imports = lazy_imports


# transformers 4 makes no masks for encoders by functions.
_bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)


def _parts(function: Callable) -> "list[Callable]":
    """The functions of a mask that is an intersection."""
    if not function.__qualname__.startswith("and_masks.<locals>"):
        return [function]
    parts = []
    for cell in function.__closure__ or ():
        for part in cell.cell_contents:
            parts += _parts(part)
    return parts


def _is_known(function: Callable) -> bool:
    """True for causal, bidirectional and window masks, which the attention layer itself asks for."""
    known = (masking_utils.causal_mask_function, _bidirectional)
    windows = ("sliding_window_overlay.<locals>", "sliding_window_bidirectional_overlay.<locals>")
    return all(part in known or part.__qualname__.startswith(windows) for part in _parts(function))


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
) -> "Optional[torch.Tensor]":
    """The mask of a forward pass: None, the range of keys of each batch, or a bias in float32.

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
    if torch.compiler.is_compiling():
        # Nothing may depend on the numbers in a mask, nor on what a function is made of.
        is_plain = mask_function in (masking_utils.causal_mask_function, _bidirectional)
        if is_plain and attention_mask is None and kv_length > 1:
            if isinstance(first_row, int) and kv_length == first_row + q_length:
                return None
            return _used(batch_size, first_row + q_length, device)
    elif kv_length > 1 and _is_known(mask_function):
        is_ordered = mask_function is not _bidirectional
        known, mask = _range(batch_size, q_length, kv_length, first_row, kv_offset, attention_mask, is_ordered, device)
        if known:
            return mask
    for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
        options[name] = False
    if cache_position is not None:
        rows: "Dict[str, Any]" = {"cache_position": cache_position}
    else:
        rows = {"q_length": q_length, "q_offset": q_offset, "device": device}
    mask = masking_utils.sdpa_mask(
        batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
        **rows, **options,
    )  # fmt: skip
    return None if mask is None else _bias(mask)


def _used(batch: int, count: Any, device: Any) -> torch.Tensor:
    counts = torch.zeros((batch,), dtype=torch.int32, device=device) + count
    return counts.to(torch.int32)[:, None, None, None]


def _range(
    batch: int,
    q_length: int,
    kv_length: int,
    first_row: Any,
    kv_offset: int,
    padding: "Optional[torch.Tensor]",
    is_ordered: bool,
    device: Any,
) -> "Tuple[bool, Optional[torch.Tensor]]":
    """Whether the mask is a range of keys, and which; None for all of them."""
    end = first_row + q_length if is_ordered else kv_length
    if padding is None:
        if isinstance(end, int) and end == kv_length:
            return True, None
        return True, _used(batch, end, device)
    there = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    if there.shape[1] < kv_length:
        there = torch.nn.functional.pad(there, (0, kv_length - there.shape[1]))
    count = there.sum(-1)
    keys = torch.arange(1, kv_length + 1, device=there.device)
    last = (there * keys).amax(-1)
    first = torch.where(count > 0, (there * keys.flip(0)).amax(-1).neg() + kv_length, 0)
    checks = [
        (count == last - first).all(),  # no holes
        (first == 0).all(),
        (last == end).all(),
        (last == kv_length).all(),
        torch.as_tensor(first_row == 0, device=there.device).all(),
    ]
    is_range, from_start, to_end, is_full, is_first = torch.stack(checks).tolist()
    if not is_range:
        return False, None
    if is_full and from_start and (to_end or not is_ordered):
        return True, None
    if to_end or not is_ordered:
        if from_start:
            return True, last.to(torch.int32)[:, None, None, None]
        both = torch.stack([first, last]).to(torch.int32)
        return True, both.t()[:, None, None, :]
    if from_start and is_first:
        return True, last.to(torch.int32)[:, None, None, None].expand(-1, 1, 2, 1)
    return False, None


def _bias(mask: torch.Tensor) -> torch.Tensor:
    """A bias of 0 and minus infinity from a mask of four dimensions; one that is added already stays."""
    if mask.is_floating_point():
        return mask.float()
    allowed = mask if mask.dtype == torch.bool else mask != 0
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~allowed, -float("inf"))


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
    cache: Any = None,
    **kwargs: Any,
) -> "Tuple[torch.Tensor, None]":
    """Attention of `[batch, head, row, column]`; the output is `[batch, row, head, column]`."""
    if dropout:
        raise Unsupported(f"dropout is {dropout}; flashcore has no dropout: call model.eval(), or set the config's dropout to 0")
    if cache is not None and hasattr(cache, "update") and hasattr(module, "layer_idx"):
        # Continuous batching: the cache gives the keys of all sequences of the batch, or a table of its pages.
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    if query.dtype != value.dtype:
        # Rotary embeddings and norms may have been computed in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
    scale, value_dim = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    q, k, v = (adjacent(x.transpose(1, 2)) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    left = right = -1
    if sliding_window is not None and sliding_window > 0:
        left, right = sliding_window - 1, -1 if causal else sliding_window - 1
    sinks = None if s_aux is None else s_aux.detach().float()
    cap = float(softcap) if softcap else 0.0

    lengths = _Lengths(*(kwargs.get(name) for name in _Lengths._fields))
    if lengths.cu_seq_lens_q is not None and lengths.cu_seq_lens_k is not None and position_bias is None:
        out = _packed(q, k, v, lengths, scale, causal, left, right, cap, sinks)
        return columns(out, value_dim).reshape(*q.shape[:3], value_dim), None

    is_top_left, leftpad, used, bias = False, None, None, None
    mask = attention_mask
    if mask is not None and mask.dim() == 2:
        known, mask = _range(q.shape[0], q.shape[1], k.shape[1], k.shape[1] - q.shape[1], 0, mask, causal or left >= 0, mask.device)
        if not known:
            raise InvalidArgument(
                f"attention_mask has shape {tuple(attention_mask.shape)} and holes; give one of four dimensions"  # type: ignore[union-attr]
            )
    if mask is not None:
        if mask.dim() != 4:
            raise InvalidArgument(f"attention_mask has shape {tuple(mask.shape)}; it must have 2 or 4 dimensions")
        kind = tuple(mask.shape[2:])
        if mask.dtype == torch.int32 and kind in (_USED, _PADDED, _TOP_LEFT):
            is_top_left = kind == _TOP_LEFT
            used = mask[:, 0, 0, -1].contiguous()
            if kind == _PADDED:
                leftpad = mask[:, 0, 0, 0].contiguous()
        else:
            # The mask says everything: neither causal nor window are added to it.
            bias = _bias(mask[..., : k.shape[1]])
            causal, left, right = False, -1, -1
    if position_bias is not None:
        added = position_bias.float()
        bias = added if bias is None else bias + added
    out, _ = forward(
        q, k, v, scale, causal, left, right, cap, is_top_left, None, sinks, bias, None, used, leftpad,
    )  # fmt: skip
    return columns(out, value_dim), None
