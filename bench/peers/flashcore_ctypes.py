"""The C library of flashcore through ctypes: just enough to plan a problem and run it on PyTorch's tensors."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

DTYPES = {"f16": 1, "bf16": 2, "f32": 3, "f64": 4}
DTYPE_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
MASK_NONE, MASK_CAUSAL, MASK_WINDOW = 0, 1, 2
ALIGNMENT_BOTTOM_RIGHT = 1
DEVICE_CPU, DEVICE_CUDA = 0, 1
QUERY, KEY, VALUE, OUTPUT = 1, 2, 3, 4


class Strides(ctypes.Structure):
    _fields_ = [("batch", c_uint64), ("head", c_uint64), ("row", c_uint64)]


class Problem(ctypes.Structure):
    """`flashcore_attention_problem_t`."""

    _fields_ = (
        [("operation", c_int32), ("struct_size", c_uint32)]
        + [(name, c_uint64) for name in ("batch", "query_heads", "key_heads", "query_length", "key_length")]
        + [("head_dim", c_uint64), ("value_dim", c_uint64), ("scale", c_double)]
        + [(name, c_int32) for name in ("dtype", "kv_dtype", "out_dtype", "layout", "mask", "alignment")]
        + [("window_left", c_int64), ("window_right", c_int64), ("softcap", c_float)]
        + [(name, c_int32) for name in ("alibi", "sinks", "bias", "lse", "lse_base", "lse_without_sink")]
        + [(name, c_int32) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")]
        + [(name, c_int32) for name in ("kv_batch_idx", "page_table", "q_scale", "k_scale", "v_scale")]
        + [(name, c_uint64) for name in ("total_q", "total_k", "kv_batch", "page_size", "num_pages")]
        + [("table_width", c_uint64), ("table_stride", c_uint64)]
        + [(f"{name}_strides", Strides) for name in ("query", "key", "value", "output")]
        + [("score_mod", c_char_p), ("mask_mod", c_char_p), ("aux_f32", c_uint64), ("aux_i32", c_uint64)]
    )


class Tensor(ctypes.Structure):
    """`flashcore_tensor_t`."""

    _fields_ = [
        ("operand", c_int32),
        ("dtype", c_int32),
        ("data", c_void_p),
        ("bytes", c_uint64),
        ("strides", c_uint64 * 5),
    ]


class Flashcore:
    """The loaded library."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        declare = {
            "flashcore_version": (c_char_p, []),
            "flashcore_configs": (c_char_p, []),
            "flashcore_last_error": (c_char_p, []),
            "flashcore_attention_problem_init": (c_int32, [POINTER(Problem)] + [c_uint64] * 4 + [c_int32]),
            "flashcore_plan_create": (c_int32, [POINTER(Problem), c_int32, c_int32, c_char_p, POINTER(c_void_p)]),
            "flashcore_run": (c_int32, [c_void_p, POINTER(Tensor), c_uint64]),
            "flashcore_launch": (c_int32, [c_void_p, c_void_p, POINTER(Tensor), c_uint64]),
            "flashcore_plan_describe": (c_char_p, [c_void_p]),
            "flashcore_plan_destroy": (c_int32, [c_void_p]),
        }
        for name, (result, arguments) in declare.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.library.flashcore_last_error().decode())

    def version(self):
        return self.library.flashcore_version().decode()

    def plan(self, query_shape, key_shape, dtype, causal=False, config=None, device=DEVICE_CUDA, window=None, alignment=None):
        """A plan on GPU 0, or on the CPU, for contiguous [batch, head, row, column] tensors.

        `window` is (left, right), None for no limit; a left of None with a right is a causal mask.
        """
        problem = Problem()
        batch, heads, length, dim = query_shape
        init = self.library.flashcore_attention_problem_init
        self.check(init(ctypes.byref(problem), batch, heads, length, dim, DTYPES[dtype]))
        problem.key_heads, problem.key_length = key_shape[1], key_shape[2]
        problem.alignment = ALIGNMENT_BOTTOM_RIGHT if alignment is None else alignment
        if causal:
            problem.mask = MASK_CAUSAL
        if window:
            left, right = window
            problem.mask = MASK_WINDOW if left is not None else MASK_CAUSAL
            problem.window_left, problem.window_right = (-1 if left is None else left), right
        handle = c_void_p()
        name = config.encode() if config else None
        create = self.library.flashcore_plan_create
        self.check(create(ctypes.byref(problem), device, 0, name, ctypes.byref(handle)))
        return Plan(self, handle, dtype, (query_shape, key_shape, key_shape, query_shape))


class Plan:
    """A planned problem."""

    def __init__(self, flashcore, handle, dtype, shapes):
        self.flashcore, self.handle, self.dtype = flashcore, handle, dtype
        self.sizes = [DTYPE_BYTES[dtype] * batch * heads * rows * columns for batch, heads, rows, columns in shapes]

    def tensors(self, addresses):
        """Query, key, value and output of a call."""
        number, operands = DTYPES[self.dtype], (QUERY, KEY, VALUE, OUTPUT)
        return (Tensor * 4)(*(Tensor(*tensor) for tensor in zip(operands, [number] * 4, addresses, self.sizes)))

    def launch(self, stream, *addresses):
        """Puts the kernel on a stream, given the `data_ptr()` of query, key, value and output."""
        status = self.flashcore.library.flashcore_launch(self.handle, stream, self.tensors(addresses), 4)
        self.flashcore.check(status)

    def host_call(self, *tensors):
        """A function that computes attention of PyTorch tensors in the host's memory, and keeps them and the plan."""
        given = self.tensors([tensor.data_ptr() for tensor in tensors])
        run, check, handle = self.flashcore.library.flashcore_run, self.flashcore.check, self.handle
        keep = self, tensors
        return lambda keep=keep: check(run(handle, given, 4))

    def describe(self):
        return self.flashcore.library.flashcore_plan_describe(self.handle).decode()

    def __del__(self):
        self.flashcore.library.flashcore_plan_destroy(self.handle)
