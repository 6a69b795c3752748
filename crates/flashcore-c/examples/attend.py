"""Attention from Python with nothing but ctypes: strides, a config by name, and what is told when something is wrong.

    cargo build --release -p flashcore-c
    python crates/flashcore-c/examples/attend.py target/release/libflashcore.so
"""

import array
import ctypes
import sys
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p, sizeof

DTYPE_F32, MASK_CAUSAL, LAYOUT_STRIDED = 2, 1, 3
DEVICE_CPU, DEVICE_CUDA = 0, 1


class Strides(Structure):
    _fields_ = [(name, c_uint64) for name in ("batch", "head", "row")]


class Problem(Structure):
    _fields_ = (
        [("struct_size", c_uint64)]
        + [(name, c_uint64) for name in ("batch", "query_heads", "key_heads", "query_length", "key_length")]
        + [("head_dim", c_uint64), ("value_dim", c_uint64), ("scale", c_double), ("dtype", c_int32)]
        + [(name, c_int32) for name in ("mask", "alignment", "layout")]
        + [("window_left", c_int64), ("window_right", c_int64)]
        + [("softcap", c_float)]
        + [(name, c_int32) for name in ("alibi", "sinks", "bias", "seqused_k", "lse")]
        + [("reserved", c_int64)]
        + [(f"{name}_strides", Strides) for name in ("query", "key", "value", "output")]
    )


class Bytes(Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_uint64)]

    @classmethod
    def of(cls, numbers):
        address, count = numbers.buffer_info()
        return cls(address, count * numbers.itemsize)


class Inputs(Structure):
    _fields_ = (
        [("struct_size", c_uint64)]
        + [(name, Bytes) for name in ("query", "key", "value", "alibi_slopes", "sinks", "bias")]
        + [("bias_strides", c_uint64 * 4), ("seqused_k", Bytes)]
    )


class Outputs(Structure):
    _fields_ = [("struct_size", c_uint64), ("output", Bytes), ("lse", Bytes)]


def load(path):
    library = ctypes.CDLL(path)
    for text in ("last_error", "version", "configs", "plan_describe"):
        getattr(library, f"flashcore_{text}").restype = c_char_p
    library.flashcore_problem_init.argtypes = [POINTER(Problem)] + [c_uint64] * 4 + [c_int32]
    library.flashcore_plan_create_with_config.argtypes = [POINTER(Problem), c_int32, c_int32, c_char_p, c_void_p]
    library.flashcore_plan_run_host.argtypes = [c_void_p, POINTER(Inputs), POINTER(Outputs)]
    library.flashcore_plan_describe.argtypes = library.flashcore_plan_destroy.argtypes = [c_void_p]
    return library


def main(path):
    library = load(path)

    def check(status):
        if status != 0:
            raise RuntimeError(library.flashcore_last_error().decode())

    def plan(problem, kind, config=None):
        handle = c_void_p()
        name = config and config.encode()
        check(library.flashcore_plan_create_with_config(byref(problem), kind, 0, name, byref(handle)))
        return handle

    # One batch, two heads, two rows of one column, [batch, row, head, column]: the strides of such a torch tensor are
    # `tensor.transpose(1, 2).stride()`.
    problem = Problem()
    check(library.flashcore_problem_init(byref(problem), 1, 2, 2, 1, DTYPE_F32))
    problem.mask, problem.layout = MASK_CAUSAL, LAYOUT_STRIDED
    for name in ("query", "key", "value", "output"):
        setattr(problem, f"{name}_strides", Strides(batch=4, head=1, row=2))
    handle = plan(problem, DEVICE_CPU)
    print(library.flashcore_version().decode(), library.flashcore_plan_describe(handle).decode())

    zeros, values, output = array.array("f", [0] * 4), array.array("f", [1, 2, 3, 4]), array.array("f", [0] * 4)
    inputs = Inputs(sizeof(Inputs), Bytes.of(zeros), Bytes.of(zeros), Bytes.of(values))
    check(library.flashcore_plan_run_host(handle, byref(inputs), byref(Outputs(sizeof(Outputs), Bytes.of(output)))))
    # The first row attends itself, the second both: the mean of 1 and 3, and of 2 and 4.
    assert list(output) == [1, 2, 2, 3], output
    check(library.flashcore_plan_destroy(handle))

    # A kernel by name, on a GPU: where there is none, or where it does not fit, that is said.
    config = library.flashcore_configs().decode().splitlines()[0]
    try:
        check(library.flashcore_plan_destroy(plan(problem, DEVICE_CUDA, config)))
    except RuntimeError as error:
        print(f"{config}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
