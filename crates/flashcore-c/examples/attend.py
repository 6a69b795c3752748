"""Attention from Python with nothing but ctypes: strides, a config by name, and what is told when something is wrong.

    cargo build --release -p flashcore-c
    python crates/flashcore-c/examples/attend.py target/release/libflashcore.so
"""

import array
import ctypes
import sys
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

DTYPE_F32, MASK_CAUSAL, LAYOUT_STRIDED = 3, 1, 3
DEVICE_CPU, DEVICE_CUDA = 0, 1
QUERY, KEY, VALUE, OUTPUT = 1, 2, 3, 4


class Strides(Structure):
    _fields_ = [(name, c_uint64) for name in ("batch", "head", "row")]


class Base(Structure):
    _fields_ = [("operation", c_int32), ("struct_size", c_uint32)]


class Problem(Structure):
    _fields_ = (
        [("base", Base)]
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


class Tensor(Structure):
    _fields_ = [
        ("operand", c_int32), ("dtype", c_int32), ("data", c_void_p), ("bytes", c_uint64), ("strides", c_uint64 * 5)
    ]  # fmt: skip

    @classmethod
    def of(cls, operand, numbers):
        address, count = numbers.buffer_info()
        return cls(operand, DTYPE_F32, address, count * numbers.itemsize)


def tensors(query, key, value, output):
    given = zip((QUERY, KEY, VALUE, OUTPUT), (query, key, value, output))
    return (Tensor * 4)(*(Tensor.of(operand, numbers) for operand, numbers in given)), 4


def load(path):
    library = ctypes.CDLL(path)
    for text in ("last_error", "version", "configs", "plan_describe"):
        getattr(library, f"flashcore_{text}").restype = c_char_p
    library.flashcore_attention_problem_init.argtypes = [POINTER(Problem)] + [c_uint64] * 4 + [c_int32]
    library.flashcore_plan_create.argtypes = [POINTER(Problem), c_int32, c_int32, c_char_p, c_void_p]
    library.flashcore_run.argtypes = [c_void_p, POINTER(Tensor), c_uint64]
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
        check(library.flashcore_plan_create(byref(problem), kind, 0, name, byref(handle)))
        return handle

    # One batch, two heads, two rows of one column, [batch, row, head, column]: the strides of such a torch tensor are
    # `tensor.transpose(1, 2).stride()`.
    problem = Problem()
    check(library.flashcore_attention_problem_init(byref(problem), 1, 2, 2, 1, DTYPE_F32))
    problem.mask, problem.layout = MASK_CAUSAL, LAYOUT_STRIDED
    for name in ("query", "key", "value", "output"):
        setattr(problem, f"{name}_strides", Strides(batch=4, head=1, row=2))
    handle = plan(problem, DEVICE_CPU)
    print(library.flashcore_version().decode(), library.flashcore_plan_describe(handle).decode())

    zeros, values, output = array.array("f", [0] * 4), array.array("f", [1, 2, 3, 4]), array.array("f", [0] * 4)
    check(library.flashcore_run(handle, *tensors(zeros, zeros, values, output)))
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
