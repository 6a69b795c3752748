"""The C library of flashcore through ctypes: just enough to plan a problem and run it on PyTorch's tensors."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p

DTYPES = {"f16": 0, "bf16": 1, "f32": 2, "f64": 3}
MASK_NONE, MASK_CAUSAL = 0, 1
ALIGNMENT_BOTTOM_RIGHT = 1
DEVICE_CPU, DEVICE_CUDA = 0, 1


class Strides(ctypes.Structure):
    _fields_ = [("batch", c_uint64), ("head", c_uint64), ("row", c_uint64)]


class Problem(ctypes.Structure):
    """`flashcore_problem_t`; the library takes a shorter struct as if zeros followed."""

    _fields_ = [
        ("struct_size", c_uint64),
        ("batch", c_uint64),
        ("query_heads", c_uint64),
        ("key_heads", c_uint64),
        ("query_length", c_uint64),
        ("key_length", c_uint64),
        ("head_dim", c_uint64),
        ("value_dim", c_uint64),
        ("scale", c_double),
        ("dtype", c_int32),
        ("mask", c_int32),
        ("alignment", c_int32),
        ("layout", c_int32),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("softcap", c_float),
        ("alibi", c_int32),
        ("sinks", c_int32),
        ("bias", c_int32),
        ("seqused_k", c_int32),
        ("lse", c_int32),
        ("reserved", c_int64),
        ("query_strides", Strides),
        ("key_strides", Strides),
        ("value_strides", Strides),
        ("output_strides", Strides),
    ]


class Bytes(ctypes.Structure):
    """`flashcore_bytes_t` and `flashcore_mut_bytes_t`; null and 0 for a tensor that there is not."""

    _fields_ = [("data", c_void_p), ("bytes", c_uint64)]


class Inputs(ctypes.Structure):
    """`flashcore_inputs_t`."""

    _fields_ = [
        ("struct_size", c_uint64),
        ("query", Bytes),
        ("key", Bytes),
        ("value", Bytes),
        ("alibi_slopes", Bytes),
        ("sinks", Bytes),
        ("bias", Bytes),
        ("bias_strides", c_uint64 * 4),
        ("seqused_k", Bytes),
        ("aux_f32", Bytes),
        ("aux_i32", Bytes),
    ]


class Outputs(ctypes.Structure):
    """`flashcore_outputs_t`."""

    _fields_ = [("struct_size", c_uint64), ("output", Bytes), ("lse", Bytes)]


class Flashcore:
    """The loaded library."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        declare = {
            "flashcore_version": (c_char_p, []),
            "flashcore_configs": (c_char_p, []),
            "flashcore_last_error": (c_char_p, []),
            "flashcore_problem_init": (c_int32, [POINTER(Problem)] + [c_uint64] * 4 + [c_int32]),
            "flashcore_plan_create_with_config": (
                c_int32,
                [POINTER(Problem), c_int32, c_int32, c_char_p, POINTER(c_void_p)],
            ),
            "flashcore_plan_launch": (c_int32, [c_void_p] * 7),
            "flashcore_plan_run_host": (c_int32, [c_void_p, POINTER(Inputs), POINTER(Outputs)]),
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

    def plan(self, query_shape, key_shape, dtype, causal, config=None, device=DEVICE_CUDA):
        """A plan on GPU 0, or on the CPU, for contiguous [batch, head, row, column] tensors."""
        problem = Problem()
        batch, heads, length, dim = query_shape
        self.check(
            self.library.flashcore_problem_init(ctypes.byref(problem), batch, heads, length, dim, DTYPES[dtype])
        )
        problem.key_heads, problem.key_length = key_shape[1], key_shape[2]
        if causal:
            problem.mask, problem.alignment = MASK_CAUSAL, ALIGNMENT_BOTTOM_RIGHT
        handle = c_void_p()
        name = config.encode() if config else None
        self.check(
            self.library.flashcore_plan_create_with_config(
                ctypes.byref(problem), device, 0, name, ctypes.byref(handle)
            )
        )
        return Plan(self, handle)


class Plan:
    """A planned problem."""

    def __init__(self, flashcore, handle):
        self.flashcore, self.handle = flashcore, handle

    def launch(self, stream, query, key, value, output):
        """Puts the kernel on a stream, given the tensors' `data_ptr()`."""
        status = self.flashcore.library.flashcore_plan_launch(self.handle, stream, query, key, value, output, None)
        self.flashcore.check(status)

    def host_call(self, query, key, value, output):
        """A function that computes attention of PyTorch tensors in the host's memory, and keeps them and the plan."""

        def view(tensor):
            return Bytes(tensor.data_ptr(), tensor.numel() * tensor.element_size())

        inputs = Inputs(ctypes.sizeof(Inputs), view(query), view(key), view(value))
        outputs = Outputs(ctypes.sizeof(Outputs), view(output))
        run, check = self.flashcore.library.flashcore_plan_run_host, self.flashcore.check
        arguments = self.handle, ctypes.byref(inputs), ctypes.byref(outputs)
        keep = self, query, key, value, output
        return lambda keep=keep: check(run(*arguments))

    def describe(self):
        return self.flashcore.library.flashcore_plan_describe(self.handle).decode()

    def __del__(self):
        self.flashcore.library.flashcore_plan_destroy(self.handle)
