"""Kernels of `torch.ops.flashcore.*` by libtorch's plain C interface, so that the dispatcher does not come back to Python.

The interface (`aoti_torch_*`, torch 2.7 and later) is looked up by name in the libraries that torch has loaded: nothing of
torch is needed to build it. Where a name is missing, or `FLASHCORE_STABLE=0` says so, operators are implemented in Python.

A kernel of C can fail in one way, an exception of C++ with a text, which torch raises as a RuntimeError. The error that
Python made is kept beside it, and `translating` raises that.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from ctypes import c_char_p, c_int32, c_size_t, c_void_p, cast, py_object, pythonapi
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .. import _library as lib
from .._plans import CACHE
from . import _fast
from ._dispatch import is_transformed

_KEYS = (b"CPU", b"CUDA")
# Of a schema's argument: the letter that the kernel knows, and how Python reads its 64 bits.
_TYPES: "Dict[str, Tuple[bytes, str]]" = {
    "Tensor": (b"T", ""),
    "Optional[Tensor]": (b"t", ""),
    "int": (b"N", "q"),
    "Optional[int]": (b"n", "q"),
    "float": (b"N", "d"),
    "Optional[float]": (b"n", "d"),
    "bool": (b"b", "?xxxxxxx"),
    "Optional[ScalarType]": (b"n", "ixxxx"),
}
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_failed = threading.local()


class _Interface:
    """Addresses of both libraries, and the two functions between tensors of Python and handles of C."""

    def __init__(self) -> None:
        loaded = _fast._LOADED
        if loaded is None or os.environ.get("FLASHCORE_STABLE") == "0":
            raise OSError("not wanted")
        self.library, self.python = loaded
        folder = os.path.join(os.path.dirname(torch.__file__), "lib")
        # Only what torch has loaded: another copy would be another dispatcher.
        core = ctypes.CDLL(os.path.join(folder, "libtorch_cpu.so"), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        self.library.flashcore_python_torch_symbols.restype = c_char_p
        names = self.library.flashcore_python_torch_symbols().decode().split()
        addresses = [cast(getattr(core, name), c_void_p).value for name in names]
        self.torch = (c_size_t * len(addresses))(*addresses)
        self.dtypes = {getattr(core, f"aoti_torch_dtype_{name}")(): getattr(torch, name) for name in _DTYPES}
        self.stream = _address(os.path.join(folder, "libtorch_cuda.so"), "aoti_torch_get_current_cuda_stream")
        self.is_capturing = _address("libcuda.so.1", "cuStreamIsCapturing") if self.stream else 0
        # The function for one handle does not free it; this one does.
        self.from_handles = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
        self.to_handle = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor
        self.library.flashcore_python_kernel.restype = c_int32
        self.library.flashcore_python_kernel.argtypes = [c_void_p, c_size_t, c_void_p, c_size_t, py_object]
        self.library.flashcore_python_kernel_clear.restype = None
        self.library.flashcore_python_kernel_clear.argtypes = [c_int32]
        self.library.flashcore_python_kernel_count.restype = c_size_t
        self.library.flashcore_python_kernel_count.argtypes = [c_int32]
        self.new_capsule = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", pythonapi))
        self.pointer_of = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))

    def tensor(self, handle: int) -> torch.Tensor:
        """The tensor of a handle, which is given up."""
        return self.from_handles([self.new_capsule(handle, None, None)])[0]

    def handle(self, tensor: torch.Tensor) -> int:
        """A new handle of a tensor."""
        return self.pointer_of(self.to_handle(tensor), None)


def _address(file: str, name: str) -> int:
    """The address of a function of a library, 0 if there is none; it is loaded if it is the driver's alone."""
    try:
        mode = os.RTLD_LAZY if file.startswith("libcuda.so") else os.RTLD_NOLOAD | os.RTLD_LAZY
        return cast(getattr(ctypes.CDLL(file, mode=mode), name), c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


try:
    _INTERFACE: "Optional[_Interface]" = _Interface()
except (OSError, AttributeError):
    # Another platform, an older torch, or nobody wants it: operators are implemented in Python.
    _INTERFACE = None
_REGISTERED: "Dict[str, int]" = {}


def is_registered(name: str) -> bool:
    """True if the kernel of an operator is one of C."""
    return name in _REGISTERED


def launches(name: str) -> int:
    """Number of launches that the kernel of an operator knows."""
    return _INTERFACE.library.flashcore_python_kernel_count(_REGISTERED[name]) if _INTERFACE else 0


def _keep(error: Exception) -> bytes:
    """Keeps an error for `translating`, and returns its text."""
    _failed.error = error
    return str(error).replace("\0", " ").encode(errors="replace")


def _fail(status: int) -> bytes:
    return _keep(lib.error_of(status))


def register(namespace: str, name: str, schema: Any, miss: "Callable[..., Any]") -> bool:
    """Registers a kernel for an operator that is defined; false if it has to be implemented in Python."""
    # A type of elements is an integer but for its real type, and lengths of graphs are integers but for theirs.
    names = [(str(argument.type), str(argument.real_type)) for argument in schema.arguments]
    types = [_TYPES.get(real if "ScalarType" in real else name) for name, real in names]
    are_dtypes = ["ScalarType" in real for _, real in names]
    if _INTERFACE is None or None in types:
        return False
    interface, formats = _INTERFACE, [kind[1] for kind in types if kind]

    def missed(*numbers: int) -> "Tuple[Optional[Tuple[int, int]], Any, bytes]":
        """(handles of the results, launch, text): see crates/flashcore-python/src/kernel.rs."""
        arguments: "List[Any]" = []
        try:
            for form, is_dtype, is_given, number in zip(formats, are_dtypes, numbers[::2], numbers[1::2]):
                if not is_given:
                    arguments.append(None)
                elif form:
                    value = struct.unpack(form, struct.pack("q", number))[0]
                    arguments.append(interface.dtypes.get(value, value) if is_dtype else value)
                else:
                    arguments.append(interface.tensor(number))
            (out, lse), launch = miss(*arguments)
            return (interface.handle(out), interface.handle(lse)), launch, b""
        except Exception as error:
            return None, None, _keep(error)

    letters = b"".join(kind[0] for kind in types if kind)
    settings = (
        namespace.encode(), name.encode(), _KEYS, letters, False, interface.stream, interface.is_capturing, missed,
        _fail, "is_captured", True,
    )  # fmt: skip
    index = interface.library.flashcore_python_kernel(
        ctypes.addressof(interface.python), len(interface.python), ctypes.addressof(interface.torch), len(interface.torch),
        settings,
    )  # fmt: skip
    if index < 0:
        return False
    _REGISTERED[name] = index
    CACHE.on_eviction.append(lambda: interface.library.flashcore_python_kernel_clear(index))
    packet = getattr(getattr(torch.ops, namespace), name)
    for operator in (packet, packet.default):
        operator._op = translating(operator._op)
        # torch.jit.script knows functions by their identity.
        torch.jit._builtins._register_builtin(operator._op, f"{namespace}::{name}")
    return True


_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
try:
    _below_autograd, _function_modes = torch._C._AutoDispatchBelowAutograd, torch._C._len_torch_function_stack
    _requires_grad = torch._C._any_requires_grad
    _HAS_SHORTCUT = True
except AttributeError:  # another torch: autograd's step is taken in every call
    _HAS_SHORTCUT = False


def translating(operator: "Callable[..., Any]") -> "Callable[..., Any]":
    """The function of an operator, which raises the error that its kernel met.

    Autograd's step is one of Python, and is left out where no tensor requires grad, has a tangent or is transformed.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            if not _HAS_SHORTCUT or _is_inference() or _function_modes() or is_transformed():
                return operator(*arguments, **options)
            if _is_grad_enabled() and _requires_grad(*arguments, **options):
                return operator(*arguments, **options)
            with _below_autograd():
                return operator(*arguments, **options)
        except RuntimeError as error:
            found, _failed.error = getattr(_failed, "error", None), None
            if found is None or str(found).split("\0")[0] not in str(error):
                raise
            raised = found
        raise raised

    return call
