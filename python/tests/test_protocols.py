"""Every attribute of the array protocols: what the library reads is what the array says, or it is refused by name.

numpy's arrays, `__array_interface__`, `__cuda_array_interface__` and both versions of DLPack. One table: what is given for q,
k, v or another argument, and the text of the error, or None where the result must be that of plain arrays.
"""

import ctypes

import numpy as np
import pytest

import flashcore
from flashcore import _arrays

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
SHAPE = (1, 2, 8, 64)
PLAIN = {name: np.random.default_rng(3).standard_normal((3, *SHAPE)).astype("f4")[index] for index, name in enumerate("qkv")}
RESULT = flashcore.attention(*PLAIN.values())
Q = PLAIN["q"]


class Interface:
    """An object with nothing but `__array_interface__`."""

    def __init__(self, array, **changes):
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


class CudaInterface:
    """An object with nothing but `__cuda_array_interface__`, at an address of the host."""

    def __init__(self, **changes):
        self.__cuda_array_interface__ = {
            "shape": SHAPE, "typestr": "<f4", "data": (Q.ctypes.data, False), "version": 3, **changes
        }  # fmt: skip


class Exported:
    """An object with nothing but DLPack: one tensor whose fields are given."""

    def __init__(self, array=Q, version=None, flags=0, kind=1, said=None, lanes=1, code=2, bits=32, offset=0, strides=True, capsule=None):
        self.kept, self.said, self.capsule = array, kind if said is None else said, capsule
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides))
        managed = _arrays._DLManagedTensorVersioned()
        managed.major, managed.minor = version or (0, 0)
        managed.flags, tensor = flags, managed.tensor
        tensor.data, tensor.byte_offset, tensor.ndim = array.ctypes.data - offset, offset, array.ndim
        tensor.device.type, tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = kind, code, bits, lanes
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        if strides:
            tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        self.managed, self.is_versioned = managed, version is not None
        self.asked = None

    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked = max_version
        if self.capsule is not None:
            return self.capsule
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        if self.is_versioned:
            return new(ctypes.addressof(self.managed), b"dltensor_versioned", None)
        return new(ctypes.addressof(self.managed.tensor), b"dltensor", None)

    def __dlpack_device__(self):
        return (self.said, 0)


class Immutable(Exported):
    """As arrays of JAX are: a capsule that says nothing of writing."""

    __module__ = "jaxlib._jax"


class Refusing(Exported):
    def __dlpack__(self, **options):
        raise BufferError("the producer says no")


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def unaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def packed_field(array):
    """A field of a packed structure, 5 bytes from one to the next."""
    structure = np.zeros(array.shape, np.dtype([("x", "f4"), ("y", "u1")]))
    structure["x"] = array
    return structure["x"]


def spread(array, steps=2):
    """The same values with other elements between the rows."""
    wide = np.full((*array.shape[:2], array.shape[2] * steps, array.shape[3]), np.nan, array.dtype)
    wide[:, :, ::steps] = array
    return wide[:, :, ::steps]


def apart(array):
    """The same values, the columns of a row 8 elements apart."""
    return array.swapaxes(2, 3).copy().swapaxes(2, 3)


OUT = np.empty(SHAPE, "f4")
CASES = {
    "foreign order": ({"q": Q.astype(">f4")}, r"q is float32 with the bytes in foreign order \(>f4\); call q.astype\("),
    "foreign order of k in f2": ({"k": Q.astype(">f2")}, "k is float16 with the bytes in foreign order"),
    "foreign order of lengths": ({"seqused_k": np.ones(1, ">i4")}, r"seqused_k is int32 with the bytes in foreign order \(>i4\)"),
    "foreign order of slopes": ({"alibi_slopes": np.ones(2, ">f4")}, "alibi_slopes is float32 with the bytes in foreign order"),
    "foreign order of out": ({"out": np.empty(SHAPE, ">f4")}, "out is float32 with the bytes in foreign order"),
    "foreign order, interface": ({"q": Interface(Q.astype(">f4"))}, "q is float32 with the bytes in foreign order"),
    "native order by name": ({"q": Q.astype("=f4")}, None),
    "bool": ({"q": Q > 0}, "q is bool; it must be float16, bfloat16, float32"),
    "complex": ({"q": Q.astype("c8")}, "q is complex64; it must be float16"),
    "real part": ({"q": (Q + 1j * Q).astype("c8").real}, None),
    "columns apart": ({name: apart(x) for name, x in PLAIN.items()}, None),
    "columns apart, interface": ({"v": Interface(apart(PLAIN["v"]))}, None),
    "columns apart, out": ({"out": apart(OUT)}, "the columns of out are 8 elements apart; they must be adjacent"),
    "longdouble": ({"q": Q.astype("g")}, "q is (float128|longdouble|float96); it must be float16"),
    "object": ({"q": Q.astype(object)}, "q is object; it must be float16"),
    "dates": ({"q": np.zeros(SHAPE, "M8[s]")}, "q is datetime64"),
    "text": ({"q": np.zeros(SHAPE, "U1")}, "q is str32"),
    "no bytes": ({"q": np.zeros(SHAPE, [])}, "q is void"),
    "structured": ({"q": np.zeros(SHAPE, [("x", "f4")])}, "q is void32; it must be float16"),
    "FP8 of another kind": ({name: x.astype(ml_dtypes.float8_e4m3) for name, x in PLAIN.items()}, "q is float8_e4m3; it must be"),
    "masked": ({"k": np.ma.masked_less(Q, 0)}, r"k is a masked array, whose mask would be ignored; call k.filled\(0\)"),
    "masked, nothing hidden": ({"k": np.ma.masked_array(PLAIN["k"])}, None),
    "zero-dimensional": ({"q": np.float32(1)}, r"q has shape \(\); it must be \[batch, rows, heads, head_dim\]"),
    "zero-dimensional, all": ({"q": np.ones(()), "k": np.ones(()), "v": np.ones(()), "return_lse": True}, r"q has shape \(\)"),
    "zero-dimensional slopes": ({"alibi_slopes": np.ones((), "f4")}, r"alibi_slopes has shape \(\); it must be \(2,\)"),
    "one dimension": ({"q": Q[0, 0, 0], "return_lse": True}, r"q has shape \(64,\); it must be \[batch"),
    "zero-dimensional v": ({"v": np.float32(1)}, r"v has shape \(\)"),
    "negative rows": ({"k": Q[:, :, ::-1]}, r"k has strides \(.*-64.*\); they must not be negative: copy it"),
    "negative columns": ({"q": Q[..., ::-1].copy()[..., ::-1]}, None),
    "negative out": ({"out": np.empty(SHAPE, "f4")[:, :, ::-1]}, "out has strides .* they must not be negative"),
    "negative slopes": ({"alibi_slopes": np.ones(2, "f4")[::-1]}, "the entries of alibi_slopes are -1 elements apart"),
    "negative bias": ({"bias": np.zeros((1, 1, 8, 8), "f4")[:, :, ::-1]}, "bias has strides .*; they must not be negative"),
    "strides between elements": ({"k": packed_field(Q)}, "k has strides .* in bytes; they must be multiples of 4: copy it"),
    "unaligned": ({"q": unaligned(Q)}, r"q is 0x[0-9a-f]+; it must be a multiple of 4"),
    "read-only input": ({name: read_only(x) for name, x in PLAIN.items()}, None),
    "read-only out": ({"out": read_only(OUT)}, "out is read-only; give an array that may be written"),
    "read-only out, interface": ({"out": Interface(read_only(OUT))}, "out is read-only"),
    "broadcast out": ({"out": np.broadcast_to(np.empty((1, 1, 8, 64), "f4"), SHAPE)}, "out is read-only"),
    "overlapping out": ({"out": np.lib.stride_tricks.as_strided(np.empty((1, 2, 8, 64), "f4"), SHAPE, (0, 0, 256, 4))}, "the output strides .* let elements .* overlap"),
    "out is q": ({"q": Q.copy(), "out": "q"}, "overlap"),
    "interface": ({"q": Interface(Q)}, None),
    "interface with strides": ({"q": Interface(spread(Q), strides=spread(Q).strides)}, None),
    "interface without a type": ({"q": Interface(Q, typestr="?!")}, "q has an __array_interface__ that numpy refuses"),
    "half the range of uint32": ({"seqused_k": np.full(1, -5, "i4")}, r"the key length of batch 0 is -5 \(4294967291 without its sign\)"),
    "CUDA, foreign order": ({"q": CudaInterface(typestr=">f4")}, r"q has the bytes of its elements in foreign order \(>f4\); swap them"),
    "CUDA, mask": ({"q": CudaInterface(mask=CudaInterface())}, "q has a mask, which would be ignored"),
    "CUDA, strides between elements": ({"q": CudaInterface(strides=(0, 0, 258, 5))}, "q has strides .* in bytes; they must be multiples of 4"),
    "CUDA, incomplete": ({"q": CudaInterface(data=None)}, "q has an incomplete __cuda_array_interface__"),
    "CUDA, no type": ({"q": CudaInterface(typestr="f")}, "q has an incomplete __cuda_array_interface__"),
    "CUDA, read-only out": ({"out": CudaInterface(data=(Q.ctypes.data, True))}, "out is read-only"),
    "CUDA, no address of a GPU": ({"q": CudaInterface()}, "q is (on a GPU and there is no driver|at 0x.*, which is no address of a GPU)"),
    "DLPack 0": ({"q": Exported()}, None),
    "DLPack 1": ({"q": Exported(version=(1, 0))}, None),
    "DLPack 1.9": ({"q": Exported(version=(1, 9))}, None),
    "DLPack 2": ({"q": Exported(version=(2, 0))}, "q is of DLPack 2.0; it must be of 1 or older"),
    "DLPack, read-only input": ({"q": Exported(version=(1, 0), flags=1)}, None),
    "DLPack, read-only out": ({"out": Exported(OUT, version=(1, 0), flags=1)}, "out is read-only"),
    "DLPack, copied input": ({"q": Exported(version=(1, 0), flags=2)}, None),
    "DLPack, copied out": ({"out": Exported(OUT, version=(1, 0), flags=2)}, "out was copied for its export by DLPack"),
    "JAX": ({"q": Immutable()}, None),
    "JAX, out": ({"out": Immutable(OUT)}, "out is a JAX array, which is immutable; give one of numpy, or on a GPU of torch or CuPy"),
    "DLPack, byte offset": ({"q": Exported(offset=32), "k": Exported(PLAIN["k"], version=(1, 0), offset=8)}, None),
    "DLPack, no strides": ({"q": Exported(strides=False)}, None),
    "DLPack, strides": ({"q": Exported(spread(Q))}, None),
    "DLPack, columns apart": ({"k": Exported(apart(PLAIN["k"])), "v": Exported(apart(PLAIN["v"]), version=(1, 0))}, None),
    "DLPack, negative strides": ({"q": Exported(Q[:, :, ::-1])}, "q has strides .*; they must not be negative"),
    "DLPack, lanes": ({"q": Exported(lanes=4, bits=8)}, "q is DLPack type 2 of 8 bits, 4 lanes; it must be float16"),
    "DLPack, lanes of f32": ({"q": Exported(lanes=2)}, "q is DLPack type 2 of 32 bits, 2 lanes"),
    "DLPack, complex": ({"q": Exported(code=5, bits=64)}, "q is complex64; it must be"),
    "DLPack, bool": ({"q": Exported(code=6, bits=8)}, "q is bool; it must be"),
    "DLPack, FP8 of another kind": ({"q": Exported(code=8, bits=8)}, "q is DLPack type 8 of 8 bits, 1 lanes"),
    "DLPack, 4 bits": ({"q": Exported(code=17, bits=4)}, "q is DLPack type 17 of 4 bits"),
    "DLPack, pinned memory": ({"q": Exported(kind=3)}, None),
    "DLPack, Vulkan": ({"q": Exported(kind=7)}, "q is on a DLPack device of type 7; it must be on the CPU or an NVIDIA GPU"),
    "DLPack, ROCm": ({"q": Exported(kind=10)}, "q is on a DLPack device of type 10"),
    "DLPack, two devices": ({"q": Exported(kind=2, said=1)}, r"q is on a DLPack device of type 2 in its capsule and 1 in __dlpack_device__\(\)"),
    "DLPack, a GPU beside arrays": ({"k": Exported(kind=2)}, "k is on cuda:0 and q on cpu; move them to one device"),
    "DLPack, no capsule": ({"q": Exported(capsule=7)}, r"q.__dlpack__\(\) returned no capsule of a tensor, or one that was consumed before"),
    "DLPack, refused": ({"q": Refusing()}, "q cannot be exported by DLPack: the producer says no"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_an_attribute(name):
    change, message = CASES[name]
    arguments = {**PLAIN, **change}
    if isinstance(arguments.get("out"), str):
        arguments["out"] = arguments[arguments["out"]]
    if message is None:
        assert np.array_equal(flashcore.attention(**arguments), RESULT)
        return
    before = OUT.copy()
    with pytest.raises(flashcore.InvalidArgument, match=message):
        flashcore.attention(**arguments)
    assert np.array_equal(OUT, before, equal_nan=True), "nothing is written"


def test_tables_of_pages_with_strides():
    q, pages = np.zeros((2, 1, 2, 64), "f4"), np.zeros((4, 8, 2, 64), "f4")
    used, table = np.full(2, 12, "i4"), np.arange(8, dtype="i4").reshape(4, 2) % 4
    call = lambda table: flashcore.attention(q, pages, pages, layout="bshd", seqused_k=used, page_table=table)  # noqa: E731
    call(table[::2])
    for wrong, message in (
        (table[:2][::-1], "page_table has strides .*; they must not be negative"),
        (table[:2, ::-1], "the entries of page_table are -1 elements apart"),
        (np.broadcast_to(table[:1], (2, 2)), "the rows of page_table are 0 entries apart and have 2; make it contiguous"),
    ):
        with pytest.raises(flashcore.InvalidArgument, match=message):
            call(wrong)


def test_dlpack_versions_are_asked_for():
    """The newest version first, so that flags are seen; producers of before do not know the argument."""
    exported = Exported()
    flashcore.attention(exported, Q, Q)
    assert exported.asked == (1, 0)

    class Old(Exported):
        def __dlpack__(self, stream=None):
            return Exported.__dlpack__(self)

    assert np.array_equal(flashcore.attention(Old(), PLAIN["k"], PLAIN["v"]), RESULT)


def test_rows_of_no_sequence_are_cleared_by_every_protocol():
    packed = np.ones((8, 2, 64), "f4")
    ends = np.array([0, 5], "i4")
    for wrap in (lambda out: out, Interface, lambda out: Exported(out)):
        out = np.full((8, 2, 64), np.nan, "f4")
        flashcore.attention(packed, packed, packed, cu_seqlens_q=ends, cu_seqlens_k=ends, out=wrap(out))
        assert (out[:5] == 1).all() and (out[5:] == 0).all()


def test_a_stream_of_another_is_waited_for(monkeypatch):
    """`__cuda_array_interface__` names the stream that fills an array: unless it is that of the call, it is waited for."""
    waited = []
    monkeypatch.setattr(_arrays, "_ordinal", lambda name, address: 0)
    monkeypatch.setattr(_arrays, "wait_for_gpu", waited.append)
    for given, stream, is_waited in ((None, 0, False), (1, 0, False), (77, 77, False), (2, 0, True), (77, 0, True), (1, 77, True)):
        waited.clear()
        _arrays.view("q", CudaInterface(stream=given), stream)
        assert waited == ([0] if is_waited else []), (given, stream)


def test_torch_tensors_beside_arrays():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    k = torch.from_numpy(PLAIN["k"])
    assert np.array_equal(flashcore.attention(Q, k, PLAIN["v"]), RESULT)
    negative = torch.complex(torch.zeros(SHAPE), -k).conj().imag
    assert negative.is_neg()
    with pytest.raises(flashcore.InvalidArgument, match="k is a negative view|the columns of k are 2 elements apart"):
        flashcore.attention(Q, negative, PLAIN["v"])
    with pytest.raises(flashcore.InvalidArgument, match="k cannot be exported by DLPack: .*detach"):
        flashcore.attention(Q, k.clone().requires_grad_(), PLAIN["v"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_bias_is_broadcast_and_converted(dtype):
    bias = np.random.default_rng(5).standard_normal((1, 2, 8, 8)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    call = lambda bias: flashcore.attention(*PLAIN.values(), bias=bias)  # noqa: E731
    for given, whole in (
        (bias, bias),
        (bias[0], bias),
        (bias[0, 1], np.broadcast_to(bias[:, 1:], bias.shape)),
        (bias[0, 1, 3], np.broadcast_to(bias[:, 1:, 3:4], bias.shape)),
        (bias[0, :, :1], np.broadcast_to(bias[:, :, :1], bias.shape)),
    ):
        assert np.array_equal(call(given), call(np.ascontiguousarray(whole.astype("f4"))))
    with pytest.raises(flashcore.InvalidArgument, match="bias is bool, a mask; pass numbers that are added"):
        call(bias > 0)
    with pytest.raises(flashcore.InvalidArgument, match="bias is float64; it must be float32, or float16 or bfloat16"):
        call(bias.astype("f8"))
    with pytest.raises(flashcore.InvalidArgument, match=r"bias has shape \(1, 1, 2, 8, 8\)"):
        call(bias[None])
