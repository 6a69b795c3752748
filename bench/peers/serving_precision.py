"""Attention in other types than 16 bits: KV caches in FP8, query, key and value in FP8, and f32 on tensor cores.

FP8 outputs are compared with attention in f32 on the same codes and scales, so that the error of quantising is not in it. One whose
query is FP8 may differ by twice what weights rounded to e4m3 make. FlashAttention-3 has FP8 with all inputs of 8 bits alone.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from flashcore_serving import Refused
from serving_cases import COLD_BYTES, HOT_BYTES, MEMORY_RATE, PRODUCT_RATE, RMS_ERROR, arrange, attention, relative_errors, size
from torch.nn.attention import SDPBackend, sdpa_kernel

LARGEST_E4M3 = 448.0
# The weight of the row max, as kernels round weights to e4m3.
LARGEST_WEIGHT = 256.0
# Root mean square errors over the expected output's that are allowed to f32.
F32_ERROR = 1e-4
TF32_CONFIGS = {
    64: "ampere-64x32-2stage-swizzled-3xtf32",
    128: "ampere-64x32-2stage-swizzled-qshared-3xtf32",
}


@dataclass
class PrecisionCase:
    """Equal sequences; `page` for a paged cache."""

    suite: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    dim: int
    causal: bool = False
    page: int | None = None

    @property
    def name(self):
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else str(self.heads)
        if self.suite == "fp8-cache":
            return f"{self.batch} x {size(self.keys)}" + (f", pages of {self.page}" if self.page else "")
        return f"{self.batch}x{heads}x{self.rows}x{self.dim}"

    def flops(self):
        attended = self.rows * self.keys
        if self.causal:
            attended -= self.rows * (self.rows - 1) // 2
        return 4 * self.batch * self.heads * self.dim * attended

    def kv_bytes(self, of_element):
        return 2 * of_element * self.batch * self.keys * self.kv_heads * self.dim

    def floor(self):
        """Microseconds of the bytes and of the FLOPs, whichever is more: 8-bit products at twice the rate of 16-bit ones."""
        of_query, of_kv, rate = {
            "fp8-cache": (2, 1, PRODUCT_RATE),
            "fp8": (1, 1, 2 * PRODUCT_RATE),
            # Three products of tf32, which have half the rate of 16 bits.
            "f32": (4, 4, PRODUCT_RATE / 6),
        }[self.suite]
        moved = self.kv_bytes(of_kv) + (of_query + max(of_query, 2)) * self.batch * self.rows * self.heads * self.dim
        return max(moved / MEMORY_RATE, self.flops() / rate) * 1e6


def cases(suite, quick):
    """The cases of a suite."""
    if suite == "fp8-cache":
        shapes = [(1, 1024), (1, 32768), (8, 8192), (32, 8192), (128, 8192)]
        for batch, keys in shapes[:3:2] if quick else shapes:
            yield PrecisionCase(suite, batch, 32, 8, 1, keys, 128)
        yield PrecisionCase(suite, 8, 32, 8, 1, 8192, 128, page=16)
        return
    if suite == "fp8":
        lengths = (4096,) if quick else (1024, 4096, 16384)
        shapes = [(16384 // length, 16, length, 128) for length in lengths]
        shapes += [] if quick else [(4, 32, 4096, 64), (4, 8, 4096, 256)]
    else:
        shapes = [(2, 16, 2048, 64), (2, 16, 2048, 128)]
    for batch, heads, length, dim in shapes:
        for causal in (False, True):
            yield PrecisionCase(suite, batch, heads, heads, length, length, dim, causal)


def quantized(tensor):
    """Codes of [batch, row, head, column] in e4m3, and their scales [head]."""
    scales = tensor.float().abs().amax((0, 1, 3)) / LARGEST_E4M3
    return (tensor.float() / scales[:, None]).to(torch.float8_e4m3fn), scales


def dequantized(codes, scales):
    return codes.float() * scales[:, None]


def by_rounded_weights(q, k, v, causal):
    """Attention of one sequence and head group as FP8 kernels round it: weights are 256 at the row max, in e4m3."""
    group = q.shape[1] // k.shape[1]
    query, key, value = q.transpose(0, 1), *(t.repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = query @ key.transpose(1, 2) / math.sqrt(q.shape[-1])
    if causal:
        position = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
        scores = scores.masked_fill(torch.arange(k.shape[0], device=q.device) > position, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * LARGEST_WEIGHT
    rounded = weights.to(torch.float8_e4m3fn).float()
    return (rounded @ value / weights.sum(-1, keepdim=True)).transpose(0, 1)


class Fp8Inputs:
    """Codes, scales, the same in bf16, and the expected output of some rows of the first and the last sequence."""

    def __init__(self, case, device):
        def random(rows, heads):
            return torch.randn(case.batch, rows, heads, case.dim, device=device, dtype=torch.bfloat16)

        self.case = case
        self.q, k, v = random(case.rows, case.heads), random(case.keys, case.kv_heads), random(case.keys, case.kv_heads)
        (self.k8, self.k_scale), (self.v8, self.v_scale) = quantized(k), quantized(v)
        # One scale for the query heads of a KV head, like FlashAttention-3.
        grouped = self.q.reshape(case.batch, -1, case.kv_heads, case.dim * case.heads // case.kv_heads)
        q8, self.q_scale = quantized(grouped)
        self.q8 = q8.reshape(self.q.shape)
        self.k, self.v = (dequantized(*pair) for pair in ((self.k8, self.k_scale), (self.v8, self.v_scale)))
        q_of_codes = dequantized(q8, self.q_scale).reshape(self.q.shape)
        rows = min(case.rows, 64)
        self.kept = [(0, slice(case.rows - rows, case.rows)), (case.batch - 1, slice(case.rows - rows, case.rows))]
        # Causal rows at the end attend all keys but their own tail.
        self.expected = [self.attend(attention, self.q.float(), *kept) for kept in self.kept]
        self.expected8 = [self.attend(attention, q_of_codes, *kept) for kept in self.kept]
        model = [self.attend(by_rounded_weights, q_of_codes, *kept) for kept in self.kept]
        self.model_error = relative_errors(zip(model, self.expected8))[0]

    def attend(self, how, q, batch, rows):
        return how(q[batch, rows], self.k[batch], self.v[batch], self.case.causal)

    def error(self, output, of_codes):
        """Errors of an output, and the limit of the first: of a query in bf16, or of one in codes."""
        expected = self.expected8 if of_codes else self.expected
        limit = RMS_ERROR + (2 * self.model_error if of_codes else 0)
        if not output.isfinite().all():
            return (math.inf, math.inf), limit
        pairs = [(output[batch, rows].float(), right) for (batch, rows), right in zip(self.kept, expected)]
        return relative_errors(pairs), limit


def fp8_builders(bench, case, inputs, fa3):
    """Functions that give the calls on copies of K and V by name, and whether the query is of codes."""
    device = inputs.q.device
    lens = [case.keys] * case.batch

    def cache(k, v):
        """K and V of the case in its layout: contiguous, or in shuffled pages."""
        flat = [tensor.reshape(-1, case.kv_heads, case.dim) for tensor in (k, v)]
        if not case.page:
            return arrange("rect", *flat, lens)
        # Pages are filled by index, which 8-bit floats do not have.
        kv = arrange("paged", *(tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in flat), lens, case.page)
        kv.k, kv.v = kv.k.view(k.dtype), kv.v.view(v.dtype)
        return kv

    def ours(query, kv, scales, **dtypes):
        out = torch.full(query.shape, math.nan, dtype=torch.bfloat16, device=device)
        table, bounds = kv.operands.get("page_table"), {}
        if table is not None:
            bounds = {"page_size": case.page, "num_pages": kv.k.shape[0]}
            bounds |= {"table_width": table.shape[1], "table_stride": table.stride(0)}
        sizes = case.batch, case.heads, case.kv_heads, case.rows, kv.max_k, case.dim
        plan = bench.flashcore.plan(*sizes, causal=case.causal, operands=(*kv.operands, *scales), **bounds, **dtypes)

        def call():
            bench.flashcore.launch(plan, query, kv.k, kv.v, out, scales=scales, **kv.operands)
            return out

        return call

    def theirs(k, v):
        descale = {
            f"{name}_descale": scale.expand(case.batch, case.kv_heads).contiguous()
            for name, scale in (("q", inputs.q_scale), ("k", inputs.k_scale), ("v", inputs.v_scale))
        }
        return lambda: fa3.forward(inputs.q8, k, v, is_causal=case.causal, **descale)[0]

    kv_scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    scales = {"q_scale": inputs.q_scale, **kv_scales}
    codes, bf16 = (inputs.k8, inputs.v8), tuple(tensor.bfloat16() for tensor in (inputs.k, inputs.v))
    all_fp8 = lambda k, v: ours(inputs.q8, cache(k, v), scales, dtype="e4m3", out_dtype="bf16")
    builders = {
        "flashcore": (codes, all_fp8, True),
        "flashcore-bf16": (bf16, lambda k, v: ours(inputs.q, cache(k, v), {}), False),
    }
    if case.suite == "fp8-cache":
        under_bf16 = lambda k, v: ours(inputs.q, cache(k, v), kv_scales, kv_dtype="e4m3")
        builders |= {"flashcore": (codes, under_bf16, False), "flashcore-e4m3": (codes, all_fp8, True)}
    # Other head dims and pages are not in the build of FlashAttention-3 that shared scripts make.
    if fa3 and case.dim == 128 and not case.page:
        builders["fa3-e4m3"] = (codes, theirs, True)
    return builders


def checked(bench, builders, judge):
    """The builders whose output is right, errors by name, and why others are left out; `judge` gives errors and a limit."""
    good, errors, left_out = {}, {}, {}
    for name, builder in builders.items():
        try:
            output = builder[1](*builder[0])()
            if output.is_cuda:
                torch.cuda.synchronize()
        except Refused as refusal:
            left_out[name] = f"refused: {refusal}"
            continue
        except (RuntimeError, NotImplementedError) as error:
            if bench.is_fatal(error):
                raise
            left_out[name] = f"failed: {str(error).splitlines()[0][:200]}"
            continue
        errors[name], limit = judge(name, output)
        if errors[name][0] <= limit:
            good[name] = builder
        else:
            left_out[name] = f"WRONG: error {errors[name][0]:.2e} rms of the expected output's, limit {limit:.2e}"
    return good, errors, left_out


def timed(bench, case, builders, copies):
    """Times of each builder on copies of its K and V."""

    def calls(tensors, build):
        sets = [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in range(copies - 1))]
        return [build(*pair) for pair in sets]

    found = {name: lambda builder=builder: calls(*builder[:2]) for name, builder in builders.items()}
    return bench.timed(found, case.floor(), copies)


def rows(bench, case, builders, errors, left_out, of_element):
    """Rows of a record for builders that are right: hot, cold or both."""
    one = {
        "suite": case.suite,
        "name": case.name,
        "kind": "paged" if case.page else "rect",
        "page": case.page,
        "mask": "causal" if case.causal else "full",
        "heads": f"{case.heads}/{case.kv_heads} x {case.dim}",
        "floor": case.floor(),
        "errors": errors,
    }
    kv_bytes, states = case.kv_bytes(of_element), {}
    if kv_bytes <= HOT_BYTES:
        states["hot"] = 1
    if case.suite == "fp8-cache":
        states["cold"] = max(1, math.ceil(COLD_BYTES / kv_bytes))
    elif not states:
        states["cold" if kv_bytes >= COLD_BYTES else "warm"] = 1
    for state, copies in states.items():
        medians, samples, failed = timed(bench, case, builders, copies)
        row = {**one, "l2": state, "microseconds": medians, "samples": samples, "left_out": {**left_out, **failed}}
        ours = medians.get("flashcore")
        peers = {name: time for name, time in medians.items() if not name.startswith("flashcore")}
        if ours:
            row["teraflops"] = case.flops() / ours / 1e6
            for name, time in medians.items():
                if name.startswith("flashcore-"):
                    row[f"over_{name.removeprefix('flashcore-')}"] = ours / time
        if ours and peers:
            row["best_peer"] = min(peers, key=peers.get)
            row["ratio"] = peers[row["best_peer"]] / ours
            if "fa3-e4m3" in peers:
                row["ratio_fa3"] = peers["fa3-e4m3"] / ours
        yield row


def measure_fp8(bench, case):
    """Rows of an FP8 case."""
    inputs = Fp8Inputs(case, bench.flashcore.device)
    builders = fp8_builders(bench, case, inputs, bench.fa3)
    judge = lambda name, output: inputs.error(output, builders[name][2])
    good, errors, left_out = checked(bench, builders, judge)
    yield from rows(bench, case, good, errors, left_out, 1)


def measure_f32(bench, case):
    """Rows of an f32 case; "flashcore" is 3xTF32, "flashcore-scalar" the kernel without tensor cores."""
    device = bench.flashcore.device
    q, k, v = (torch.randn(case.batch, case.rows, case.heads, case.dim, device=device) for _ in range(3))
    last = slice(max(0, case.rows - 64), case.rows)
    kept = (0, last, slice(0, 2))
    pairs = [tensor[0, :, :2].double() for tensor in (q, k, v)]
    right = attention64(*pairs, case.causal)[last]

    def ours(config):
        def build(key, value):
            out = torch.full_like(q, math.nan)
            sizes = case.batch, case.heads, case.kv_heads, case.rows, case.keys, case.dim
            plan = bench.flashcore.plan(*sizes, causal=case.causal, dtype="f32", config=config)

            def call():
                bench.flashcore.launch(plan, q, key, value, out)
                return out

            return call

        return build

    def theirs(backend):
        def build(key, value):
            tensors = [tensor.transpose(1, 2) for tensor in (q, key, value)]

            def call():
                with sdpa_kernel(backend):
                    return functional.scaled_dot_product_attention(*tensors, is_causal=case.causal).transpose(1, 2)

            return call

        return build

    has_tensor_cores = device == "cuda"
    builders = {
        "flashcore": ((k, v), ours(TF32_CONFIGS[case.dim] if has_tensor_cores else None)),
        "torch-efficient": ((k, v), theirs(SDPBackend.EFFICIENT_ATTENTION)),
        "torch-math": ((k, v), theirs(SDPBackend.MATH)),
    }
    if has_tensor_cores:
        builders["flashcore-scalar"] = ((k, v), ours("scalar"))

    def judge(_, output):
        if not output.isfinite().all():
            return (math.inf, math.inf), F32_ERROR
        return relative_errors([(output[kept].double(), right)]), F32_ERROR

    good, errors, left_out = checked(bench, builders, judge)
    for row in rows(bench, case, good, errors, left_out, 4):
        if {"flashcore", "flashcore-scalar"} <= errors.keys():
            row["error_over_scalar"] = errors["flashcore"][0] / errors["flashcore-scalar"][0]
        yield row


def attention64(q, k, v, causal):
    """Attention of one sequence in f64, [row, head, column]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(k.shape[0] - q.shape[0] + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v)


def measure(bench, case):
    """Rows of a case."""
    return measure_f32(bench, case) if case.suite == "f32" else measure_fp8(bench, case)
