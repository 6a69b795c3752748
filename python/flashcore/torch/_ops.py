"""Operators `torch.ops.flashcore.*` of attention: forward, varlen_forward, their `_out` forms, continue_forward, no_backward.

Tensors are in FlashAttention's order: `[batch, row, head, column]`, packed sequences `[row, head, column]`.
The LSE is `[batch, head, row]`, packed `[head, row]`; without `return_lse` it has no elements.
Functions whose name begins with `miss_` return (result, launch or None) for `_fast.operation`.
"""

from __future__ import annotations

import inspect
from typing import Any, Optional, Tuple

import torch

from .._errors import NoBackward
from . import _dispatch, _stable
from ._fast import launch_of, operation, places_of
from ._launch import FLOAT8, attend, bias_of, check_given, check_out, of_one_device
from ._namespace import LIB, NAMESPACE, OPERATORS

MASK = "float? scale=None, bool causal=False, int window_left=-1, int window_right=-1, float softcap=0.0"
OPTIONS = (
    f"{MASK}, bool top_left=False, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? bias=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, Tensor? leftpad_k=None"
)
_TAGS = (torch.Tag.pt2_compliant_tag,)


def define(name: str, schema: str, implementation: Any, fake: Any, refuses_grad: bool = True) -> None:
    """Defines an operator with one implementation for the CPU and CUDA, and its fake."""
    LIB.define(f"{name}{schema}", tags=_TAGS)
    for key in ("CPU", "CUDA"):
        LIB.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", of_one_device(implementation, fake), lib=LIB)
    if refuses_grad:
        _dispatch.refuse_grad(name)


def define_launched(name: str, schema: str, miss: Any, fake: Any, refuses_grad: bool = False) -> None:
    """Defines an operator whose launches are kept: a kernel of C where torch's C interface is there, else a builtin."""
    LIB.define(f"{name}{schema}", tags=_TAGS)
    if not _stable.register(NAMESPACE, name, getattr(OPERATORS, name).default._schema, miss):
        function = operation(miss)
        for key in ("CPU", "CUDA"):
            LIB.impl(name, function, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", of_one_device(miss, fake), lib=LIB)
    if refuses_grad:
        _dispatch.refuse_grad(name)
    _dispatch.honour_autocast(name)


def operands_of(**tensors: "Optional[torch.Tensor]") -> "list[Tuple[str, torch.Tensor]]":
    """The operands that are given."""
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def new_outputs(
    q: torch.Tensor,
    value_dim: int,
    is_packed: bool,
    return_lse: bool,
    is_partial: bool,
    out_dtype: "Optional[torch.dtype]" = None,
) -> "Tuple[torch.Tensor, torch.Tensor]":
    """Output and LSE; where rows may be left unwritten, they are 0 and minus infinity.

    The output has the type of the query. That of an FP8 query has `out_dtype`, bfloat16 if it is not given.
    """
    shape = (*q.shape[:-1], value_dim)
    dtype = (out_dtype or torch.bfloat16) if q.dtype in FLOAT8 else q.dtype
    out = q.new_zeros(shape, dtype=dtype) if is_partial else q.new_empty(shape, dtype=dtype)
    if not return_lse:
        return out, q.new_empty((0,), dtype=torch.float32)
    lse_shape = (q.shape[1], q.shape[0]) if is_packed else (q.shape[0], q.shape[2], q.shape[1])
    if is_partial:
        return out, q.new_full(lse_shape, -float("inf"), dtype=torch.float32)
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def miss_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    top_left: bool = False,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    bias: "Optional[torch.Tensor]" = None,
    seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
    return_lse: bool = False,
) -> "Tuple[Tuple[torch.Tensor, torch.Tensor], Any]":
    """Attention of `[batch, row, head, column]`."""
    check_given(q=q, k=k, v=v)
    if q.dim() == 4 and v.dim() == 4:
        out, lse = new_outputs(q, v.shape[-1], False, return_lse, seqused_q is not None)
    else:
        out, lse = q.new_empty(q.shape), q  # the plan says what is wrong with the shapes
    bias, is_converted = bias_of(bias)
    operands = operands_of(
        alibi_slopes=alibi_slopes, sinks=sinks, bias=bias, seqused_q=seqused_q, seqused_k=seqused_k, leftpad_k=leftpad_k
    )
    plan = attend(
        q, k, v, out, lse if return_lse else None, scale, causal, window_left, window_right, softcap, top_left,
        operands=operands,
    )  # fmt: skip
    if seqused_q is not None or is_converted:
        return (out, lse), None  # rows that are not written were filled, or a launch has another bias than its arguments
    return (out, lse), launch_of(plan, _FORWARD, 16, (out, lse), True)


def fake_of(function: Any, dimensions: "Tuple[int, ...]", value: str = "v") -> Any:
    """Fake implementation: outputs of the right shapes, from the arguments of `function` by name."""
    signature = inspect.signature(function)

    def fake(*args: Any, **options: Any) -> "Tuple[torch.Tensor, torch.Tensor]":
        named = signature.bind(*args, **options).arguments
        q = named["q"]
        torch._check(q.dim() in dimensions, lambda: f"q has {q.dim()} dimensions; it must have {dimensions}")
        value_dim, is_packed = named[value].shape[-1], q.dim() == 3
        return new_outputs(q, value_dim, is_packed, named.get("return_lse", False), False, named.get("out_dtype"))

    return fake


def forward_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    top_left: bool = False,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    bias: "Optional[torch.Tensor]" = None,
    seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
    *,
    out: torch.Tensor,
    lse: "Optional[torch.Tensor]" = None,
) -> None:
    """Attention into `out`, which may have any strides, and `lse`, which is contiguous."""
    check_given(q=q, k=k, v=v, out=out)
    check_out("out", out, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    if lse is not None:
        check_out("lse", lse, (q.shape[0], q.shape[2], q.shape[1]), torch.float32, q.device)
        _check_contiguous("lse", lse)
    operands = operands_of(
        alibi_slopes=alibi_slopes, sinks=sinks, bias=bias_of(bias)[0], seqused_q=seqused_q, seqused_k=seqused_k, leftpad_k=leftpad_k
    )
    attend(q, k, v, out, lse, scale, causal, window_left, window_right, softcap, top_left, operands=operands)


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        from .._errors import InvalidArgument

        raise InvalidArgument(f"{name} has strides {tuple(tensor.stride())}; it must be contiguous")


def miss_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: "Optional[torch.Tensor]",
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    top_left: bool = False,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
    kv_batch_idx: "Optional[torch.Tensor]" = None,
    page_table: "Optional[torch.Tensor]" = None,
    return_lse: bool = False,
) -> "Tuple[Tuple[torch.Tensor, torch.Tensor], Any]":
    """Attention of packed query rows over packed keys, a cache, or pages."""
    check_given(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    if q.dim() == 3:
        out, lse = new_outputs(q, v.shape[-1], True, return_lse, seqused_q is not None)
    else:
        out, lse = q.new_empty(q.shape), q
    operands = operands_of(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, alibi_slopes=alibi_slopes, sinks=sinks,
        seqused_q=seqused_q, seqused_k=seqused_k, leftpad_k=leftpad_k, kv_batch_idx=kv_batch_idx, page_table=page_table,
    )  # fmt: skip
    plan = attend(
        q, k, v, out, lse if return_lse else None, scale, causal, window_left, window_right, softcap, top_left,
        max_seqlen_q, max_seqlen_k, operands,
    )  # fmt: skip
    if seqused_q is not None:
        return (out, lse), None
    return (out, lse), launch_of(plan, _VARLEN_FORWARD, 21, (out, lse), True)


def varlen_forward_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: "Optional[torch.Tensor]",
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    top_left: bool = False,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
    kv_batch_idx: "Optional[torch.Tensor]" = None,
    page_table: "Optional[torch.Tensor]" = None,
    *,
    out: torch.Tensor,
    lse: "Optional[torch.Tensor]" = None,
) -> None:
    """`varlen_forward` into `out` and `lse`. Rows that no sequence has are not written."""
    check_given(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, out=out)
    check_out("out", out, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    if lse is not None:
        check_out("lse", lse, (q.shape[1], q.shape[0]), torch.float32, q.device)
        _check_contiguous("lse", lse)
    operands = operands_of(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, alibi_slopes=alibi_slopes, sinks=sinks,
        seqused_q=seqused_q, seqused_k=seqused_k, leftpad_k=leftpad_k, kv_batch_idx=kv_batch_idx, page_table=page_table,
    )  # fmt: skip
    attend(
        q, k, v, out, lse, scale, causal, window_left, window_right, softcap, top_left, max_seqlen_q, max_seqlen_k,
        operands,
    )  # fmt: skip


QUERY_KEY_VALUE = {"q": "query", "k": "key", "v": "value"}
_FORWARD = places_of(miss_forward, QUERY_KEY_VALUE)
_VARLEN_FORWARD = places_of(miss_varlen_forward, QUERY_KEY_VALUE)


def continue_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: "Optional[float]" = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    top_left: bool = False,
    alibi_slopes: "Optional[torch.Tensor]" = None,
    sinks: "Optional[torch.Tensor]" = None,
    bias: "Optional[torch.Tensor]" = None,
    seqused_q: "Optional[torch.Tensor]" = None,
    seqused_k: "Optional[torch.Tensor]" = None,
    leftpad_k: "Optional[torch.Tensor]" = None,
) -> None:
    """Attention over more keys: `out` and `lse`, of attention over others, become those over all of them."""
    check_given(q=q, k=k, v=v, out=out, lse=lse)
    check_out("out", out, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    check_out("lse", lse, (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (), torch.float32, q.device)
    _check_contiguous("lse", lse)
    operands = operands_of(
        alibi_slopes=alibi_slopes, sinks=sinks, bias=bias_of(bias)[0], seqused_q=seqused_q, seqused_k=seqused_k, leftpad_k=leftpad_k
    )
    attend(
        q, k, v, out, lse, scale, causal, window_left, window_right, softcap, top_left, operands=operands,
        is_continued=True,
    )  # fmt: skip


PAGES = ", Tensor? kv_batch_idx=None, Tensor? page_table=None"
_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    + OPTIONS.replace("Tensor? bias=None, ", "")
    + PAGES
)
_WRITTEN = "*, Tensor(a!) out, Tensor(b!)? lse=None) -> ()"


def _no_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    raise NoBackward(
        "flashcore computes the forward pass only, and a gradient was asked of it; call it under torch.no_grad() or "
        "torch.inference_mode(), or use another attention for training"
    )


def _nothing(*args: Any, **options: Any) -> None:
    return None


define_launched("forward", f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, bool return_lse=False) -> (Tensor, Tensor)", miss_forward, fake_of(miss_forward, (4,)))
define("forward_out", f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, {_WRITTEN}", forward_out, _nothing)
define_launched("varlen_forward", f"{_VARLEN}, bool return_lse=False) -> (Tensor, Tensor)", miss_varlen_forward, fake_of(miss_varlen_forward, (3,)))
define("varlen_forward_out", f"{_VARLEN}, {_WRITTEN}", varlen_forward_out, _nothing)
define(
    "continue_forward",
    f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, {OPTIONS}) -> ()",
    continue_forward,
    _nothing,
)
define(
    "no_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)",
    _no_backward,
    lambda grad, q, k, v: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
    refuses_grad=False,
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.count = len(inputs)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    # An operator that raises when it runs: compiled graphs contain a backward that is traced and maybe never run.
    grads = OPERATORS.no_backward(grad, *ctx.saved_tensors)
    return (*grads, *[None] * (ctx.count - 3))


for _name in ("forward", "varlen_forward"):
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _backward, setup_context=_save, lib=_dispatch.Refusing(False))
