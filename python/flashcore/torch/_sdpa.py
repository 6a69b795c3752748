"""flashcore as torch's flash implementation: `torch.nn.attention.activate_flash_attention_impl("flashcore")`.

`scaled_dot_product_attention` of CUDA tensors then runs our forward pass wherever torch chooses its flash backend. The
operator of its backward pass is replaced too, and refuses: torch's own would read an LSE that is not of its kernel.
Packed and nested tensors (`_flash_attention_forward`) keep torch's kernels, forward and backward.
"""

from __future__ import annotations

import warnings
from typing import Any, Optional, Tuple

import torch

from .._errors import NoBackward, Unsupported
from ._launch import attend
from ._namespace import NAMESPACE


class Handle:
    """What is registered, until `remove`."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: "Optional[torch.library.Library]" = library

    def remove(self) -> None:
        """Gives torch its own kernels back."""
        library, self.library = self.library, None
        if library is not None:
            library._destroy()


def _new_output(query: torch.Tensor, value_dim: int) -> torch.Tensor:
    """An output whose dimensions lie in memory in the order of those of the query, as compiled graphs expect."""
    if query.shape[-1] == value_dim:
        return torch.empty_like(query)
    shape = (*query.shape[:-1], value_dim)
    strides, size = [0] * query.dim(), 1
    # From the dimension whose elements are closest; those that are broadcast come last.
    for dimension in sorted(range(query.dim()), key=lambda dimension: query.stride(dimension) or float("inf")):
        strides[dimension] = size
        size *= shape[dimension]
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: "Optional[float]" = None,
) -> "Tuple[Any, ...]":
    """`aten::_scaled_dot_product_flash_attention` of `[batch, head, row, column]`."""
    if dropout_p or return_debug_mask:
        name = "dropout_p" if dropout_p else "return_debug_mask"
        raise Unsupported(
            f"{name} is {dropout_p or return_debug_mask}; flashcore does not have it: pass 0, or call "
            "torch.nn.attention.restore_flash_attention_impl() for torch's own kernels"
        )
    out = _new_output(query, value.shape[-1])
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    target = out if out.stride(-1) == 1 else out.contiguous()
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    attend(
        *(x.transpose(1, 2) for x in (query, key, value, target)), lse, scale, is_causal, -1, -1, 0.0
    )
    if target is not out:
        out.copy_(target)
    # There is no dropout: nobody reads its state.
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    offset = torch.empty((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], state, offset, query.new_empty(0)


def _backward(*arguments: Any, **options: Any) -> Any:
    raise NoBackward(
        "flashcore is torch's flash implementation, and computes the forward pass only; call "
        "torch.nn.attention.restore_flash_attention_impl() before training, or run the model under torch.no_grad()"
    )


def activate(key: str = "CUDA") -> Handle:
    """Puts our kernels in the place of torch's; `activate_flash_attention_impl` calls it."""
    if key == "CUDA" and not torch.cuda.is_available():
        warnings.warn(
            "torch has a flash implementation for CUDA tensors alone, and sees no GPU: nothing changes for CPU tensors; call "
            "flashcore.attention or torch.ops.flashcore.forward for them",
            stacklevel=2,
        )
    library = torch.library.Library("aten", "IMPL", key)
    library.impl("_scaled_dot_product_flash_attention", _forward, key)
    library.impl("_scaled_dot_product_flash_attention_backward", _backward, key)
    return Handle(library)


def offer() -> bool:
    """Tells torch the name to activate; false where torch has no such registry. Nothing is activated."""
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        return False
    register(NAMESPACE, register_fn=activate)
    return True
