"""Kernels of the operators above those of devices: Autograd, which refuses what nobody computes, and Autocast.

Autograd sees tensors as they are differentiated, those of `torch.func` and dual tensors too; kernels of devices see them
without. Calls for which there is nothing to see go below it (`_stable.translating`, `_fast.is_plain`).
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Tuple

import torch
from torch.autograd import forward_ad

from .._errors import NoBackward
from ._namespace import LIB, OPERATORS

Kernel = Callable[..., Any]
_INSTEAD = "call it under torch.no_grad() or torch.inference_mode(), or detach() the tensor"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Arguments that autocast converts: to its own type, or to that of the argument that is named, which is not converted.
_CAST = {
    "forward": ("q", "k", "v"),
    "varlen_forward": ("q", "k", "v"),
    "kvcache_forward": ("q", "k", "v"),
    "float8_forward": ("q", "k", "v"),
    "float8_kvcache_forward": ("q", "k", "v"),
}

try:
    _transforms = torch._C._functorch.peek_interpreter_stack
except AttributeError:

    def _transforms() -> None:
        return None


def is_dual() -> bool:
    """True where tensors may have tangents."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """True inside of a function that `torch.func` transforms, and where tensors may have tangents."""
    return _transforms() is not None or is_dual()


def _tensors(arguments: Any, options: Any) -> "Iterator[torch.Tensor]":
    return (x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor))


def requires_grad(arguments: Any, options: Any) -> bool:
    """True if a tensor requires grad."""
    return any(x.requires_grad for x in _tensors(arguments, options))


def _refuse_tangents(arguments: Any, options: Any) -> None:
    if is_dual() and any(forward_ad.unpack_dual(x, level=0).tangent is not None for x in _tensors(arguments, options)):
        raise NoBackward(
            "a tensor has a tangent (torch.func.jvp, torch.autograd.forward_ad), and flashcore computes the output alone; "
            "pass forward_ad.unpack_dual(x).primal, or use another attention"
        )


class Refusing:
    """The library for `torch.library.register_autograd`: its kernel, which refuses tangents and gradients of `torch.func`."""

    def __init__(self, refuses_grad: bool) -> None:
        self.refuses_grad = refuses_grad

    def impl(self, name: str, kernel: Kernel, key: str, with_keyset: bool = True) -> None:
        """Registers the kernel of Autograd."""

        def checked(keyset: Any, *arguments: Any, **options: Any) -> Any:
            _refuse_tangents(arguments, options)
            is_refused = self.refuses_grad or _transforms() is not None
            if is_refused and torch.is_grad_enabled() and requires_grad(arguments, options):
                raise NoBackward(f"a tensor requires grad, and flashcore computes the forward pass only; {_INSTEAD}")
            return kernel(keyset, *arguments, **options)

        LIB.impl(name, checked, key, with_keyset=with_keyset)


def refuse_grad(name: str) -> None:
    """Registers the kernel of Autograd for an operator without a gradient: it refuses tensors that require one."""
    operator = getattr(OPERATORS, name).default

    def below(keyset: Any, *arguments: Any, **options: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments, **options)

    Refusing(True).impl(name, below, "Autograd")


def honour_autocast(name: str) -> None:
    """Registers the kernels of Autocast: float tensors become its type, and beside a cache that is written, that of the cache.

    As for torch's operators, those that write into tensors that are given have none.
    """
    names = [argument.name for argument in getattr(OPERATORS, name).default._schema.arguments]
    for device in ("cpu", "cuda"):
        LIB.impl(name, _autocast(name, names, device), f"Autocast{device.upper()}")


def _autocast(name: str, names: "list[str]", device: str) -> Kernel:
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))
    operator, cast = getattr(OPERATORS, name).default, _CAST[name]

    def kernel(*arguments: Any, **options: Any) -> Any:
        given = {**dict(zip(names, arguments)), **options}
        cache = given.get("k_cache")
        dtype = torch.get_autocast_dtype(device) if cache is None or cache.dtype in _FLOAT8 else cache.dtype
        with torch._C._ExcludeDispatchKeyGuard(key):
            given.update({argument: converted(given[argument], dtype) for argument in cast if argument in given})
            return operator(**given)

    return kernel


def converted(x: Any, dtype: torch.dtype) -> Any:
    """A tensor as autocast converts it: float64 and FP8 stay as they are."""
    is_converted = isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return x.to(dtype) if is_converted else x


def autocast(*tensors: torch.Tensor) -> "Tuple[torch.Tensor, ...]":
    """Tensors as autocast converts them, for calls of operators that write into given tensors."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(converted(x, torch.get_autocast_dtype(device)) for x in tensors)
