"""A mask of transformers in a few numbers, which is eager attention's mask for everything but flashcore."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

_NAMES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn")
_NAMES += ("is_cuda", "is_sparse", "is_nested", "is_quantized", "is_meta", "names")
_METHODS = ("dim", "size", "stride", "storage_offset", "numel", "__len__", "is_floating_point", "is_complex")
_METHODS += ("is_contiguous", "is_conj", "is_neg", "element_size", "nelement")

# What only asks how a tensor is laid out: eager's mask has the same answers.
_QUESTIONS = {getattr(torch.Tensor, name).__get__ for name in _NAMES if hasattr(torch.Tensor, name)}
_QUESTIONS |= {getattr(torch.Tensor, name) for name in _METHODS}


class LazyMask(torch.Tensor):
    """The mask of one forward pass, `[batch, 1, row, key]` of the model's type, without its numbers.

    `attention_forward` reads the attributes. Every other function gets eager's mask, 0 and the least number of the type,
    which is computed for it: layers that add the mask themselves, or make another one of it, are right.
    The memory is one NaN, so that what goes around `__torch_function__` cannot be taken for a mask.
    """

    causal: bool
    left: int
    right: int
    # The first row is at the first key; else the last row is at the last key.
    is_top_left: bool
    # Keys of each batch: `[leftpad, used)`, int32.
    leftpad: "Optional[torch.Tensor]"
    used: "Optional[torch.Tensor]"
    # 0 and `LEAST` in float32 for a mask that the attributes above cannot say.
    bias: "Optional[torch.Tensor]"
    # The sequences that position_ids pack are the mask's; cu_seq_lens say the same.
    is_packed: bool
    # Rows without a key in the range, `[batch, row]`, of which eager attention makes the mean of all values.
    empty_rows: "Optional[torch.Tensor]"
    allowed: "Callable[[], torch.Tensor]"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function is torch.Tensor.to:
            moved = args[0]._moved(args[1:], kwargs)
            if moved is not None:
                return moved
        return function(*_eager(args), **_eager(kwargs))

    def _moved(self, args: Any, kwargs: Any) -> "Optional[LazyMask]":
        """The mask on another device, or None if its type changes."""
        with torch._C.DisableTorchFunctionSubclass():
            memory = self.as_subclass(torch.Tensor).to(*args, **kwargs)
        if memory.dtype != self.dtype:
            return None
        device, allowed = memory.device, self.allowed

        def move(x: "Optional[torch.Tensor]") -> "Optional[torch.Tensor]":
            return None if x is None else x.to(device)

        return lazy_mask(
            self.shape, self.dtype, device, lambda: allowed().to(device), self.causal, self.left, self.right,
            move(self.leftpad), move(self.used), self.is_top_left, move(self.bias), self.is_packed,
            move(self.empty_rows),
        )  # fmt: skip

    def eager(self) -> torch.Tensor:
        """The mask of eager attention."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(self.allowed(), zero, torch.finfo(self.dtype).min)


def _eager(x: Any) -> Any:
    if isinstance(x, LazyMask):
        return x.eager()
    if type(x) in (list, tuple):
        return type(x)(_eager(each) for each in x)
    if isinstance(x, dict):
        return {name: _eager(each) for name, each in x.items()}
    return x


def lazy_mask(
    shape: Any,
    dtype: torch.dtype,
    device: Any,
    allowed: "Callable[[], torch.Tensor]",
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    leftpad: "Optional[torch.Tensor]" = None,
    used: "Optional[torch.Tensor]" = None,
    is_top_left: bool = False,
    bias: "Optional[torch.Tensor]" = None,
    is_packed: bool = False,
    empty_rows: "Optional[torch.Tensor]" = None,
) -> LazyMask:
    """Makes a mask; `allowed` computes the booleans of the pairs that attend."""
    memory = torch.full((), float("nan"), dtype=dtype, device=device)
    mask = memory.expand(shape).as_subclass(LazyMask)
    mask.causal, mask.left, mask.right, mask.is_top_left = causal, left, right, is_top_left
    mask.leftpad, mask.used, mask.bias, mask.is_packed, mask.allowed = leftpad, used, bias, is_packed, allowed
    mask.empty_rows = empty_rows
    return mask


# Beside it every score is lost to rounding, as beside the least number that eager attention adds: a row without a key is
# the mean of all values. The least number itself would be minus infinity in the kernels, whose exponents have base 2.
LEAST = -1e30


def bias_of(allowed: torch.Tensor) -> torch.Tensor:
    """0 where a pair attends, and `LEAST`."""
    return torch.zeros(allowed.shape, dtype=torch.float32, device=allowed.device).masked_fill_(~allowed, LEAST)
