"""From descriptions of tensors to a plan of attention: the checks that name an argument, and the problem's fields.

Front ends (numpy, DLPack, torch) describe their tensors in FlashAttention's order, [batch, row, head, column], or
[row of all sequences, head, column] where sequences are packed. This runs once per problem; calls after it find the plan
by their key.
"""

from __future__ import annotations

import math
import operator
from ctypes import byref
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import _library as lib
from ._errors import InvalidArgument, Unsupported
from ._plans import Operand, Plan, create


class Tensor(NamedTuple):
    """Description of a tensor: everything but its address."""

    shape: "Tuple[int, ...]"
    strides: "Tuple[int, ...]"  # in elements
    dtype: object  # one of lib.F16 .. lib.F64 or "int32", "int64"; a text of another type is refused
    device: "Tuple[int, int]"  # lib.CPU or lib.CUDA, ordinal


class Options(NamedTuple):
    """Everything of a problem that is no tensor."""

    scale: "Optional[float]" = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    lse: bool = False
    is_top_left: bool = False
    max_q: "Optional[int]" = None
    max_k: "Optional[int]" = None
    config: "Optional[str]" = None
    run_on: "Optional[Tuple[int, int]]" = None  # a GPU for tensors in the host's memory: they are copied


def device_name(device: "Tuple[int, int]") -> str:
    """cpu, or cuda:0."""
    return f"cuda:{device[1]}" if device[0] == lib.CUDA else "cpu"


def dtype_name(dtype: object) -> str:
    """float16, or the text of another type."""
    return lib.DTYPE_NAMES.get(dtype, str(dtype))  # type: ignore[call-overload]


def extent(shape: "Tuple[int, ...]", strides: "Tuple[int, ...]") -> int:
    """Elements from the first of a tensor to the end of its last."""
    if 0 in shape:
        return 0
    return sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1


def window_sides(window: Any) -> "Tuple[int, int]":
    """Left and right of a window: two integers, or tensors of one."""
    if isinstance(window, (tuple, list)) and len(window) == 2 and all(isinstance(side, int) for side in window):
        return window[0], window[1]  # as they are: they may be symbols of a graph
    try:
        left, right = window
        return operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"window_size is {window!r}; it must be (left, right), two integers, -1 for no limit"
        ) from None


def check_number(name: str, value: Any) -> None:
    """Refuses what is no number of any type."""
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise InvalidArgument(f"{name} is {value!r}; it must be a number")


def number(name: str, value: Any) -> float:
    """A number of any type."""
    check_number(name, value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{name} is {value!r}; it must be a number") from None


def integer(name: str, value: Any) -> "Optional[int]":
    """An integer that is not negative, or None."""
    if value is None:
        return None
    try:
        found = operator.index(value)
    except TypeError:
        found = -1
    if not 0 <= found < 2**63:
        raise InvalidArgument(f"{name} is {value!r}; it must be an integer from 0 on")
    return found


def check_query(q: Tensor, is_packed: bool) -> None:
    """Checks the type and the dimensions of the query."""
    if q.dtype not in lib.ITEM_BYTES:
        raise InvalidArgument(
            f"q is {dtype_name(q.dtype)}; it must be float16, bfloat16, float32 or, on the CPU, float64: convert it"
        )
    if len(q.shape) != (3 if is_packed else 4):
        wanted = "[total_q, heads, head_dim] with cu_seqlens_q" if is_packed else "[batch, rows, heads, head_dim]"
        raise _shape_error("q", q, wanted)


def _shape_error(name: str, tensor: Tensor, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"{name} has shape {tuple(tensor.shape)}; it must be {wanted}")


def has_adjacent_columns(tensor: Tensor) -> bool:
    """False if elements lie between the columns of a row."""
    return not tensor.shape or tensor.shape[-1] < 2 or 0 in tensor.shape or tensor.strides[-1] == 1


def check_tensor(name: str, tensor: Tensor, dtype: int, device: "Tuple[int, int]", of: str = "q") -> None:
    """Checks element type, device and strides against those of the query."""
    if tensor.device != device:
        raise InvalidArgument(
            f"{name} is on {device_name(tensor.device)} and {of} on {device_name(device)}; move them to one device"
        )
    if tensor.dtype != dtype:
        raise InvalidArgument(
            f"{name} is {dtype_name(tensor.dtype)} and {of} is {dtype_name(dtype)}; convert one of them"
        )
    if not has_adjacent_columns(tensor):
        raise InvalidArgument(
            f"the columns of {name} are {tensor.strides[-1]} elements apart; they must be adjacent: make it contiguous"
        )
    if any(stride < 0 for stride in tensor.strides):
        raise InvalidArgument(f"{name} has strides {tuple(tensor.strides)}; they must not be negative: copy it")


def row_strides(tensor: Tensor) -> lib.Strides:
    """Strides of [batch, row, head, column] or [row, head, column]; those of dimensions of size 1 mean nothing."""
    shape, strides = tensor.shape, list(tensor.strides)
    for dimension in range(len(shape) - 2, -1, -1):
        if shape[dimension] == 1:
            others = [strides[other] * shape[other] for other in range(dimension + 1, len(shape))]
            strides[dimension] = max(others + [shape[-1]])
    if len(shape) == 3:
        return lib.Strides(0, strides[1], strides[0])
    return lib.Strides(strides[0], strides[2], strides[1])


_LENGTHS = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx", "page_table"}
_PER_HEAD = {"alibi_slopes", "sinks"}


def check_operand(name: str, tensor: Tensor, shape: "Tuple[int, ...]", device: "Tuple[int, int]") -> None:
    """Checks an operand beside query, key and value."""
    allowed = "int32" if name in _LENGTHS else lib.F32
    if tensor.device != device:
        raise InvalidArgument(
            f"{name} is on {device_name(tensor.device)} and q on {device_name(device)}; move them to one device"
        )
    if tensor.dtype != allowed:
        raise InvalidArgument(
            f"{name} is {dtype_name(tensor.dtype)}; it must be {dtype_name(allowed)}: convert it"
        )
    if tuple(tensor.shape) != shape:
        raise _shape_error(name, tensor, str(shape))
    if shape and shape[-1] > 1 and tensor.strides[-1] != 1:
        raise InvalidArgument(
            f"the entries of {name} are {tensor.strides[-1]} elements apart; they must be adjacent: make it contiguous"
        )
    if any(stride < 0 for stride in tensor.strides):
        raise InvalidArgument(f"{name} has strides {tuple(tensor.strides)}; they must not be negative: copy it")


def _most_keys(most: "Optional[int]", capacity: int, there: str) -> int:
    """The keys of the longest sequence: all that there are, unless `max_seqlen_k` says fewer."""
    if most is not None and most > capacity:
        raise InvalidArgument(f"max_seqlen_k is {most}, and {there} {capacity} keys: it can be at most that")
    return capacity if most is None else most


def _mask(problem: lib.Problem, options: Options) -> None:
    left, right = window_sides((options.window_left, options.window_right))
    if options.causal:
        right = 0 if right < 0 else min(right, 0)
    problem.alignment = lib.TOP_LEFT if options.is_top_left else lib.BOTTOM_RIGHT
    problem.window_left = problem.window_right = -1
    if left < 0 and right < 0:
        problem.mask = lib.MASK_NONE
    elif left < 0 and right == 0:
        problem.mask = lib.MASK_CAUSAL
    else:
        problem.mask = lib.MASK_WINDOW
        problem.window_left, problem.window_right = (max(min(side, 2**63 - 1), -1) for side in (left, right))


def attention_plan(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: Options, operands: "Dict[str, Tensor]"
) -> Plan:
    """Checks everything and makes the plan; its operands are query, key, value, output, lse, then `operands` in order."""
    problem = attention_problem(q, k, v, out, options, operands)
    return plan_of(problem, q, k, v, out, options, operands)


def continue_plan(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: Options, operands: "Dict[str, Tensor]"
) -> Plan:
    """Like `attention_plan`; output and LSE are read and replaced."""
    problem = attention_problem(q, k, v, out, options, operands)
    problem.base.operation = lib.OPERATION_CONTINUE
    return plan_of(problem, q, k, v, out, options, operands)


def attention_problem(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: Options, operands: "Dict[str, Tensor]"
) -> lib.Problem:
    """Checks everything and fills the problem."""
    is_packed_q, is_packed_k = "cu_seqlens_q" in operands, "cu_seqlens_k" in operands
    is_paged = "page_table" in operands
    check_query(q, is_packed_q)
    dtype: int = q.dtype  # type: ignore[assignment]
    device = q.device
    if is_packed_k and is_paged:
        raise InvalidArgument("cu_seqlens_k and page_table are both given; keys are packed, or they lie in pages")
    key_shape = (
        "[num_pages, page_size, heads, head_dim] with page_table" if is_paged
        else "[total_k, heads, head_dim] with cu_seqlens_k" if is_packed_k
        else "[batch, rows, heads, head_dim]"
    )  # fmt: skip
    for name, tensor in (("k", k), ("v", v)):
        if len(tensor.shape) != (3 if is_packed_k else 4):
            raise _shape_error(name, tensor, key_shape)
    is_float8, is_float8_kv = dtype in lib.FLOAT8, k.dtype in lib.FLOAT8
    kv_dtype: int = k.dtype if is_float8_kv else dtype  # type: ignore[assignment]
    if is_float8 and not is_float8_kv:
        raise InvalidArgument(f"q is {dtype_name(dtype)} and k is {dtype_name(k.dtype)}; with an FP8 query all are FP8")
    if is_float8 and out.dtype not in (lib.F16, lib.BF16):
        raise InvalidArgument(f"out is {dtype_name(out.dtype)}; with an FP8 query it must be float16 or bfloat16")
    out_dtype: int = out.dtype if is_float8 else dtype  # type: ignore[assignment]
    for name, tensor, wanted_type, of in (
        ("q", q, dtype, "q"), ("k", k, kv_dtype, "q"), ("v", v, kv_dtype, "k" if is_float8_kv else "q"),
        ("out", out, out_dtype, "q"),
    ):  # fmt: skip
        check_tensor(name, tensor, wanted_type, device, of)
    if k.shape[-1] != q.shape[-1]:
        raise InvalidArgument(f"the head dim of k is {k.shape[-1]} and that of q {q.shape[-1]}; they must be equal")
    if v.shape[:-1] != k.shape[:-1]:
        raise _shape_error("v", v, f"{tuple(k.shape[:-1])} and its columns, like k")
    if tuple(out.shape) != (*q.shape[:-1], v.shape[-1]):
        raise _shape_error("out", out, str((*q.shape[:-1], v.shape[-1])))

    if is_packed_q:
        batch = operands["cu_seqlens_q"].shape[0] - 1 if len(operands["cu_seqlens_q"].shape) == 1 else -1
        if batch < 0:
            raise _shape_error("cu_seqlens_q", operands["cu_seqlens_q"], "(batch + 1,)")
    else:
        batch = q.shape[0]
    problem = lib.Problem()
    lib.check(
        lib.LIBRARY.flashcore_attention_problem_init(
            byref(problem), batch, q.shape[-2], q.shape[-3], q.shape[-1], dtype
        )
    )
    problem.key_heads, problem.value_dim = k.shape[-2], v.shape[-1]
    problem.kv_dtype = kv_dtype if is_float8_kv else 0
    problem.out_dtype = out_dtype if is_float8 else 0
    if options.scale is not None:
        problem.scale = number("scale", options.scale)
    elif q.shape[-1]:
        problem.scale = 1 / math.sqrt(q.shape[-1])
    problem.softcap = number("softcap", options.softcap)
    problem.lse = int(bool(options.lse))
    _mask(problem, options)
    problem.layout = lib.LAYOUT_STRIDED
    problem.query_strides, problem.key_strides = row_strides(q), row_strides(k)
    problem.value_strides, problem.output_strides = row_strides(v), row_strides(out)

    most_q, most_k = integer("max_seqlen_q", options.max_q), integer("max_seqlen_k", options.max_k)
    max_q = q.shape[-3] if most_q is None else most_q
    if is_packed_q:
        problem.cu_seqlens_q, problem.total_q = 1, q.shape[0]
        problem.query_length = max(max_q, 1)
    if is_packed_k:
        problem.cu_seqlens_k, problem.total_k = 1, k.shape[0]
        problem.key_length = max(k.shape[0] if most_k is None else most_k, 1)
    elif is_paged:
        table = operands["page_table"]
        if len(table.shape) != 2:
            raise _shape_error("page_table", table, "(batch, pages of the longest sequence)")
        if table.shape[0] > 1 and 0 <= table.strides[0] < table.shape[1]:
            raise InvalidArgument(
                f"the rows of page_table are {table.strides[0]} entries apart and have {table.shape[1]}; make it contiguous"
            )
        problem.page_table, problem.num_pages, problem.page_size = 1, k.shape[0], k.shape[1]
        problem.table_width = table.shape[1]
        problem.table_stride = table.strides[0] if table.shape[0] > 1 else 0
        problem.key_length = _most_keys(most_k, table.shape[1] * k.shape[1], "page_table has pages for")
    else:
        problem.key_length = _most_keys(most_k, k.shape[1], "k has")
    rows = operands["page_table"].shape[0] if is_paged else k.shape[0]
    if "kv_batch_idx" in operands:
        problem.kv_batch_idx, problem.kv_batch = 1, rows
    elif not is_packed_k and rows != batch:
        name = "page_table" if is_paged else "k"
        raise InvalidArgument(
            f"{name} has {rows} batches and q has {batch}; they must be equal, or kv_batch_idx says which belongs to which"
        )

    shapes: "Dict[str, Tuple[int, ...]]" = {
        "cu_seqlens_q": (batch + 1,),
        "cu_seqlens_k": (batch + 1,),
        "page_table": (rows, operands["page_table"].shape[1]) if is_paged else (),
        **{name: (batch,) for name in ("seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx")},
        **{name: (q.shape[-2],) for name in _PER_HEAD},
    }
    for name, tensor in operands.items():
        if name == "bias":
            _check_bias(tensor, (batch, q.shape[-2], problem.query_length, problem.key_length), device)
            problem.bias = 1
            continue
        if name in lib.SCALES:
            check_scale(name, tensor, q if name == "q_scale" else k, batch, problem.key_heads)
            setattr(problem, name, 1)
            continue
        if name not in shapes:
            raise InvalidArgument(f"there is no operand {name}; there are {', '.join(sorted(shapes))} and bias")
        check_operand(name, tensor, shapes[name], device)
        setattr(problem, "alibi" if name == "alibi_slopes" else name, 1)
    if options.is_top_left and problem.alibi and problem.mask == lib.MASK_NONE:
        # Without a mask the library counts the distances of ALiBi from the bottom right.
        problem.mask, problem.window_right = lib.MASK_WINDOW, problem.key_length
    return problem


def _check_bias(bias: Tensor, shape: "Tuple[int, ...]", device: "Tuple[int, int]") -> None:
    check = InvalidArgument
    if bias.device != device:
        raise check(f"bias is on {device_name(bias.device)} and q on {device_name(device)}; move them to one device")
    if bias.dtype == "bool":
        raise check("bias is bool, a mask; pass numbers that are added: 0 where a key is attended, -inf where it is not")
    if bias.dtype != lib.F32:
        raise check(f"bias is {dtype_name(bias.dtype)}; it must be float32, or float16 or bfloat16: convert it")
    if len(bias.shape) != 4 or any(size not in (1, wanted) for size, wanted in zip(bias.shape, shape)):
        raise _shape_error("bias", bias, f"{shape}, or 1 where it is the same")
    if any(stride < 0 for stride in bias.strides):
        raise check(f"bias has strides {tuple(bias.strides)}; they must not be negative: copy it")


def check_scale(name: str, scale: Tensor, tensor: Tensor, batch: int, key_heads: int) -> None:
    """Checks the scale of an FP8 tensor."""
    if tensor.dtype not in lib.FLOAT8:
        raise InvalidArgument(
            f"{name} is given and {name[0]} is {dtype_name(tensor.dtype)}; scales are for float8_e4m3fn and float8_e5m2"
        )
    if scale.device != tensor.device:
        raise InvalidArgument(
            f"{name} is on {device_name(scale.device)} and q on {device_name(tensor.device)}; move them to one device"
        )
    if scale.dtype != lib.F32:
        raise InvalidArgument(f"{name} is {dtype_name(scale.dtype)}; it must be float32: convert it")
    rows = tuple(tensor.shape[:-1]) if len(tensor.shape) == 4 else (1, *tensor.shape[:-1])
    allowed = [(), (1,), (key_heads,), (batch, key_heads), rows]
    if tuple(scale.shape) not in allowed:
        raise _shape_error(
            name, scale, f"() for one of the tensor, {(key_heads,)}, {(batch, key_heads)}, or one for each row, {rows}"
        )
    if any(stride < 0 for stride in scale.strides):
        raise InvalidArgument(f"{name} has strides {tuple(scale.strides)}; they must not be negative: copy it")


def scale_strides(name: str, scale: Tensor, query_heads: int, key_heads: int) -> "Tuple[int, ...]":
    """The strides of a scale: sequence, batch, row, key head, query head."""
    strides = [stride if size > 1 else 0 for size, stride in zip(scale.shape, scale.strides)]
    if len(strides) == 3:
        if name == "q_scale":
            return (0, strides[0], strides[1], strides[2] * (query_heads // max(key_heads, 1)), strides[2])
        return (0, *strides)
    if len(strides) == 2:
        return (strides[0], 0, 0, strides[1])
    return (0, 0, 0, strides[0]) if strides else ()


def operand_of(name: str, tensor: Tensor, query_heads: int = 0, key_heads: int = 0) -> Operand:
    """A tensor of a call; the strides of a bias and of scales come with it."""
    dtype = lib.CODES[tensor.dtype]
    strides: "Tuple[int, ...]" = ()
    if name in lib.SCALES:
        strides = scale_strides(name, tensor, query_heads, key_heads)
    elif name == "bias":
        strides = tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.strides))
    return Operand(name, dtype, lib.OPERAND_BYTES[dtype] * extent(tensor.shape, tensor.strides), strides)


def operands_of_plan(
    problem: lib.Problem, tensors: "Dict[str, Tensor]", has_lse: bool, operands: "Dict[str, Tensor]"
) -> "List[Operand]":
    """All tensors of a call: `tensors`, the LSE if there is one, then `operands`."""
    made = [operand_of(name, tensor) for name, tensor in tensors.items()]
    if has_lse:
        rows = problem.total_q if problem.cu_seqlens_q else problem.batch * problem.query_length
        made.append(Operand("lse", lib.F32, 4 * rows * problem.query_heads))
    return made + [
        operand_of(name, tensor, problem.query_heads, problem.key_heads) for name, tensor in operands.items()
    ]


def plan_of(
    problem: lib.Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    options: Options,
    operands: "Dict[str, Tensor]",
) -> Plan:
    """The plan of a problem whose fields are complete."""
    place = options.run_on or q.device
    handle = create(problem, *place, options.config)
    tensors = operands_of_plan(problem, {"query": q, "key": k, "value": v, "output": out}, options.lse, operands)
    return Plan(handle, place, tensors, problem, q.device[0] == lib.CPU)


def refuse(what: str, instead: str) -> Unsupported:
    """The exception for a feature that is not there."""
    return Unsupported(f"{what}; {instead}")
