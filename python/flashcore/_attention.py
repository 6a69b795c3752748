"""`attention` and `prepare` for arrays of any library."""

from __future__ import annotations

import operator
from typing import Any, Dict, Optional, Tuple

from . import _library as lib
from . import _arrays as arrays
from ._errors import InvalidArgument
from ._plans import CACHE, Plan
from ._resolve import Options, Tensor, attention_plan, check_query, integer, number, window_sides

_find = CACHE.find


def _order(tensor: Tensor, is_bhsd: bool) -> Tensor:
    """[batch, row, head, column] of a description in either layout; packed tensors have one layout."""
    if not is_bhsd or len(tensor.shape) != 4:
        return tensor
    (b, h, s, d), (batch, head, row, column) = tensor.shape, tensor.strides
    return Tensor((b, s, h, d), (batch, row, head, column), tensor.dtype, tensor.device)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bhsd",
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_size: "Tuple[int, int]" = (-1, -1),
    alignment: str = "bottom_right",
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    bias: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: "Optional[int]" = None,
    max_seqlen_k: "Optional[int]" = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    leftpad_k: Any = None,
    kv_batch_idx: Any = None,
    page_table: Any = None,
    out: Any = None,
    return_lse: bool = False,
    device: "Optional[str]" = None,
    stream: int = 0,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: "Optional[str]" = None,
    out_dtype: Any = None,
) -> Any:
    """Computes softmax(scale * q k^T + bias) v.

    Tensors are `[batch, head, row, column]` (`layout="bhsd"`, PyTorch's) or `[batch, row, head, column]`
    (`layout="bshd"`, FlashAttention's); packed sequences are `[row, head, column]` in both.
    They are numpy arrays (float16, float32, float64, and bfloat16 of ml_dtypes), torch tensors, or anything with
    `__dlpack__` or `__cuda_array_interface__`; strides are free, but `q`, `k` and `v` whose columns are not adjacent cost a
    copy, and arrays of other libraries on a GPU, and `out`, must have them adjacent.
    `k` and `v` may have fewer heads than `q` (GQA).

    causal, window_size: row i attends the keys from `left` before to `right` after its position; -1 is no limit.
    alignment: "bottom_right" puts the last row at the last key, as FlashAttention does and as decoding needs;
        "top_left" puts row 0 at key 0, as PyTorch's `is_causal` does.
    softcap: score = softcap * tanh(score / softcap); 0 for none.
    alibi_slopes, sinks: float32, one for each query head.
    bias: float32, bfloat16 or float16 `[batch, head, row, key]`, 1 where it is the same, the first dimensions left out where
        all are; added to the scaled scores.
    cu_seqlens_*, max_seqlen_*, seqused_*, leftpad_k, kv_batch_idx, page_table: int32 arrays of packed, padded and paged
        sequences; with `page_table`, `k` and `v` are `[page, row, head, column]` ("bshd") or `[page, head, row, column]`.
        Without `seqused_k` each sequence has `max_seqlen_k` keys, by default as many as `k` or its row of pages holds.
    q_scale, k_scale, v_scale: float32, the numbers that the codes of FP8 tensors are multiplied by: one, one for each KV
        head, `[batch, KV head]`, or one for each row, of the shape of the tensor without its columns. FP8 tensors are
        float8_e4m3fn and float8_e5m2 of torch and ml_dtypes; `k` and `v` are FP8 under a query of any type, or all three.
    kv_dtype: the type of uint8 arrays of codes, "float8_e4m3fn" or "float8_e5m2".
    out_dtype: "float16" or "bfloat16", the type of the output of an FP8 query; bfloat16 unless given.
    out: array to write into. GPU arrays other than torch's and CuPy's need it.
    return_lse: also returns the log-sum-exp, float32 `[batch, head, row]`, or `[head, row]` of packed rows.
    device: "cuda" computes numpy arrays on the GPU: they are copied there and back.
    stream: the CUDA stream, an address, for GPU arrays; torch tensors use torch's current stream.
    """
    if arrays.is_torch(q):
        from .torch import attention as torch_attention

        if device is not None or stream:
            raise InvalidArgument("device and stream are for other arrays; torch tensors have both: leave them out")
        return torch_attention(
            q, k, v, layout=layout, scale=scale, causal=causal, window_size=window_size, alignment=alignment,
            softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, bias=bias, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q,
            seqused_k=seqused_k, leftpad_k=leftpad_k, kv_batch_idx=kv_batch_idx, page_table=page_table, out=out,
            return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype,
            out_dtype=out_dtype,
        )  # fmt: skip
    plan, views, result, lse = _plan(
        q, k, v, layout, scale, causal, window_size, alignment, softcap,
        {
            "alibi_slopes": alibi_slopes, "sinks": sinks, "bias": bias, "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k, "leftpad_k": leftpad_k,
            "kv_batch_idx": kv_batch_idx, "page_table": page_table, "q_scale": q_scale, "k_scale": k_scale,
            "v_scale": v_scale,
        },
        max_seqlen_q, max_seqlen_k, out, return_lse, device, stream, kv_dtype, out_dtype,
    )  # fmt: skip
    if plan is not None:
        plan.run([view.address for view in views], stream)
    return (result, lse) if return_lse else result


def _plan(
    q: Any, k: Any, v: Any, layout: str, scale: "Optional[float]", causal: bool, window_size: "Tuple[int, int]",
    alignment: str, softcap: float, given: "Dict[str, Any]", max_q: "Optional[int]", max_k: "Optional[int]", out: Any,
    return_lse: bool, device: "Optional[str]", stream: int, kv_dtype: "Optional[str]", out_dtype: "Optional[str]",
) -> "Tuple[Optional[Plan], list, Any, Any]":  # fmt: skip
    """The plan of a call, its views in the order of the plan's operands, and its outputs."""
    if layout not in ("bhsd", "bshd"):
        raise InvalidArgument(f"layout is {layout!r}; it must be 'bhsd' or 'bshd'")
    if alignment not in ("bottom_right", "top_left"):
        raise InvalidArgument(f"alignment is {alignment!r}; it must be 'bottom_right' or 'top_left'")
    views = [arrays.view("q", q, stream), arrays.view("k", k, stream), arrays.view("v", v, stream)]
    if kv_dtype is not None:
        views[1:] = [_as_codes(name, view, kv_dtype) for name, view in zip("kv", views[1:])]
    views = [arrays.with_adjacent_columns(name, view) for name, view in zip("qkv", views)]
    operands = {name: arrays.view(name, array, stream) for name, array in given.items() if array is not None}
    if layout == "bhsd":
        operands.update({name: _row_major(operands[name]) for name in lib.SCALES if name in operands})
    if "bias" in operands:
        operands["bias"] = _bias(operands["bias"], given["bias"])
    query, key, value = (view.tensor for view in views)
    is_bhsd, is_packed = layout == "bhsd", cu_packed(given)
    check_query(_order(query, is_bhsd), is_packed)
    out_shape = (*query.shape[:-1], value.shape[-1]) if value.shape else ()
    result_dtype = query.dtype if query.dtype not in lib.FLOAT8 else arrays.code_of(str(out_dtype or "bfloat16"))
    result = arrays.empty(q, out_shape, result_dtype, query.device) if out is None else out
    views.append(arrays.view("out", result, stream, is_written=True))
    lse = None
    if return_lse:
        ordered = _order(query, is_bhsd).shape
        shape = (ordered[1], ordered[0]) if is_packed else (ordered[0], ordered[2], ordered[1])
        lse = arrays.empty(q, shape, lib.F32, query.device)
        views.append(arrays.view("lse", lse, stream))
    options = Options(
        None if scale is None else number("scale", scale), bool(causal), *window_sides(window_size),
        number("softcap", softcap), bool(return_lse), alignment == "top_left", integer("max_seqlen_q", max_q),
        integer("max_seqlen_k", max_k), None, arrays.parse_device(device),
    )  # fmt: skip
    tensors = tuple(view.tensor for view in views[:4])
    key_of_call = ("array", is_bhsd, options, tensors, tuple((name, view.tensor) for name, view in operands.items()))
    if 0 in out_shape:
        return None, [], result, lse
    plan = _find(key_of_call)
    if plan is None:
        ordered_tensors = [_order(tensor, is_bhsd) for tensor in tensors]
        descriptions = {name: view.tensor for name, view in operands.items()}
        plan = CACHE.add(key_of_call, lambda: attention_plan(*ordered_tensors, options, descriptions))
    if query.device[0] == lib.CPU and (is_packed or "seqused_q" in operands):
        # Rows that no sequence has are not written.
        for view, empty in zip(views[3:], (0, -float("inf"))):
            arrays.host_array(view)[...] = empty
    views += operands.values()
    if "workspace" in plan.operands:
        # The plan keeps a workspace for each stream.
        views.append(arrays.View(0, query, None))
    return plan, views, result, lse


def _as_codes(name: str, view: arrays.View, kv_dtype: str) -> arrays.View:
    """A view of bytes as codes of an FP8 type."""
    code = arrays.code_of(str(kv_dtype).replace("torch.", ""))
    if code not in lib.FLOAT8:
        raise InvalidArgument(f"kv_dtype is {kv_dtype!r}; it must be 'float8_e4m3fn' or 'float8_e5m2'")
    if view.tensor.dtype not in ("uint8", code):
        raise InvalidArgument(f"{name} is {view.tensor.dtype} and kv_dtype is {kv_dtype}; it must be uint8 codes of that type")
    return view._replace(tensor=view.tensor._replace(dtype=code))


def _row_major(view: arrays.View) -> arrays.View:
    """[batch, row, head] of a scale [batch, head, row]; other scales as they are."""
    tensor = view.tensor
    if len(tensor.shape) != 3:
        return view
    (b, h, s), (batch, head, row) = tensor.shape, tensor.strides
    return view._replace(tensor=tensor._replace(shape=(b, s, h), strides=(batch, row, head)))


def cu_packed(given: "Dict[str, Any]") -> bool:
    """True if query rows are packed."""
    return given.get("cu_seqlens_q") is not None


def _bias(view: arrays.View, array: Any) -> arrays.View:
    """A bias of four dimensions, the first ones of size 1 where it has fewer; one of 16 bits is converted."""
    if view.tensor.dtype in (lib.F16, lib.BF16) and view.tensor.device[0] == lib.CPU and hasattr(array, "astype"):
        view = arrays.view("bias", array.astype("float32"))
    shape, strides = view.tensor.shape, view.tensor.strides
    more = 4 - len(shape)
    return view._replace(tensor=view.tensor._replace(shape=(1,) * more + shape, strides=(0,) * more + strides))


def prepare(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    dtype: str = "float16",
    device: "Optional[str]" = None,
    layout: str = "bhsd",
    **options: Any,
) -> str:
    """Compiles the kernel of a call ahead of it, and says which it is.

    `q`, `k` and `v` are shapes (k as q, v as k if not given) with `dtype` and `device`, or tensors; everything else is as
    for `attention`, and arrays may be given by their shapes too. Later calls with other sizes and strides use the same
    kernel as long as types, head dims and features are the same.
    """
    k = q if k is None else k
    v = k if v is None else v
    place = arrays.parse_device(device) or (lib.CPU, 0)
    code = arrays.code_of(str(dtype).replace("torch.", ""))
    if not isinstance(q, (tuple, list)):
        if arrays.is_torch(q):
            place = (lib.CUDA, q.device.index) if q.is_cuda else (lib.CPU, 0)
            code = arrays.code_of(str(q.dtype).replace("torch.", ""))
            q, k, v = (getattr(tensor, "shape", tensor) for tensor in (q, k, v))
        else:
            views = [arrays.view(name, array) for name, array in (("q", q), ("k", k), ("v", v))]
            place = arrays.parse_device(device) or views[0].tensor.device
            code = views[0].tensor.dtype
            q, k, v = (view.tensor.shape for view in views)

    def describe(name: str, given: Any, element: object) -> Tensor:
        try:
            shape = tuple(operator.index(size) for size in given)
        except TypeError:
            raise InvalidArgument(f"{name} is {given!r}; it must be a shape, such as (1, 8, 512, 64), or a tensor") from None
        return Tensor(shape, arrays.contiguous_strides(shape), element, place)

    is_bhsd = layout == "bhsd"
    tensors = [_order(describe(name, shape, code), is_bhsd) for name, shape in (("q", q), ("k", k), ("v", v))]
    for name, tensor in zip("qkv", tensors):
        if not tensor.shape:
            raise InvalidArgument(f"{name} has shape (); it must have dimensions")
    query, value = tensors[0], tensors[2]
    shape = (*query.shape[:-1], value.shape[-1])
    tensors.append(Tensor(shape, arrays.contiguous_strides(shape), code, place))
    operands: "Dict[str, Tensor]" = {}
    floats = ("alibi_slopes", "sinks", "bias")
    for name in floats + ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx", "page_table"):
        given = options.pop(name, None)
        if given is not None:
            operands[name] = describe(name, getattr(given, "shape", given), lib.F32 if name in floats else "int32")
    left, right = window_sides(options.pop("window_size", (-1, -1)))
    scale = options.pop("scale", None)
    chosen = Options(
        scale=None if scale is None else number("scale", scale),
        causal=bool(options.pop("causal", False)),
        window_left=left,
        window_right=right,
        softcap=number("softcap", options.pop("softcap", 0.0)),
        lse=bool(options.pop("return_lse", False)),
        is_top_left=options.pop("alignment", "bottom_right") == "top_left",
        max_q=integer("max_seqlen_q", options.pop("max_seqlen_q", None)),
        max_k=integer("max_seqlen_k", options.pop("max_seqlen_k", None)),
        config=options.pop("config", None),
    )
    if not isinstance(chosen.config, (str, type(None))):
        raise InvalidArgument(f"config is {chosen.config!r}; it must be the name of one")
    if options:
        raise TypeError(f"prepare() got an unexpected keyword argument {next(iter(options))!r}")
    key = ("prepared", chosen, tuple(tensors), tuple(operands.items()))
    plan = _find(key) or CACHE.add(key, lambda: attention_plan(*tensors, chosen, operands))
    return plan.describe()
