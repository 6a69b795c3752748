"""Random calls through Python beside attention in float64: `python random_cases.py --cases 20000 --seed 7`.

Dense, packed and paged keys, caches with appends and rotary embedding, slots, FP8, parts that continue and merge; every
option of a function that it has, memory of any strides, NaN in all rows that no sequence has. A case depends on its seed and
its number alone: `--case N` runs one of them again.
"""

import argparse
import os
import sys
import time

import numpy as np
import torch

if __name__ == "__main__":
    import conftest  # noqa: F401  (finds the package)

import flashcore
import flashcore.torch as ft
from flashcore.compat import flash_attn as fa2
from flashcore.compat import flash_attn_interface as fa3
from reference import TOLERANCE, attend

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
LENGTHS = (1, 1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 65, 100, 129)
LONG = (200, 257, 300, 513)
HEAD_DIMS = (8, 16, 32, 40, 64, 64, 80, 96, 128, 128, 192, 256)


def appends_float64():
    """True if the library appends rows of float64, as newer ones do."""
    rows, caches = torch.zeros(1, 1, 8).double(), [torch.zeros(1, 1, 1, 8).double() for _ in "kv"]
    try:
        ft.append(rows, rows, *caches, torch.zeros(1, dtype=torch.int64))
    except flashcore.InvalidArgument as error:
        assert "dtype is f64" in str(error)
        return False
    return True


APPENDS_FLOAT64 = appends_float64()


def host(x):
    return x.double().numpy()


def ints(values):
    return torch.tensor([int(value) for value in values], dtype=torch.int32)


class Case:
    """A random generator with the sizes and options of one case."""

    def __init__(self, seed, number):
        self.random = np.random.default_rng([seed, number])
        torch.manual_seed(int(self.random.integers(2**31)))
        self.dtype_name = str(self.random.choice(list(DTYPES), p=[0.4, 0.2, 0.25, 0.15]))
        self.dtype = DTYPES[self.dtype_name]
        self.batch = int(self.random.integers(1, 5))
        self.key_heads = int(self.random.choice([1, 1, 2, 3]))
        self.heads = self.key_heads * int(self.random.choice([1, 1, 2, 3, 4, 8], p=[0.2, 0.3, 0.2, 0.1, 0.1, 0.1]))
        self.dim = int(self.random.choice(HEAD_DIMS)) if self.chance(0.7) else int(self.random.integers(7, 257))
        self.value_dim = self.dim if self.chance(0.7) else int(self.random.integers(7, 257))
        self.said = []

    def chance(self, probability):
        return bool(self.random.random() < probability)

    def length(self, most=513):
        return min(int(self.random.choice(LONG if self.chance(0.08) else LENGTHS)), most)

    def lengths(self, most):
        """The length of each sequence, some of them 0."""
        return [0 if self.chance(0.05) else int(self.random.integers(1, most + 1)) for _ in range(self.batch)]

    def randn(self, *shape, dtype=None):
        return torch.randn(*shape).to(dtype or self.dtype)

    def placed(self, x):
        """The same values in memory of other strides, columns side by side."""
        kind = self.random.integers(4)
        if kind == 0 or x.numel() == 0:
            return x
        if kind == 1:  # heads before rows
            return x.transpose(-2, -3).contiguous().transpose(-2, -3)
        if kind == 2:  # a slice of something wider
            whole = torch.full((*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 8), float("nan")).to(x.dtype)
            part = whole[..., 1:-1, 8:]
        else:  # other rows between
            part = torch.full((*x.shape[:-3], 2 * x.shape[-3], *x.shape[-2:]), float("nan")).to(x.dtype)[..., ::2, :, :]
        part.copy_(x)
        return part

    def masks(self):
        """Options of every function, for the reference: scale, causal, window, softcap."""
        options = {}
        if self.chance(0.3):
            options["scale"] = float(self.random.choice([0.0, 0.05, 0.2, 0.5]))
        if self.chance(0.5):
            options["causal"] = True
        if self.chance(0.3):
            options["window"] = tuple(int(self.random.choice([-1, 0, 1, 7, 60, 300])) for _ in range(2))
        if self.chance(0.2):
            options["softcap"] = float(self.random.choice([1.0, 5.0, 30.0]))
        return options

    def appends(self):
        """float32 in place of float64 where the library has no appends of that."""
        if self.dtype == torch.float64 and not APPENDS_FLOAT64:
            self.dtype_name, self.dtype = "float32", torch.float32

    def say(self, *words):
        self.said += [str(word) for word in words]


def called(options):
    """The options of the reference, as `flashcore.attention` calls them."""
    return {{"window": "window_size"}.get(name, name): value for name, value in options.items()}


def by_operator(options):
    """The same, as operators call them."""
    options = dict(options)
    left, right = options.pop("window", (-1, -1))
    return {**options, "window_left": left, "window_right": right}


def by_flash_attn(options):
    """The same, as flash_attn calls them."""
    names = {"window": "window_size", "scale": "softmax_scale"}
    return {names.get(name, name): value for name, value in options.items()}


def compare(case, found, expected, what, is_exact=False):
    """Error over what is allowed: values, or LSEs, of the size of the largest of them; none where they are copies."""
    found, expected = host(found), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, f"{what} has shape {found.shape}; it must be {expected.shape}"
    assert not np.isnan(found).any(), f"{what} has NaN"
    infinite = np.isinf(expected)
    assert (found[infinite] == expected[infinite]).all(), f"{what}: infinities differ"
    most = np.abs(expected[~infinite]).max(initial=1)
    name = "float32" if what == "lse" and case.dtype_name == "float64" else case.dtype_name
    ratio = np.abs(found[~infinite] - expected[~infinite]).max(initial=0) / (TOLERANCE[name] * most)
    assert ratio <= (0 if is_exact else 1), f"{what} differs by {ratio * TOLERANCE[name] * most:.3e}, {ratio:.2f} of what is allowed"
    return ratio


def judge(case, out, lse, expected):
    """Compares (out, lse) of each sequence, `expected`, with slices of the results; returns the worst ratio."""
    worst = 0.0
    for (rows, lse_rows), (right, right_lse) in expected:
        worst = max(worst, compare(case, out[rows], right, "output"))
        if lse is not None:
            worst = max(worst, compare(case, lse[lse_rows], right_lse, "lse"))
    return worst


def dense(case):
    """[batch, row, head, column] by a function that has the options that were drawn."""
    sq, sk, b = case.length(), case.length(), case.batch
    q = case.placed(case.randn(b, sq, case.heads, case.dim))
    k = case.placed(case.randn(b, sk, case.key_heads, case.dim))
    v = case.placed(case.randn(b, sk, case.key_heads, case.value_dim))
    options, operands, lengths = case.masks(), {}, {}
    bias = None
    if case.chance(0.25):
        operands["alibi_slopes"] = torch.rand(case.heads)
    if case.chance(0.2):
        operands["sinks"] = torch.randn(case.heads)
    if case.chance(0.25):
        shape = [size if case.chance(0.6) else 1 for size in (b, case.heads, sq, sk)]
        shape = shape[int(case.random.integers(0, 4)) :]
        dtype = DTYPES[str(case.random.choice(["float32", "float16", "bfloat16"]))]
        bias = torch.randn(*shape).to(dtype)
        if case.chance(0.3):
            bias.masked_fill_(torch.rand(shape) < 0.3, -float("inf"))
        operands["bias"] = bias
    if case.chance(0.2):
        options["top_left"] = True
    used_q, used_k, left = [sq] * b, [sk] * b, [0] * b
    if case.chance(0.2):
        used_q = case.lengths(sq)
        lengths["seqused_q"] = ints(used_q)
    if case.chance(0.3):
        used_k = case.lengths(sk)
        lengths["seqused_k"] = ints(used_k)
        if bias is None and case.chance(0.4):
            left = [int(case.random.integers(0, used + 1)) for used in used_k]
            lengths["leftpad_k"] = ints(left)
    expected = []
    for i in range(b):
        for x in (k, v):
            x[i, : left[i]] = float("nan")
            x[i, used_k[i] :] = float("nan")
        q[i, used_q[i] :] = float("nan")
        own = None if bias is None else host(bias.expand(b, case.heads, sq, sk))[i, :, : used_q[i], : used_k[i]]
        keys = slice(left[i], used_k[i])
        right = attend(
            host(q[i, : used_q[i]]), host(k[i, keys]), host(v[i, keys]), slopes=operands.get("alibi_slopes"),
            sinks=operands.get("sinks"), bias=own, **options,
        )  # fmt: skip
        expected.append((((i, slice(used_q[i])), (i, slice(None), slice(used_q[i]))), right))
    kinds = ["attention", "operator", "function", "out"]
    if case.dtype_name != "bfloat16" and not (bias is not None and bias.dtype == torch.bfloat16):
        kinds.append("numpy")
    if not lengths and not operands.keys() - {"alibi_slopes"} and "top_left" not in options:
        kinds += ["fa2"] * 3 + ["fa3"] * (3 if not operands else 0)
    kind = str(case.random.choice(kinds))
    case.say("dense", kind, tuple(q.shape), tuple(k.shape), case.value_dim, options, sorted(operands), sorted(lengths))
    given = {**operands, **lengths}
    by_name = called({name: value for name, value in options.items() if name != "top_left"})
    by_name["alignment"] = "top_left" if "top_left" in options else "bottom_right"
    if kind == "numpy":
        arrays = [x.numpy() for x in (q, k, v)]
        given = {name: x.numpy() for name, x in given.items()}
        out, lse = (torch.from_numpy(x) for x in flashcore.attention(*arrays, layout="bshd", return_lse=True, **by_name, **given))
    elif kind == "attention":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = flashcore.attention(q, k, v, return_lse=True, **by_name, **given)
        out = out.transpose(1, 2)
    elif kind == "out":
        out = case.placed(case.randn(b, sq, case.heads, case.value_dim))
        _, lse = flashcore.attention(q, k, v, layout="bshd", out=out, return_lse=True, **by_name, **given)
    elif kind in ("operator", "function"):
        function = torch.ops.flashcore.forward if kind == "operator" else ft.forward
        out, lse = function(q, k, v, return_lse=True, **by_operator(options), **given)
    else:
        function = fa2.flash_attn_func if kind == "fa2" else fa3.flash_attn_func
        out, lse = function(q, k, v, return_attn_probs=True, **by_flash_attn(options), **given)[:2]
    return judge(case, out, lse, expected)


def packed(case):
    """Packed rows over packed keys, or over pages."""
    used_q, used_k = case.lengths(case.length()), case.lengths(case.length())
    most_q, most_k = max(1, *used_q), max(1, *used_k)
    ends_q, ends_k = np.cumsum([0, *used_q]), np.cumsum([0, *used_k])
    dims = (case.dim, case.value_dim)
    q = case.placed(case.randn(int(ends_q[-1]) + 2, case.heads, case.dim))
    q[int(ends_q[-1]) :] = float("nan")
    keys = [[case.randn(length, case.key_heads, dim) for length in used_k] for dim in dims]
    options, operands, left = case.masks(), {}, [0] * case.batch
    is_paged, table, sources = case.chance(0.3), None, list(range(case.batch))
    if is_paged:
        if case.chance(0.3):
            operands["kv_batch_idx"] = ints(sources := [int(i) for i in case.random.permutation(case.batch)])
        placed = [used_k[sources.index(i)] for i in range(case.batch)]
        (k, v), table = pages_of(case, placed, int(case.random.choice([1, 8, 16, 48, 64])), dims)
        for memory, parts in zip((k, v), keys):
            for source, part in zip(sources, parts):
                memory[cache_rows(memory, table, source, part.shape[0])] = part
    else:
        k, v = (torch.cat([*parts, torch.full((3, case.key_heads, dim), float("nan")).to(case.dtype)]) for parts, dim in zip(keys, dims))
        k, v = case.placed(k), case.placed(v)
    if case.chance(0.25):
        operands["alibi_slopes"] = torch.rand(case.heads)
    if case.chance(0.2):
        operands["sinks"] = torch.randn(case.heads)
    if case.chance(0.2):
        used_k = [int(case.random.integers(0, used + 1)) for used in used_k]
        operands["seqused_k"] = ints(used_k)
    if case.chance(0.2):
        used_q = [int(case.random.integers(0, used + 1)) for used in used_q]
        operands["seqused_q"] = ints(used_q)
    if is_paged and case.chance(0.3):
        left = [int(case.random.integers(0, used + 1)) for used in used_k]
        operands["leftpad_k"] = ints(left)
    expected = []
    for i in range(case.batch):
        rows, own = slice(ends_q[i], ends_q[i] + used_q[i]), slice(left[i], used_k[i])
        right = attend(
            host(q[rows]), *(host(parts[i][own]) for parts in keys), slopes=operands.get("alibi_slopes"),
            sinks=operands.get("sinks"), **options,
        )  # fmt: skip
        expected.append(((rows, (slice(None), rows)), right))
    kinds = ["attention", "operator", "function"]
    if not operands.keys() - {"alibi_slopes"}:
        kinds += ["fa2"] * 3
    if not is_paged and not operands.keys() - {"seqused_q", "seqused_k"}:
        kinds += ["fa3"] * 3
    kind = str(case.random.choice(kinds))
    case.say("packed", kind, "paged" if is_paged else "", used_q, used_k, case.heads, case.key_heads, *dims, options, sorted(operands))
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    lengths = dict(zip(names, (ints(ends_q), ints(ends_k), most_q, most_k)))
    if is_paged:
        operands["block_table" if kind == "fa2" else "page_table"] = table
        if kind != "fa2":
            lengths["cu_seqlens_k"] = None
            operands.setdefault("seqused_k", ints(used_k))
    if kind == "attention":
        out, lse = flashcore.attention(q, k, v, return_lse=True, layout="bshd", **lengths, **called(options), **operands)
    elif kind in ("operator", "function"):
        function = torch.ops.flashcore.varlen_forward if kind == "operator" else ft.varlen_forward
        out, lse = function(q, k, v, return_lse=True, **lengths, **by_operator(options), **operands)
    else:
        function = fa2.flash_attn_varlen_func if kind == "fa2" else fa3.flash_attn_varlen_func
        out, lse = function(q, k, v, return_attn_probs=True, **lengths, **by_flash_attn(options), **operands)[:2]
    return judge(case, out, lse, expected)


def pages_of(case, lengths, page, columns):
    """Caches of shuffled pages, and a table whose unused entries are no pages."""
    width = max(1, max(-(-length // page) for length in lengths)) + int(case.random.integers(0, 3))
    count = sum(-(-length // page) for length in lengths) + 2
    order, taken = case.random.permutation(count), 0
    table = np.full((len(lengths), width), 2**30, np.int32)
    for i, length in enumerate(lengths):
        own = -(-length // page)
        table[i, :own] = order[taken : taken + own]
        taken += own
    caches = [torch.full((count, page, case.key_heads, dim), float("nan")).to(case.dtype) for dim in columns]
    return caches, torch.from_numpy(table)


def cache_rows(cache, table, source, length):
    """Indices of the rows of a sequence in a cache: batches and rows, or pages and rows."""
    rows = np.arange(length)
    if table is None:
        return np.full(length, source), rows
    page = cache.shape[1]
    return table[source].numpy()[rows // page].astype(np.int64), rows % page


def cache(case):
    """Attention over a cache, contiguous or paged, after an append, with rotary embedding, or without."""
    most = case.length()
    before = case.lengths(most)
    sq = case.length(20)
    new = case.length(20) if case.chance(0.7) else 0
    if new:
        case.appends()
    is_paged, is_indexed = case.chance(0.5), case.chance(0.4)
    after = [length + new for length in before]
    sources = list(range(case.batch))
    if is_paged:
        caches, table = pages_of(case, after, int(case.random.choice([1, 8, 16, 48, 64])), (case.dim, case.value_dim))
    else:
        entries = case.batch + (2 if is_indexed else 0)
        rows = max(1, most + new + int(case.random.integers(0, 9)))
        caches, table = [torch.full((entries, rows, case.key_heads, dim), float("nan")).to(case.dtype) for dim in (case.dim, case.value_dim)], None
        caches = [case.placed(x) for x in caches]
        if is_indexed:
            sources = [int(i) for i in case.random.permutation(entries)[: case.batch]]
    keys = [[case.randn(length, case.key_heads, dim) for length in before] for dim in (case.dim, case.value_dim)]
    for memory, parts in zip(caches, keys):
        for source, part in zip(sources, parts):
            memory[cache_rows(memory, table, source, part.shape[0])] = part
    q = case.placed(case.randn(case.batch, sq, case.heads, case.dim))
    fresh = [case.placed(case.randn(case.batch, new, case.key_heads, dim)) for dim in (case.dim, case.value_dim)] if new else None
    options, operands = case.masks(), {}
    if case.chance(0.25):
        operands["alibi_slopes"] = torch.rand(case.heads)
    if case.chance(0.15):
        operands["sinks"] = torch.randn(case.heads)
    left = [0] * case.batch
    if case.chance(0.25):
        left = [int(case.random.integers(0, length + 1)) for length in before]
        operands["leftpad_k"] = ints(left)
    if not is_paged and is_indexed:
        operands["kv_batch_idx"] = ints(sources)
    rotary = None
    if new and case.dim >= 2 and case.chance(0.6):
        half = int(case.random.integers(1, case.dim // 2 + 1))
        angles = torch.rand(max(after) + sq + 1, half) * 6
        rotary = (angles.cos().to(case.dtype), angles.sin().to(case.dtype), case.chance(0.5))
    is_ordered = options.get("causal", False) or max(options.get("window", (-1, -1))) >= 0
    expected, written = [], []
    for i in range(case.batch):
        query = host(q[i])
        own = [host(part[i]) for part in keys]
        added = [host(x[i]) for x in fresh] if fresh else [np.zeros((0, case.key_heads, dim)) for dim in (case.dim, case.value_dim)]
        if rotary:
            positions = before[i] + (np.arange(sq) if is_ordered else np.zeros(sq, np.int64))
            query = rotated(query, rotary, positions)
            added[0] = rotated(added[0], rotary, before[i] + np.arange(new))
        whole = [np.concatenate([x, y]) for x, y in zip(own, added)]
        written.append(whole)
        right = attend(query, whole[0][left[i] :], whole[1][left[i] :], slopes=operands.get("alibi_slopes"), sinks=operands.get("sinks"), **options)
        expected.append(((i, i), right))
    kinds = ["operator", "function", "fa2", "fa2", "fa3", "fa3"]
    if not new:
        kinds += ["attention", "attention"]
    if "alibi_slopes" in operands:
        kinds = [kind for kind in kinds if kind != "fa3"]
    if "sinks" in operands:
        kinds = [kind for kind in kinds if kind not in ("fa2", "fa3")]
    kind = str(case.random.choice(kinds))
    case.say("cache", kind, "paged" if is_paged else "batches", before, new, sq, case.heads, case.key_heads, case.dim, case.value_dim, options, sorted(operands), "rotary" if rotary else "")
    used, added = ints(before), fresh or (None, None)
    tables = dict(zip(("rotary_cos", "rotary_sin", "rotary_interleaved"), rotary)) if rotary else {}
    if kind in ("operator", "function"):
        function = torch.ops.flashcore.kvcache_forward if kind == "operator" else ft.kvcache_forward
        out, lse = function(q, *caches, *added, used, page_table=table, return_lse=True, **tables, **by_operator(options), **operands)
    elif kind == "attention":
        names = {"page_table": table} if is_paged else {}
        out, lse = flashcore.attention(q, *caches, layout="bshd", seqused_k=used, return_lse=True, **names, **called(options), **operands)
    else:
        names = {"kv_batch_idx": "cache_batch_idx", "leftpad_k": "cache_leftpad"}
        operands = {names.get(name, name): value for name, value in operands.items()}
        module, pages = (fa2, "block_table") if kind == "fa2" else (fa3, "page_table")
        out, lse = module.flash_attn_with_kvcache(
            q, *caches, *added, cache_seqlens=used, return_softmax_lse=True, **{pages: table}, **tables, **by_flash_attn(options), **operands
        )  # fmt: skip
    worst = judge(case, out, lse, expected)
    for i, source in enumerate(sources):
        for memory, whole, is_rotated in zip(caches, written[i], (rotary is not None, False)):
            worst = max(worst, compare(case, memory[cache_rows(memory, table, source, after[i])], whole, "cache", not is_rotated))
    return worst


def rotated(x, rotary, positions):
    """[row, head, column] in float64."""
    cos, sin, is_interleaved = host(rotary[0])[positions][:, None], host(rotary[1])[positions][:, None], rotary[2]
    half = cos.shape[-1]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if is_interleaved else (slice(0, half), slice(half, 2 * half))
    result = x.copy()
    result[..., first], result[..., second] = x[..., first] * cos - x[..., second] * sin, x[..., first] * sin + x[..., second] * cos
    return result


def slots(case):
    """`append` of tokens to slots, with norm and rotary embedding."""
    case.appends()
    tokens, count, page = case.length(60), int(case.random.integers(3, 9)), int(case.random.choice([8, 16, 24]))
    tokens = min(tokens, count * page)
    k, v = (case.placed(case.randn(tokens, case.key_heads, dim)) for dim in (case.dim, case.value_dim))
    q = case.placed(case.randn(tokens, case.heads, case.dim)) if case.chance(0.6) else None
    caches = [case.randn(count, page, case.key_heads, dim) for dim in (case.dim, case.value_dim)]
    before = [x.clone() for x in caches]
    slot = case.random.permutation(count * page)[:tokens]
    slot[case.random.random(tokens) < 0.1] = -1
    rotary, positions, norms = None, None, {}
    if case.dim >= 2 and case.chance(0.6):
        angles = torch.rand(50, int(case.random.integers(1, case.dim // 2 + 1))) * 6
        rotary = (angles.cos().to(case.dtype), angles.sin().to(case.dtype), case.chance(0.5))
        positions = case.random.integers(0, 50, tokens)
    if case.chance(0.4):
        norms = {"k_norm": case.randn(case.dim), **({"q_norm": case.randn(case.dim)} if q is not None else {})}
    case.say("slots", tokens, count, page, case.heads, case.key_heads, case.dim, case.value_dim, "rotary" if rotary else "", sorted(norms))

    def right(x, weight):
        x = host(x)
        if weight is not None:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * host(weight)
        return x if rotary is None else rotated(x, rotary, positions)

    tables = {} if rotary is None else {"positions": torch.from_numpy(positions), "cos": rotary[0], "sin": rotary[1], "interleaved": rotary[2]}
    result = ft.append(k, v, *caches, torch.from_numpy(slot.astype(np.int64)), q, **tables, **norms)
    worst = 0.0
    if q is not None:
        worst = compare(case, result, right(q, norms.get("q_norm")), "query")
    is_changed = rotary is not None or bool(norms)
    for memory, old, rows, is_exact in zip(caches, before, (right(k, norms.get("k_norm")), host(v)), (not is_changed, True)):
        expected = host(old).reshape(-1, *rows.shape[1:])
        expected[slot[slot >= 0]] = rows[slot >= 0]
        worst = max(worst, compare(case, memory.flatten(0, 1), expected, "cache", is_exact))
    return worst


def codes(case):
    """FP8 keys and values with scales of every shape, dense."""
    if case.dtype_name == "float64":
        case.dtype_name, case.dtype = "float32", torch.float32
    sq, sk, b = case.length(), case.length(), case.batch
    q = case.placed(case.randn(b, sq, case.heads, case.dim))
    kind = torch.float8_e4m3fn if case.chance(0.6) else torch.float8_e5m2
    k, v = (case.randn(b, sk, case.key_heads, dim, dtype=torch.float32).to(kind) for dim in (case.dim, case.value_dim))
    shapes = [(1,), (case.key_heads,), (b, case.key_heads), (b, sk, case.key_heads)]
    scales = {}
    decoded = [host(k.float()), host(v.float())]
    for index, name in enumerate(("k_scale", "v_scale")):
        if case.chance(0.8):
            shape = shapes[int(case.random.integers(4))]
            scale = scales[name] = torch.rand(shape) + 0.5
            whole = host(scale)
            whole = whole[:, None, :, None] if len(shape) == 2 else whole[..., None]
            decoded[index] = decoded[index] * whole
    options = case.masks()
    case.say("codes", tuple(q.shape), tuple(k.shape), kind, options, {name: tuple(x.shape) for name, x in scales.items()})
    out, lse = flashcore.attention(q, k, v, layout="bshd", return_lse=True, **called(options), **scales)
    expected = [((i, i), attend(host(q[i]), decoded[0][i], decoded[1][i], **options)) for i in range(b)]
    return judge(case, out, lse, expected)


def parts(case):
    """Keys in two parts: `continue_forward`, or `merge` of both; the rows see all keys."""
    if case.dtype_name == "float64":
        case.dtype_name, case.dtype = "float32", torch.float32
    sq, sk, b = case.length(), max(2, case.length()), case.batch
    q = case.placed(case.randn(b, sq, case.heads, case.dim))
    k, v = (case.placed(case.randn(b, sk, case.key_heads, dim)) for dim in (case.dim, case.value_dim))
    cut = int(case.random.integers(1, sk))
    options = {name: value for name, value in case.masks().items() if name in ("scale", "softcap")}
    expected = [((i, i), attend(host(q[i]), host(k[i]), host(v[i]), **options)) for i in range(b)]
    first = ft.forward(q, k[:, :cut], v[:, :cut], return_lse=True, **options)
    if case.chance(0.5):
        case.say("continue", tuple(q.shape), tuple(k.shape), cut, options)
        out, lse = first
        ft.continue_forward(q, k[:, cut:], v[:, cut:], out, lse, **options)
        return judge(case, out, lse, expected)
    case.say("merge", tuple(q.shape), tuple(k.shape), cut, options)
    second = ft.forward(q, k[:, cut:], v[:, cut:], return_lse=True, **options)
    both = [torch.stack([x, y]) for x, y in zip(first, second)]
    out, lse = ft.merge(both[0].flatten(1, 2), both[1].transpose(1, 2).flatten(2))
    return judge(case, out.unflatten(0, (b, sq)), lse.unflatten(1, (b, sq)).transpose(0, 1), expected)


KINDS = {dense: 0.34, packed: 0.22, cache: 0.26, slots: 0.06, codes: 0.07, parts: 0.05}


def run(seed, number):
    """Runs one case: the kind of call, the worst error over what is allowed, and the words of what is wrong or None."""
    case = Case(seed, number)
    kind = case.random.choice(list(KINDS), p=list(KINDS.values()))
    try:
        with np.errstate(invalid="ignore"):
            return kind.__name__, kind(case), None
    except (AssertionError, flashcore.FlashcoreError) as error:
        verdict = "refused" if isinstance(error, flashcore.FlashcoreError) else "wrong"
        return kind.__name__, 0.0, f"{verdict}: case {number} of seed {seed}: {case.dtype_name} {' '.join(case.said)}: {error}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"), help="a fresh one unless given")
    parser.add_argument("--case", type=int, help="one case alone")
    options = parser.parse_args()
    numbers = range(options.cases) if options.case is None else [options.case]
    start, counts, worst, wrong = time.time(), {}, 0.0, []
    torch.set_grad_enabled(False)
    for number in numbers:
        kind, ratio, found = run(options.seed, number)
        counts[kind] = counts.get(kind, 0) + 1
        worst = max(worst, ratio)
        if found:
            wrong.append(found)
            print(found, flush=True)
    print(
        f"seed {options.seed}: {len(numbers)} cases, {len(wrong)} wrong or refused, worst error {worst:.2f} of what is allowed, "
        f"{time.time() - start:.0f} s; " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) + ("" if APPENDS_FLOAT64 else "; the library has no appends of float64")
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
