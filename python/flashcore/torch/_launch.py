"""From torch tensors to a launch: the key of the plan, the current stream, the workspace.

A call that finds its plan does nothing but read sizes, strides and addresses.
"""

from __future__ import annotations

import inspect
from typing import Any, List, Optional, Sequence, Tuple

import torch

from .. import _library as lib
from .._errors import InvalidArgument, NoBackward
from .._plans import CACHE, Plan
from .._resolve import Options, Tensor, attention_plan, continue_plan
from ._fast import is_capturing, raw_stream

_find = CACHE.find

DTYPES = {
    torch.float16: lib.F16,
    torch.bfloat16: lib.BF16,
    torch.float32: lib.F32,
    torch.float64: lib.F64,
    torch.float8_e4m3fn: lib.E4M3,
    torch.float8_e5m2: lib.E5M2,
    torch.int32: "int32",
    torch.uint32: "int32",
    torch.int64: "int64",
}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def describe(name: str, tensor: torch.Tensor) -> Tensor:
    """Everything of a tensor but its address."""
    check_optional(**{name: tensor})
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name} is on {device}; it must be on the CPU or an NVIDIA GPU: move it")
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype).replace("torch.", ""))
    place = (lib.CUDA, device.index) if device.type == "cuda" else (lib.CPU, 0)
    return Tensor(tuple(tensor.shape), tuple(tensor.stride()), dtype, place)


def check_optional(**tensors: Any) -> None:
    """Refuses what is neither None nor a tensor, or has no strides."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"{name} is a {type(tensor).__name__}; it must be a torch tensor")
        if tensor.layout is not torch.strided:
            raise InvalidArgument(f"{name} has layout {tensor.layout}; it must be strided: call .to_dense()")


def check_given(**tensors: Any) -> None:
    """Refuses None and tensors without dimensions too."""
    check_optional(**tensors)
    for name, tensor in tensors.items():
        if tensor is None:
            raise InvalidArgument(f"{name} is a NoneType; it must be a torch tensor")
        if not tensor.dim():
            raise InvalidArgument(f"{name} has shape (); it must have dimensions")


def check_table(name: str, table: torch.Tensor) -> None:
    """Refuses a table of pages that is no matrix."""
    if table.dim() != 2:
        raise InvalidArgument(f"{name} has shape {tuple(table.shape)}; it must be (batch, pages of the longest sequence)")


def of_one_device(function: Any, fake: Any) -> Any:
    """A fake that refuses tensors on several devices, by the names of the arguments of `function`.

    Beside tensors of other devices, those of the meta device take a call to its fake, which computes nothing.
    """
    names = list(inspect.signature(function).parameters)

    def checked(*arguments: Any, **options: Any) -> Any:
        given = [*zip(names, arguments), *options.items()]
        devices = [(name, x.device) for name, x in given if isinstance(x, torch.Tensor)]
        for name, device in devices:
            if device != devices[0][1]:
                raise InvalidArgument(
                    f"{name} is on {device} and {devices[0][0]} on {devices[0][1]}; move them to one device"
                )
        return fake(*arguments, **options)

    return checked


def bias_of(bias: "Optional[torch.Tensor]") -> "Tuple[Optional[torch.Tensor], bool]":
    """A bias of four dimensions, the first ones of size 1 where it has fewer, and whether one of 16 bits was converted."""
    if not isinstance(bias, torch.Tensor):
        return bias, False
    is_converted = bias.dtype in (torch.float16, torch.bfloat16)
    bias = bias.float() if is_converted else bias
    return bias[(None,) * (4 - bias.dim())], is_converted


def run(plan: Plan, addresses: "List[int]", device: int) -> None:
    """Runs a plan, on the GPU on the current stream of its device."""
    if device < 0:
        plan.run(addresses)
        return
    if plan.workspace_bytes:
        # Of torch's allocator, which knows streams and graphs: it may be given away as soon as the launch is enqueued.
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=f"cuda:{device}")
        addresses.append(workspace.data_ptr())
    if not plan.is_captured and is_capturing():
        plan.is_captured = True
    plan.run(addresses, raw_stream(device))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: "Optional[torch.Tensor]",
    scale: "Optional[float]",
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    is_top_left: bool = False,
    max_q: "Optional[int]" = None,
    max_k: "Optional[int]" = None,
    operands: "Sequence[Tuple[str, torch.Tensor]]" = (),
    is_continued: bool = False,
) -> "Optional[Plan]":
    """Attention into `out` and `lse`, tensors that match; `operands` are (name, tensor). The plan, if one was run."""
    device = q.get_device()
    key: Any = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), out.stride(), q.dtype, k.dtype, v.dtype, out.dtype,
        q.device, k.device, v.device, lse is None, scale, causal, window_left, window_right, softcap, is_top_left,
        max_q, max_k, is_continued,
    )  # fmt: skip
    addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()]
    if lse is not None:
        addresses.append(lse.data_ptr())
    for name, tensor in operands:
        key += (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        addresses.append(tensor.data_ptr())
    plan = _find(key)
    if plan is None:
        tensors = [describe(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out))]
        if out.numel() == 0:
            return None
        described = {name: describe(name, tensor) for name, tensor in operands}
        options = Options(
            scale, causal, window_left, window_right, softcap, lse is not None, is_top_left, max_q, max_k
        )
        make = continue_plan if is_continued else attention_plan
        plan = CACHE.add(key, lambda: make(*tensors, options, described))
    run(plan, addresses, device)
    return plan


def check_out(name: str, tensor: torch.Tensor, shape: "Tuple[int, ...]", dtype: torch.dtype, device: torch.device) -> None:
    """Checks a tensor that is written."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.device != device:
        raise InvalidArgument(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; it must be {dtype} of shape "
            f"{tuple(shape)} on {device}"
        )


def refuse_grad(*tensors: "Optional[torch.Tensor]") -> None:
    """Refuses tensors that require grad, for operators that write into their arguments."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise NoBackward(
            "a tensor requires grad, and flashcore computes the forward pass only; call it under torch.no_grad() or "
            "torch.inference_mode(), or detach() the tensor"
        )
