"""Arrays of other libraries: numpy, `__cuda_array_interface__` (CuPy, Numba) and DLPack (JAX and others).

A view has the address and the description of an array, and keeps alive what the address needs.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, NamedTuple, Optional, Tuple

from . import _library as lib
from ._errors import InvalidArgument
from ._plans import wait_for_gpu
from ._resolve import Tensor, has_adjacent_columns

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
    (1, 8): "uint8",
    (6, 8): "bool",
    (5, 64): "complex64",
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


def view(name: str, array: Any, stream: int = 0, is_written: bool = False) -> View:
    """The view of any array; of one that `is_written`, a read-only one or a copy is refused."""
    if is_written and type(array).__module__.split(".")[0] in ("jax", "jaxlib"):
        # Its capsules do not say so.
        raise InvalidArgument(f"{name} is a JAX array, which is immutable; give one of numpy, or on a GPU of torch or CuPy")
    if hasattr(array, "__array_interface__"):
        return _of_numpy(name, array, is_written)
    if hasattr(array, "__cuda_array_interface__"):
        return _of_cuda_array(name, array, stream, is_written)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(name, array, stream, is_written)
    raise InvalidArgument(
        f"{name} is a {type(array).__name__}; it must be a numpy array, a torch tensor, or have __dlpack__ or "
        "__cuda_array_interface__"
    )


def _of_numpy(name: str, array: Any, is_written: bool) -> View:
    import numpy

    if not isinstance(array, numpy.ndarray):
        try:
            array = numpy.asarray(array)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{name} has an __array_interface__ that numpy refuses: {error}") from error
    if isinstance(array, numpy.ma.MaskedArray) and numpy.ma.is_masked(array):
        raise InvalidArgument(f"{name} is a masked array, whose mask would be ignored; call {name}.filled(0)")
    if not array.dtype.isnative:
        raise InvalidArgument(
            f"{name} is {array.dtype.name} with the bytes in foreign order ({array.dtype.str}); call "
            f'{name}.astype({name}.dtype.newbyteorder("="))'
        )
    if is_written and not array.flags.writeable:
        raise _read_only(name)
    strides = _elements(name, array.strides, array.itemsize)
    address = array.__array_interface__["data"][0]
    return View(address, Tensor(array.shape, strides, code_of(array.dtype.name), (lib.CPU, 0)), array)


def _read_only(name: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is read-only; give an array that may be written")


def _elements(name: str, strides: "Tuple[int, ...]", item: int) -> "Tuple[int, ...]":
    """Strides in elements, of those in bytes."""
    if any(stride % max(item, 1) for stride in strides):
        raise InvalidArgument(f"{name} has strides {strides} in bytes; they must be multiples of {item}: copy it")
    return tuple(stride // max(item, 1) for stride in strides)


def _contiguous(shape: "Tuple[int, ...]") -> "Tuple[int, ...]":
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


contiguous_strides = _contiguous


def _of_cuda_array(name: str, array: Any, stream: int, is_written: bool) -> View:
    interface = array.__cuda_array_interface__
    try:
        shape, typestr = tuple(interface["shape"]), str(interface["typestr"])
        (address, is_read_only), item = interface["data"], int(typestr[2:])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} has an incomplete __cuda_array_interface__: {error!r}") from error
    if interface.get("mask") is not None:
        raise InvalidArgument(f"{name} has a mask, which would be ignored; fill what it hides and leave the mask out")
    if typestr[0] not in "<|=":
        raise InvalidArgument(f"{name} has the bytes of its elements in foreign order ({typestr}); swap them")
    if is_written and is_read_only:
        raise _read_only(name)
    strides = interface.get("strides")
    type_name = _TYPE_STRINGS.get(typestr, str(getattr(array, "dtype", typestr)))
    steps = _contiguous(shape) if strides is None else _elements(name, tuple(strides), item)
    ordinal = _ordinal(name, address or 0)
    if address and interface.get("stream") not in (None, stream or 1):
        wait_for_gpu(ordinal)  # what fills the array was enqueued on another stream
    return View(address or 0, Tensor(shape, steps, code_of(type_name), (lib.CUDA, ordinal)), array)


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


class _DLManagedTensorVersioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, c_char_p]
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_MANAGED = 1, 2, 3, 13
_DL_READ_ONLY, _DL_IS_COPIED = 1, 2


def _capsule(name: str, array: Any, options: "Dict[str, Any]") -> Any:
    """The capsule of an array, of DLPack 1 if it knows that, else of the version before."""
    try:
        try:
            return array.__dlpack__(**options, max_version=(1, 0))
        except TypeError:
            return array.__dlpack__(**options)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} cannot be exported by DLPack: {error}") from error


def _of_dlpack(name: str, array: Any, stream: int, is_written: bool) -> View:
    if is_torch(array) and array.is_neg():
        raise InvalidArgument(f"{name} is a negative view; call {name}.resolve_neg()")
    said = int(array.__dlpack_device__()[0]) if hasattr(array, "__dlpack_device__") else _DL_CPU
    # 1 is CUDA's default stream in DLPack. The capsule is never consumed: it frees the tensor when it goes.
    capsule = _capsule(name, array, {"stream": stream or 1} if said in (_DL_CUDA, _DL_MANAGED) else {})
    flags = 0
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = ctypes.cast(_get_pointer(capsule, b"dltensor_versioned"), POINTER(_DLManagedTensorVersioned)).contents
        if versioned.major != 1:
            raise InvalidArgument(f"{name} is of DLPack {versioned.major}.{versioned.minor}; it must be of 1 or older")
        tensor, flags = versioned.tensor, versioned.flags
    elif _is_valid(capsule, b"dltensor"):
        tensor = ctypes.cast(_get_pointer(capsule, b"dltensor"), POINTER(_DLTensor)).contents
    else:
        raise InvalidArgument(f"{name}.__dlpack__() returned no capsule of a tensor, or one that was consumed before")
    kind = tensor.device.type
    if kind not in (_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_MANAGED) or kind != said:
        found = f"{kind}" if kind == said else f"{kind} in its capsule and {said} in __dlpack_device__()"
        raise InvalidArgument(f"{name} is on a DLPack device of type {found}; it must be on the CPU or an NVIDIA GPU")
    if is_written and flags & _DL_READ_ONLY:
        raise _read_only(name)
    if is_written and flags & _DL_IS_COPIED:
        raise InvalidArgument(f"{name} was copied for its export by DLPack, so that the result would be lost")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _contiguous(shape)
    dtype = tensor.dtype
    type_name = _DLPACK_NAMES.get((dtype.code, dtype.bits)) if dtype.lanes == 1 else None
    if type_name is None:
        type_name = f"DLPack type {dtype.code} of {dtype.bits} bits, {dtype.lanes} lanes"
    device = (lib.CUDA, tensor.device.id) if kind in (_DL_CUDA, _DL_MANAGED) else (lib.CPU, 0)
    return View((tensor.data or 0) + tensor.byte_offset, Tensor(shape, strides, code_of(type_name), device), capsule)


def host_array(view: View) -> Any:
    """The numpy array of a view in the host's memory; the view must outlive it."""
    import numpy

    class Memory:
        __array_interface__ = {
            "version": 3, "shape": view.tensor.shape, "data": (view.address, False),
            "strides": tuple(stride * lib.ITEM_BYTES[view.tensor.dtype] for stride in view.tensor.strides),  # type: ignore[index]
            "typestr": f"|V{lib.ITEM_BYTES[view.tensor.dtype]}",  # type: ignore[index]
        }  # fmt: skip

    return numpy.asarray(Memory()).view(numpy_dtype(view.tensor.dtype))


def with_adjacent_columns(name: str, array: View) -> View:
    """The view, or one of a copy where the columns of a tensor in the host's memory are not adjacent."""
    tensor = array.tensor
    if tensor.device[0] != lib.CPU or tensor.dtype not in lib.ITEM_BYTES or has_adjacent_columns(tensor):
        return array
    return view(name, host_array(array).copy(order="C"))


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
