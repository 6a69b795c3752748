"""Append + RoPE by slot_mapping: the launch of flashcore, PyTorch's plain operations beside it, and what they must write.

PyTorch has no such operation. "torch" is what a program writes without one: an indexing of the tables, the rotation in f32
and `index_copy_`, ten kernels or so in one graph, a baseline and no rival. "torch-compiled" is the same under torch.compile.
"""

import math
from ctypes import POINTER, byref, c_int32, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from serving_cases import COLD_BYTES, HOT_BYTES, LARGEST_ERROR, MEMORY_RATE, RMS_ERROR, Case, Kv, Reference, arrange

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
MAX_POSITION = 32768
# Slots of the cache for each token of a launch: most of the cache stays as it is.
SPARE = 4


@dataclass
class AppendCase:
    """Tokens that are appended in one launch: NeoX rotary embedding over all columns, with the query, pages of 16."""

    name: str
    tokens: int
    suite = "append"

    def bytes(self):
        """Bytes that one launch has to read and to write."""
        rows = 2 * 2 * self.tokens * (HEADS + 2 * KV_HEADS) * DIM
        # Cosines and sines of a position, the position and the slot.
        return rows + self.tokens * (2 * 2 * DIM // 2 + 8 + 8)

    def floor(self):
        return self.bytes() / MEMORY_RATE * 1e6


def cases(quick):
    for tokens in (64, 8192):
        yield AppendCase(f"{tokens} tokens, pages of {PAGE}", tokens)


def tables(device):
    """Cosines and sines [position, column] of base 10,000 in bf16."""
    frequencies = 10000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = torch.arange(MAX_POSITION, dtype=torch.float64)[:, None] * frequencies
    return tuple(table.to(torch.bfloat16).to(device) for table in (angles.cos(), angles.sin()))


class Tensors:
    """What a launch reads and writes."""

    def __init__(self, tokens, device, seed):
        source = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.query, self.query_output = random(tokens, HEADS, DIM), random(tokens, HEADS, DIM)
        self.key, self.value = (random(tokens, KV_HEADS, DIM) for _ in range(2))
        self.num_pages = math.ceil(SPARE * tokens / PAGE)
        self.key_cache, self.value_cache = (random(self.num_pages, PAGE, KV_HEADS, DIM) for _ in range(2))
        slots = torch.randperm(self.num_pages * PAGE, generator=source)[:tokens]
        self.slot_mapping = slots.to(device)
        self.positions = torch.randint(MAX_POSITION, (tokens,), generator=source).to(device)
        self.cos, self.sin = tables(device)

    def clone(self):
        """A copy in other memory, slots, positions and tables included."""
        other = object.__new__(Tensors)
        other.__dict__ = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(self).items()
        }
        return other


OPERANDS = ("query", "query_output", "key", "value", "key_cache", "value_cache", "slot_mapping", "positions", "cos", "sin")


def rotated(rows, positions, tensors):
    """NeoX: columns i and i + DIM / 2 of each head turn by the position's angle, in the type of the rows."""
    cos, sin = (table[positions].to(rows.dtype)[:, None] for table in (tensors.cos, tensors.sin))
    low, high = rows[..., : DIM // 2], rows[..., DIM // 2 :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def plain(tensors):
    """The append in PyTorch's operations."""
    keys, values = (cache.view(-1, KV_HEADS, DIM) for cache in (tensors.key_cache, tensors.value_cache))
    query, key = (rotated(rows.float(), tensors.positions, tensors) for rows in (tensors.query, tensors.key))
    tensors.query_output.copy_(query)
    keys.index_copy_(0, tensors.slot_mapping, key.to(keys.dtype))
    values.index_copy_(0, tensors.slot_mapping, tensors.value)


class AppendPlan:
    """A plan of an append; `flashcore` is the loaded library."""

    def __init__(self, flashcore, tokens, num_pages):
        self.flashcore, self.library = flashcore, flashcore.library
        problem_t = flashcore.structs["flashcore_append_problem_t"]
        init = self.library.flashcore_append_problem_init
        init.restype, init.argtypes = c_int32, [POINTER(problem_t)] + [c_uint64] * 6 + [c_int32]
        constant, problem = flashcore.constants, problem_t()
        sizes = tokens, HEADS, KV_HEADS, DIM, num_pages, PAGE
        flashcore.check(init(byref(problem), *sizes, constant["FLASHCORE_DTYPE_BF16"]))
        problem.rotary.style, problem.rotary.dim = constant["FLASHCORE_ROTARY_NEOX"], DIM
        problem.rotary.max_position, problem.rotary.table_stride = MAX_POSITION, DIM // 2
        self.handle = c_void_p()
        device = constant["FLASHCORE_DEVICE_CUDA"]
        flashcore.check(self.library.flashcore_plan_create(byref(problem), device, 0, None, byref(self.handle)))

    def call(self, tensors):
        """A launch on the current stream. The list is filled once, as an engine does."""
        names = {"key": "new_key", "value": "new_value"}
        entries = [self.flashcore.entry(names.get(name, name), getattr(tensors, name)) for name in OPERANDS]
        given = self.flashcore.list(entries)

        def launch():
            stream = torch.cuda.current_stream().cuda_stream
            self.flashcore.check(self.library.flashcore_launch(self.handle, stream, given, len(entries)))

        # The list has addresses only; these keep the memory and the plan.
        launch.keeps = tensors, self
        return launch

    def __del__(self):
        if getattr(self, "handle", None):
            self.library.flashcore_plan_destroy(self.handle)


def complaint(before, after):
    """Why `after` is not `before` with the tokens appended; none if it is.

    Values, rows of the caches that no slot names, and the inputs keep their bits. Rotated numbers are as far from their f64
    value as one rounding to bf16 and two of f32 bring them.
    """
    taken = before.slot_mapping >= 0
    slots = before.slot_mapping[taken]

    def bits(tensor):
        return tensor.contiguous().view(torch.int16)

    for name in ("query", "key", "value"):
        if not torch.equal(bits(getattr(before, name)), bits(getattr(after, name))):
            return f"{name} has changed"
    expected = before.value_cache.clone().view(-1, KV_HEADS, DIM)
    expected[slots] = before.value[taken]
    found = after.value_cache.view(-1, KV_HEADS, DIM)
    if not torch.equal(bits(expected), bits(found)):
        wrong = (bits(expected) != bits(found)).any(-1).any(-1).nonzero().flatten()
        return f"the value cache differs in {wrong.numel()} rows, first in row {wrong[0].item()}"
    keys, untouched = after.key_cache.view(-1, KV_HEADS, DIM), torch.ones(len(found), dtype=torch.bool)
    untouched = untouched.to(slots.device)
    untouched[slots] = False
    if not torch.equal(bits(before.key_cache.view_as(keys)[untouched]), bits(keys[untouched])):
        return "the key cache has changed in rows that no slot names"
    for name, rows, positions, found in (
        ("key cache", before.key[taken], before.positions[taken], keys[slots]),
        ("query output", before.query, before.positions, after.query_output),
    ):
        exact = rotated(rows.double(), positions, before)
        size = rows.double().abs().roll(DIM // 2, -1) + rows.double().abs()
        allowed = 2.0**-8 * exact.abs() + 2.0**-22 * size + 1e-38
        error = (found.double() - exact).abs()
        # A comparison with NaN is false, so NaN counts as wrong.
        if not (error <= allowed).all():
            row = (~(error <= allowed)).any(-1).any(-1).nonzero()[0].item()
            return f"the {name} is wrong, first at token {row}: error {error[row].max():.4f}"
    return None


def poisoned(tensors):
    """A copy with NaN in the caches and the query output, and every fifth slot -1."""
    tensors = tensors.clone()
    for tensor in (tensors.key_cache, tensors.value_cache, tensors.query_output):
        tensor.fill_(math.nan)
    tensors.slot_mapping[::5] = -1
    return tensors


def wrong(build, tensors, skips):
    """Why a call does not append; none if it does. `skips`: slots of -1 are tried too."""
    for before in (tensors, poisoned(tensors)) if skips else (tensors,):
        after = before.clone()
        build(after)()
        torch.cuda.synchronize()
        reason = complaint(before, after)
        if reason:
            return f"WRONG: {reason}"
    return None


def builders(flashcore, case, num_pages, peers):
    """Functions from tensors to calls, by name."""
    plan = AppendPlan(flashcore, case.tokens, num_pages)
    found = {"flashcore": plan.call, "torch": lambda tensors: lambda: plain(tensors)}
    if "torch-compiled" in peers:
        compiled = torch.compile(plain, dynamic=False)
        found["torch-compiled"] = lambda tensors: lambda: compiled(tensors)
    return found


def measure(bench, case, peers):
    """Rows of a record: cold, and hot where L2 holds what a launch touches."""
    tensors = Tensors(case.tokens, "cuda", seed=case.tokens)
    good, left_out = {}, {}
    for name, build in builders(bench.flashcore, case, tensors.num_pages, peers).items():
        # index_copy_ has no slot that it skips.
        reason = wrong(build, tensors, skips=name == "flashcore")
        if reason:
            left_out[name] = reason
        else:
            good[name] = build
    states = {"hot": 1} if case.bytes() <= HOT_BYTES else {}
    states["cold"] = max(1, math.ceil(COLD_BYTES / case.bytes()))
    one = {"suite": case.suite, "name": case.name, "mask": "neox", "heads": f"{HEADS}/{KV_HEADS} x {DIM}"}
    one |= {"tokens": case.tokens, "floor": case.floor(), "bytes": case.bytes()}
    for state, count in states.items():
        copies = [tensors, *(tensors.clone() for _ in range(count - 1))]
        calls = {name: (lambda build=build: [build(copy) for copy in copies]) for name, build in good.items()}
        medians, samples, failed = bench.timed(calls, case.floor(), count)
        row = {**one, "l2": state, "microseconds": medians, "samples": samples, "left_out": {**left_out, **failed}}
        if "flashcore" in medians:
            row["terabytes_per_second"] = case.bytes() / medians["flashcore"] / 1e6
        yield row


@dataclass
class StepCase:
    """Append + RoPE, then decode over the same paged cache, in one graph: beside decode alone."""

    name: str
    batch: int
    keys: int
    suite = "append"

    def attention(self):
        return Case("append", self.name, [1] * self.batch, [self.keys] * self.batch, "paged", page=PAGE)


def step_cases(quick):
    for batch, keys in ((64, 1024),) if quick else ((1, 1024), (64, 1024), (64, 8192)):
        yield StepCase(f"append + decode {batch} x {keys // 1024}k, pages of {PAGE}", batch, keys)


class Step:
    """The tensors and plans of a step."""

    def __init__(self, flashcore, flashcore_call, case):
        self.flashcore, self.flashcore_call, self.attention = flashcore, flashcore_call, case.attention()
        shape = sum(self.attention.k_lens), KV_HEADS, DIM
        self.k, self.v = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.kv = arrange("paged", self.k, self.v, self.attention.k_lens, PAGE)
        self.tensors = Tensors(case.batch, "cuda", seed=case.batch)
        # The last key of each sequence is the new one.
        last, table = case.keys - 1, self.kv.operands["page_table"].long()
        self.tensors.slot_mapping = table[:, last // PAGE] * PAGE + last % PAGE
        self.tensors.key_cache, self.tensors.value_cache = self.kv.k, self.kv.v
        self.plan = AppendPlan(flashcore, case.batch, self.kv.k.shape[0])
        self.out = torch.full((case.batch, 1, HEADS, DIM), math.nan, device="cuda", dtype=torch.bfloat16)

    def calls(self, tensors):
        """Append and decode, and decode alone, over the caches of `tensors`."""
        kv = Kv("paged", tensors.key_cache, tensors.value_cache, self.kv.max_k, self.kv.operands, PAGE)
        query = tensors.query_output.view(self.out.shape)
        append = self.plan.call(tensors)
        attend = self.flashcore_call(self.flashcore, self.attention, query, kv, None, self.out)

        def both():
            append()
            attend()

        return both, attend

    def wrong(self):
        """Why a step is wrong; none if it is right."""
        after = self.tensors.clone()
        self.calls(after)[0]()
        torch.cuda.synchronize()
        reason = complaint(self.tensors, after)
        if reason:
            return f"WRONG: {reason}"
        keys, values = self.k.clone(), self.v.clone()
        ends = torch.tensor(self.attention.k_lens, device="cuda").cumsum(0) - 1
        for packed, cache in ((keys, after.key_cache), (values, after.value_cache)):
            packed[ends] = cache.view(-1, KV_HEADS, DIM)[after.slot_mapping]
        error = Reference(self.attention, after.query_output, keys, values).error(self.out)
        if not (error[0] <= RMS_ERROR and error[1] <= LARGEST_ERROR):
            return "WRONG: error of decode {:.4f} rms, {:.4f} largest, of the expected output's".format(*error)
        return None


def measure_step(bench, case, flashcore_call):
    """Rows of a record: the time of append and decode, and of decode alone."""
    step = Step(bench.flashcore, flashcore_call, case)
    reason, attention = step.wrong(), step.attention
    left_out = {"flashcore": reason} if reason else {}
    states = {"hot": 1} if attention.kv_bytes() <= HOT_BYTES else {}
    states["cold"] = max(1, math.ceil(COLD_BYTES / attention.kv_bytes()))
    one = {"suite": case.suite, "name": case.name, "mask": "neox", "heads": f"{HEADS}/{KV_HEADS} x {DIM}"}
    one |= {"tokens": case.batch, "floor": attention.floor() + AppendCase("", case.batch).floor()}
    for state, count in states.items():
        copies = [step.tensors, *(step.tensors.clone() for _ in range(count - 1))]
        both, alone = zip(*(step.calls(copy) for copy in copies))
        named = {} if reason else {"flashcore": lambda: list(both), "flashcore-decode": lambda: list(alone)}
        medians, samples, failed = bench.timed(named, one["floor"], count)
        row = {**one, "l2": state, "microseconds": medians, "samples": samples, "left_out": {**left_out, **failed}}
        if len(medians) == 2:
            row["added_microseconds"] = medians["flashcore"] - medians["flashcore-decode"]
        yield row
