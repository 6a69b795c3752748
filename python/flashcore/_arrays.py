"""Arrays of other libraries: numpy, `__cuda_array_interface__` (CuPy, Numba) and DLPack (JAX and others).

A view has the address and the description of an array, and keeps alive what the address needs.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any, NamedTuple, Optional, Tuple

from . import _library as lib
from ._errors import InvalidArgument
from ._resolve import Tensor

_NUMPY_NAMES = {
    "float16": lib.F16,
    "bfloat16": lib.BF16,
    "float32": lib.F32,
    "float64": lib.F64,
    "float8_e4m3fn": lib.E4M3,
    "float8_e5m2": lib.E5M2,
    # Lengths are not negative, so that both have the same bits.
    "int32": "int32",
    "uint32": "int32",
    "int64": "int64",
}
_TYPE_STRINGS = {"<f2": "float16", "<f4": "float32", "<f8": "float64", "<i4": "int32", "<u4": "uint32", "<i8": "int64"}
_DLPACK_NAMES = {
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (0, 32): "int32",
    (1, 32): "uint32",
    (0, 64): "int64",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}


class View(NamedTuple):
    """An array: its address, its description, and what keeps the address alive."""

    address: int
    tensor: Tensor
    owner: Any


def code_of(name: str) -> object:
    """Element type of the library, or the name itself where there is none."""
    return _NUMPY_NAMES.get(name, name)


def is_numpy(array: Any) -> bool:
    """True for numpy arrays and what shares their memory interface."""
    return hasattr(array, "__array_interface__") and hasattr(array, "strides")


def view(name: str, array: Any, stream: int = 0) -> View:
    """The view of any array."""
    if is_numpy(array):
        item = array.itemsize
        address = array.__array_interface__["data"][0]
        if any(stride % item for stride in array.strides):
            raise InvalidArgument(f"{name} has strides {array.strides} in bytes; they must be multiples of {item}: copy it")
        strides = tuple(stride // item for stride in array.strides)
        return View(address, Tensor(array.shape, strides, code_of(array.dtype.name), (lib.CPU, 0)), array)
    if hasattr(array, "__cuda_array_interface__"):
        return _of_cuda_array(name, array)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(name, array, stream)
    raise InvalidArgument(
        f"{name} is a {type(array).__name__}; it must be a numpy array, a torch tensor, or have __dlpack__ or "
        "__cuda_array_interface__"
    )


def _contiguous(shape: "Tuple[int, ...]") -> "Tuple[int, ...]":
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


contiguous_strides = _contiguous


def _of_cuda_array(name: str, array: Any) -> View:
    interface = array.__cuda_array_interface__
    typestr = interface["typestr"]
    item = int(typestr[2:])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    address = interface["data"][0] or 0
    type_name = _TYPE_STRINGS.get(typestr, str(getattr(array, "dtype", typestr)))
    steps = _contiguous(shape) if strides is None else tuple(stride // item for stride in strides)
    return View(address, Tensor(shape, steps, code_of(type_name), (lib.CUDA, _ordinal(name, address))), array)


def _ordinal(name: str, address: int) -> int:
    """The GPU of an address."""
    if not address:
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise InvalidArgument(f"{name} is on a GPU and there is no driver: {error}") from error
    ordinal = ctypes.c_int(-1)
    driver.cuPointerGetAttribute.argtypes = [c_void_p, ctypes.c_int, c_uint64]
    device_ordinal = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    if driver.cuPointerGetAttribute(ctypes.byref(ordinal), device_ordinal, address):
        raise InvalidArgument(f"{name} is at {address:#x}, which is no address of a GPU")
    return ordinal.value


class _DLDevice(Structure):
    _fields_ = [("type", c_int32), ("id", c_int32)]


class _DLDataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", _DLDevice),
        ("ndim", c_int32),
        ("dtype", _DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_MANAGED = 1, 2, 3, 13


def _of_dlpack(name: str, array: Any, stream: int) -> View:
    kind, ordinal = array.__dlpack_device__() if hasattr(array, "__dlpack_device__") else (_DL_CPU, 0)
    if kind not in (_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_MANAGED):
        raise InvalidArgument(f"{name} is on a DLPack device of type {int(kind)}; it must be on the CPU or an NVIDIA GPU")
    is_cuda = kind in (_DL_CUDA, _DL_MANAGED)
    # 1 is CUDA's default stream in DLPack. The capsule is never consumed: it frees the tensor when it goes.
    capsule = array.__dlpack__(stream=stream or 1) if is_cuda else array.__dlpack__()
    tensor = ctypes.cast(_get_pointer(capsule, b"dltensor"), POINTER(_DLTensor)).contents
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _contiguous(shape)
    dtype = tensor.dtype
    type_name = _DLPACK_NAMES.get((dtype.code, dtype.bits)) if dtype.lanes == 1 else None
    if type_name is None:
        type_name = f"DLPack type {dtype.code} of {dtype.bits} bits, {dtype.lanes} lanes"
    device = (lib.CUDA, int(ordinal)) if is_cuda else (lib.CPU, 0)
    return View((tensor.data or 0) + tensor.byte_offset, Tensor(shape, strides, code_of(type_name), device), capsule)


def empty(like: Any, shape: "Tuple[int, ...]", dtype: object, device: "Tuple[int, int]") -> Any:
    """A new array: numpy's on the host, CuPy's where `like` is one."""
    if device[0] == lib.CPU:
        import numpy

        return numpy.empty(shape, numpy_dtype(dtype))
    if type(like).__module__.split(".")[0] == "cupy":
        import cupy  # type: ignore[import-not-found]

        with cupy.cuda.Device(device[1]):
            return cupy.empty(shape, dtype="float32" if dtype == lib.F32 else like.dtype)
    raise InvalidArgument(
        f"the output of a {type(like).__name__} on a GPU cannot be allocated here; give out=, an array to write into"
    )


def numpy_dtype(dtype: object) -> Any:
    """The numpy type of an element type; bfloat16 is that of ml_dtypes."""
    import numpy

    if dtype == lib.BF16 or dtype in lib.FLOAT8:
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, lib.DTYPE_NAMES[dtype]))  # type: ignore[index]
    return numpy.dtype(lib.DTYPE_NAMES.get(dtype, str(dtype)))  # type: ignore[call-overload]


def is_torch(array: Any) -> bool:
    """True for torch tensors; torch is not imported for it."""
    return type(array).__module__.split(".")[0] == "torch" or _is_torch_subclass(array)


def _is_torch_subclass(array: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(array).__mro__)


def parse_device(device: "Optional[str]") -> "Optional[Tuple[int, int]]":
    """cpu, cuda or cuda:1."""
    if device is None:
        return None
    kind, _, ordinal = str(device).partition(":")
    if kind == "cpu":
        return (lib.CPU, 0)
    if kind == "cuda" and (ordinal.isdigit() or not ordinal):
        return (lib.CUDA, int(ordinal or 0))
    raise InvalidArgument(f"device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:0' and up")
