"""The short way of an eager call: builtin functions of libflashcore_python, which find the launch by the arguments.

`operation` makes one from a Python function that does everything (`miss`) and returns (result, launch or None): the
builtin calls it for what it has not seen, and launches by itself what it has. Without the library, where
`FLASHCORE_FAST=0` says so or the file is missing, calls go to the Python function each time.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
from ctypes import PyDLL, c_char_p, c_size_t, c_void_p, cast, py_object, pythonapi
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch

from .. import _library as lib
from .._plans import CACHE, Plan
from ._dispatch import is_dual, is_transformed

_Tensor = torch.Tensor
_NAMES = (
    "shape", "dtype", "is_cpu", "is_cuda", "requires_grad", "stride", "data_ptr", "get_device", "is_neg", "new_empty",
    "is_captured",
)  # fmt: skip
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
OUTPUT, FLOAT, WORKSPACE, SHARED, FLOAT16, BFLOAT16 = range(6)
# Of outputs that are not of the type of the first tensor.
_KINDS = {torch.float32: FLOAT, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}

try:
    # The property of a Stream object costs ten times as much.
    raw_stream = torch._C._cuda_getCurrentRawStream
except AttributeError:

    def raw_stream(index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream


try:
    is_capturing = torch._C._cuda_isCurrentStreamCapturing
except AttributeError:

    def is_capturing() -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


# Functions that say whether something beside the kernel sees a call: modes, tracers of graphs, autocast, tangents.
_LISTENERS = (
    *(
        getattr(torch._C, name)
        for name in ("_len_torch_dispatch_stack", "_len_torch_function_stack", "_is_tracing")
        if hasattr(torch._C, name)
    ),
    getattr(torch._C, "_is_any_autocast_enabled", _is_autocast),
    is_dual,
)


def _exchange() -> int:
    """The address of DLPack's exchange table, which reads a tensor without an object of Python; 0 if torch has none."""
    capsule = _Tensor.__dict__.get("__dlpack_c_exchange_api__")
    if capsule is None or os.environ.get("FLASHCORE_EXCHANGE") == "0":
        return 0
    get = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))
    try:
        return get(capsule, b"dlpack_exchange_api") or 0
    except ValueError:
        return 0


def _load() -> "Optional[Tuple[Any, Any]]":
    """The library and the addresses of the interpreter's functions that it asks for."""
    file = os.path.join(os.path.dirname(lib.path()), "libflashcore_python.so")
    if os.environ.get("FLASHCORE_FAST") == "0" or not os.path.exists(file):
        return None
    try:
        library = PyDLL(file)
        library.flashcore_python_symbols.restype = c_char_p
        names = library.flashcore_python_symbols().decode().split()
        addresses = [cast(getattr(pythonapi, name), c_void_p).value for name in names]
    except (OSError, AttributeError):
        # Another platform or another Python: everything works without it.
        return None
    library.flashcore_python_operation.restype = py_object
    library.flashcore_python_operation.argtypes = [c_void_p, c_size_t, py_object]
    library.flashcore_python_clear.restype, library.flashcore_python_clear.argtypes = None, [py_object]
    library.flashcore_python_count.restype, library.flashcore_python_count.argtypes = c_size_t, [py_object]
    return library, (c_size_t * len(addresses))(*addresses)


_LOADED = _load()


def is_fast() -> bool:
    """True if eager calls take the short way."""
    return _LOADED is not None


def is_plain(tensors: "Sequence[Any]") -> bool:
    """True for an eager call of plain tensors that need no grad: nothing but the kernel would see the call."""
    given = [tensor for tensor in tensors if tensor is not None]
    is_watched = _is_grad_enabled()
    return not is_transformed() and not any(listener() for listener in _LISTENERS) and all(
        type(tensor) is _Tensor
        and (tensor.is_cpu or tensor.is_cuda)
        and not tensor.is_neg()
        and not (is_watched and tensor.requires_grad)
        for tensor in given
    )


def _slow_operation(miss: Any, dispatch: Any, places: "Sequence[int]") -> Any:
    def operation(*arguments: Any) -> Any:
        if dispatch is not None and not is_plain([arguments[place] for place in places if place < len(arguments)]):
            return dispatch(*arguments)
        return miss(*arguments)[0]

    return operation


_EMPTY: "Dict[Tuple[int, int], torch.Tensor]" = {}


def _sharing(miss: "Callable[..., Any]") -> "Callable[..., Any]":
    """`miss` whose launches return one LSE without elements for all calls, where none is wanted.

    Results of operators may not be the same tensor twice; those of functions may.
    """

    @functools.wraps(miss)
    def shared(*arguments: Any) -> Any:
        result, launch = miss(*arguments)
        if launch is not None:
            outputs, plan = launch[5], launch[7]
            place = (plan.device, plan.ordinal)
            if place not in _EMPTY:
                device = f"cuda:{plan.ordinal}" if plan.device == lib.CUDA else "cpu"
                with torch.inference_mode(False):
                    _EMPTY[place] = torch.empty(0, dtype=torch.float32, device=device)
            outputs = tuple((_EMPTY[place], SHARED) if output == ((0,), FLOAT) else output for output in outputs)
            launch = (*launch[:5], outputs, *launch[6:])
        return result, launch

    return shared


def operation(miss: "Callable[..., Any]", dispatch: "Optional[Callable[..., Any]]" = None) -> Any:
    """A function of positional arguments like `miss`, whose annotations say which of them are tensors.

    `dispatch` takes calls that are not plain; without it, the operation is below torch's dispatcher.
    """
    parameters = list(inspect.signature(miss).parameters.values())
    are_tensors = tuple("Tensor" in str(parameter.annotation) for parameter in parameters)
    if _LOADED is None:
        return _slow_operation(miss, dispatch, [place for place, is_tensor in enumerate(are_tensors) if is_tensor])
    library, addresses = _LOADED
    if dispatch is not None:
        miss = _sharing(miss)
    required = sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
    settings = (
        _Tensor, float, int, None, True, False, torch.float32, torch.float16, torch.bfloat16, torch.uint8, ("dtype",),
        _LISTENERS, _is_grad_enabled, raw_stream, is_capturing, _NAMES, _exchange(), dispatch, miss, lib.fail, are_tensors,
        required,
        tuple(None if parameter.default is inspect.Parameter.empty else parameter.default for parameter in parameters),
    )  # fmt: skip
    function = library.flashcore_python_operation(ctypes.addressof(addresses), len(addresses), settings)
    CACHE.on_eviction.append(lambda: library.flashcore_python_clear(function.__self__))
    return function


def launches(function: Any) -> int:
    """Number of launches that an operation knows."""
    return 0 if _LOADED is None else _LOADED[0].flashcore_python_count(function.__self__)


def places_of(function: "Callable[..., Any]", names: "Dict[str, str]") -> "Dict[str, int]":
    """The place of each operand among the arguments of a function; `names` has those that are called otherwise."""
    return {names.get(name, name): place for place, name in enumerate(inspect.signature(function).parameters)}


def launch_of(
    plan: "Optional[Plan]",
    places: "Dict[str, int]",
    count: int,
    outputs: "Sequence[torch.Tensor]",
    returns_tuple: bool,
    is_converted: bool = False,
) -> Any:
    """The launch of a plan whose outputs are the first one, then an LSE: what `miss` returns beside its result.

    With `is_converted` the first one is not of the query's type.
    """
    if plan is None or _LOADED is None:
        return None
    first = _KINDS[outputs[0].dtype] if is_converted else OUTPUT
    made = [(tuple(tensor.shape), FLOAT if index else first) for index, tensor in enumerate(outputs)]
    sources = {**places, "output": count, "lse": count + 1}
    if plan.workspace_bytes:
        sources["workspace"] = count + len(made)
        made.append(((plan.workspace_bytes,), WORKSPACE))
    return plan.launch(sources, made, returns_tuple)
