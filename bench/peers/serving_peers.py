"""The attention of other libraries on serving problems: FlashAttention-3, and FlashAttention-2 and cuDNN in PyTorch.

Each function gives calls by name for one copy of the tensors, or none where the library cannot do the case. A call returns
the output. Best counts: with FlashAttention-3 the scheduler metadata are computed by the call or before it.
"""

import importlib
import os
import sys

import torch
import torch.nn.functional as functional
from serving_cases import offsets
from torch.nn.attention import SDPBackend, sdpa_kernel

# FlashAttention-3 as a wheel of vLLM has it: with pages, which the wheel of fa3-fwd lacks, and for packed queries only. One
# process must not load both: their symbols have the same names.
VLLM = "_vllm_fa3_C.abi3.so"


def load_fa3(folder):
    """`fwd` and `get_scheduler_metadata` of a folder: of its VLLM, or of its _C.so, which may be that of the wheel of fa3-fwd.

    In a _C.so, kernels that were not built are undefined until they are called.
    """
    if os.path.exists(os.path.join(folder, VLLM)):
        return load_vllm(os.path.join(folder, VLLM))
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    sys.path.insert(0, folder)
    try:
        importlib.import_module("_C")
    finally:
        sys.path.remove(folder)
        sys.setdlopenflags(flags)
    operators = torch.ops.flash_attn_3 if hasattr(torch.ops.flash_attn_3, "fwd") else torch.ops.fa3_fwd
    return operators.fwd.default, operators.get_scheduler_metadata.default


def load_vllm(path):
    """The same functions from vLLM's build, whose operators have no defaults."""
    torch.ops.load_library(path)

    def with_defaults(operator):
        names = [argument.name for argument in operator._schema.arguments]
        # Of an optional argument the default is None; these are no optionals.
        values = {"window_size_left": -1, "window_size_right": -1, "num_splits": 0, "softcap": 0.0, "sm_margin": 0}
        values |= {"is_causal": False, "has_softcap": False, "is_rotary_interleaved": False, "max_seqlen_k_new": 0}
        values |= {"cp_world_size": 1, "cp_rank": 0}

        def call(*arguments, **named):
            given = {**values, **dict(zip(names, arguments)), **named}
            if "softmax_scale" in names:
                given["softmax_scale"] = given["q"].shape[-1] ** -0.5
            return operator(*(given.get(name) for name in names))

        return call

    operators = torch.ops._vllm_fa3_C
    return with_defaults(operators.fwd.default), with_defaults(operators.get_scheduler_metadata.default)


def absent_fa3(folder):
    """Why FlashAttention-3 cannot be loaded; none if it can."""
    if not folder:
        return "FlashAttention-3 is not measured: --fa3 names no folder with its _C.so"
    try:
        load_fa3(folder)
    except (ImportError, OSError, AttributeError) as error:
        return f"FlashAttention-3 is not measured: {folder} has no _C.so or {VLLM} that loads: {error}"
    return None


class Fa3:
    """FlashAttention-3 with its own heuristics of splits, packing and scheduling."""

    def __init__(self, folder):
        self.forward, self.get_metadata = load_fa3(folder)
        self.is_packed = os.path.exists(os.path.join(folder, VLLM))
        self.metadata = {}

    def scheduler_metadata(self, case, kv, cu_seqlens_q):
        """The metadata for a batch, computed once for all copies of its tensors."""
        key = case.suite, case.name, case.causal, kv.kind
        if key not in self.metadata:
            device = kv.k.device
            self.metadata = {
                key: self.get_metadata(
                    case.batch,
                    max(case.q_lens),
                    kv.max_k,
                    case.heads,
                    case.kv_heads,
                    case.dim,
                    case.dim,
                    kv.k.dtype,
                    torch.tensor(case.k_lens, dtype=torch.int32, device=device),
                    cu_seqlens_q=cu_seqlens_q,
                    cu_seqlens_k=kv.operands.get("cu_seqlens_k"),
                    page_size=kv.page,
                    is_causal=case.causal,
                )
            }
        return self.metadata[key]

    def calls(self, case, q, kv, cu_seqlens_q, out):
        if self.is_packed and cu_seqlens_q is None:
            q, out, cu_seqlens_q = q.flatten(0, 1), None, offsets(case.q_lens, q.device)
        arguments = {"out": out, "is_causal": case.causal, **kv.operands}
        if cu_seqlens_q is not None:
            arguments |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max(case.q_lens)}
        if kv.kind == "varlen":
            arguments["max_seqlen_k"] = kv.max_k
        # Without lengths on the device there is nothing to compute beforehand: they are given for the sake of it.
        planned = dict(arguments)
        if kv.kind == "rect":
            planned["seqused_k"] = torch.tensor(case.k_lens, dtype=torch.int32, device=kv.k.device)
        planned["scheduler_metadata"] = self.scheduler_metadata(case, kv, cu_seqlens_q)
        return {
            "fa3": lambda: self.forward(q, kv.k, kv.v, **arguments)[0],
            "fa3-metadata": lambda: self.forward(q, kv.k, kv.v, **planned)[0],
        }


def fa2_calls(case, q, kv, cu_seqlens_q):
    """PyTorch's FlashAttention-2, with its own heuristics of splits; causal is bottom-right."""
    if kv.kind not in ("rect", "varlen"):
        return {}
    forward, cu_seqlens_k = torch.ops.aten._flash_attention_forward.default, kv.operands.get("cu_seqlens_k")
    sizes = max(case.q_lens), kv.max_k, 0.0, case.causal, False
    return {"fa2": lambda: forward(q, kv.k, kv.v, cu_seqlens_q, cu_seqlens_k, *sizes)[0]}


def cudnn_calls(case, q, kv):
    """cuDNN by PyTorch's SDPA, whose causal mask is top-left; decode also with a group of heads as rows (packed GQA)."""
    if kv.kind != "rect" or (case.causal and case.q_lens != case.k_lens):
        return {}
    key, value = kv.k.transpose(1, 2), kv.v.transpose(1, 2)

    def attend(query, **options):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(query, key, value, **options)

    grouped = {"enable_gqa": True} if case.heads != case.kv_heads else {}
    query = q.transpose(1, 2)
    calls = {"cudnn": lambda: attend(query, is_causal=case.causal, **grouped).transpose(1, 2)}
    if grouped and case.q_lens[0] == 1:
        packed = q.view(case.batch, case.kv_heads, case.heads // case.kv_heads, case.dim)
        calls["cudnn-packed"] = lambda: attend(packed).reshape(q.shape)
    return calls


def cudnn_varlen_calls(case, q, kv, cu_seqlens_q):
    """cuDNN on packed sequences."""
    if kv.kind != "varlen":
        return {}
    forward, cu_seqlens_k = torch.ops.aten._cudnn_attention_forward.default, kv.operands["cu_seqlens_k"]
    sizes = max(case.q_lens), kv.max_k, False, 0.0, case.causal, False
    return {"cudnn-varlen": lambda: forward(q, kv.k, kv.v, None, cu_seqlens_q, cu_seqlens_k, *sizes)[0]}


def peer_calls(peers, fa3, case, q, kv, cu_seqlens_q, out):
    """Calls of the named peers by the names of their variants."""
    calls = {}
    if "fa3" in peers and fa3:
        calls |= fa3.calls(case, q, kv, cu_seqlens_q, out)
    if "fa2" in peers:
        calls |= fa2_calls(case, q, kv, cu_seqlens_q)
    if "cudnn" in peers:
        calls |= cudnn_calls(case, q, kv)
    if "cudnn-varlen" in peers:
        calls |= cudnn_varlen_calls(case, q, kv, cu_seqlens_q)
    return calls
