"""Append + RoPE inside of the decode launch: one launch, two launches, and decode alone.

Decode alone attends the same keys and does not append: the difference is the cost of the append. Two launches are the same
plan made with FLASHCORE_FUSED_APPEND=off. Results of one launch and of two must have the same bits.
"""

import math
import os
from ctypes import POINTER, byref, c_int32, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from serving_append import DIM, HEADS, KV_HEADS, MAX_POSITION, PAGE, AppendCase, rotated, tables
from serving_cases import COLD_BYTES, HOT_BYTES, LARGEST_ERROR, RMS_ERROR, Case, Kv, Reference, arrange

VARIABLE = "FLASHCORE_FUSED_APPEND"


@dataclass
class StepCase:
    """One new key for each sequence, NeoX over all columns, pages of 16."""

    name: str
    batch: int
    keys: int
    suite = "append"

    def attention(self):
        return Case("append", self.name, [1] * self.batch, [self.keys] * self.batch, "paged", page=PAGE)


def cases(quick):
    for batch, keys in ((64, 1024),) if quick else ((1, 1024), (1, 8192), (8, 8192), (32, 1024), (64, 1024), (64, 8192), (128, 8192)):
        yield StepCase(f"append in decode {batch} x {keys // 1024}k, pages of {PAGE}", batch, keys)


class KvCachePlan:
    """A plan of a growing KV cache, made with the append inside of the launch or ahead of it."""

    def __init__(self, flashcore, case, kv, fused):
        self.flashcore, self.library = flashcore, flashcore.library
        problem_t = flashcore.structs["flashcore_kvcache_problem_t"]
        init = self.library.flashcore_kvcache_problem_init
        init.restype, init.argtypes = c_int32, [POINTER(problem_t), POINTER(flashcore.problem), c_uint64]
        constant, attention, problem = flashcore.constants, flashcore.problem(), problem_t()
        bf16 = constant["FLASHCORE_DTYPE_BF16"]
        flashcore.check(self.library.flashcore_attention_problem_init(byref(attention), case.batch, HEADS, 1, DIM, bf16))
        attention.key_heads, attention.key_length = KV_HEADS, kv.max_k
        attention.layout = constant["FLASHCORE_LAYOUT_BSHD"]
        table = kv.operands["page_table"]
        sizes = {"page_size": PAGE, "num_pages": kv.k.shape[0], "table_width": table.shape[1]}
        flashcore.fill(attention, {**sizes, "table_stride": table.stride(0), "seqused_k": 1, "page_table": 1})
        flashcore.check(init(byref(problem), byref(attention), 1))
        problem.rotary.style, problem.rotary.dim = constant["FLASHCORE_ROTARY_NEOX"], DIM
        problem.rotary.max_position, problem.rotary.table_stride = MAX_POSITION, DIM // 2
        self.handle = c_void_p()
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "on" if fused else "off"
        try:
            device = constant["FLASHCORE_DEVICE_CUDA"]
            create = self.library.flashcore_plan_create
            flashcore.check(create(byref(problem), device, 0, None, byref(self.handle)))
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before

    def call(self, tensors, out):
        """A launch on the current stream. The list is filled once, as an engine does."""
        names = {"key": "key_cache", "value": "value_cache"}
        entries = [self.flashcore.entry(names.get(name, name), tensors[name]) for name in OPERANDS]
        entries.append(self.flashcore.entry("output", out))
        # A captured launch brings its own; those of one stream or graph may share it.
        words = math.ceil(self.library.flashcore_plan_workspace_bytes(self.handle) / 4)
        workspace = torch.zeros(words, dtype=torch.int32, device="cuda")
        if words:
            entries.append(self.flashcore.entry("workspace", workspace))
        given = self.flashcore.list(entries)

        def launch():
            stream = torch.cuda.current_stream().cuda_stream
            self.flashcore.check(self.library.flashcore_launch(self.handle, stream, given, len(entries)))

        # The list has addresses only; these keep the memory and the plan.
        launch.keeps = tensors, out, workspace, self
        return launch

    def __del__(self):
        if getattr(self, "handle", None):
            self.library.flashcore_plan_destroy(self.handle)


OPERANDS = ("query", "key", "value", "seqused_k", "page_table", "new_key", "new_value", "cos", "sin")


class Step:
    """The tensors and plans of a step."""

    def __init__(self, flashcore, flashcore_call, case):
        self.flashcore, self.flashcore_call, self.case = flashcore, flashcore_call, case
        self.attention = case.attention()
        shape = sum(self.attention.k_lens), KV_HEADS, DIM

        def random(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.k, self.v = random(*shape), random(*shape)
        self.kv = arrange("paged", self.k, self.v, self.attention.k_lens, PAGE)
        cos, sin = tables("cuda")
        self.tensors = {
            "query": random(case.batch, 1, HEADS, DIM),
            "key": self.kv.k,
            "value": self.kv.v,
            # The last key of each sequence is the new one.
            "seqused_k": torch.full((case.batch,), case.keys - 1, device="cuda", dtype=torch.int32),
            "page_table": self.kv.operands["page_table"],
            "new_key": random(case.batch, 1, KV_HEADS, DIM),
            "new_value": random(case.batch, 1, KV_HEADS, DIM),
            "cos": cos,
            "sin": sin,
        }
        self.plans = {fused: KvCachePlan(flashcore, case, self.kv, fused) for fused in (True, False)}

    def copy(self):
        """The tensors in other memory."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def out(self):
        return torch.full((self.case.batch, 1, HEADS, DIM), math.nan, device="cuda", dtype=torch.bfloat16)

    def decode(self, tensors, out):
        """Decode alone, over all keys."""
        kv = Kv("paged", tensors["key"], tensors["value"], self.kv.max_k, self.kv.operands, PAGE)
        return self.flashcore_call(self.flashcore, self.attention, tensors["query"], kv, None, out)

    def wrong(self):
        """Why a step is wrong; none if it is right."""
        results = {}
        for fused, plan in self.plans.items():
            tensors, out = self.copy(), self.out()
            plan.call(tensors, out)()
            torch.cuda.synchronize()
            results[fused] = [rows.view(torch.int16) for rows in (tensors["key"], tensors["value"], out)]
        for name, one, two in zip(("key cache", "value cache", "output"), results[True], results[False]):
            if not torch.equal(one, two):
                return f"WRONG: the {name} of one launch and of two differ"
        positions = self.tensors["seqused_k"].long()
        turned = [rotated(self.tensors[name][:, 0].float(), positions, Tables(self.tensors)) for name in ("query", "new_key")]
        query, key = (rows.to(torch.bfloat16) for rows in turned)
        keys, values = self.k.clone(), self.v.clone()
        ends = torch.tensor(self.attention.k_lens, device="cuda").cumsum(0) - 1
        keys[ends], values[ends] = key, self.tensors["new_value"][:, 0]
        out = results[True][2].view(torch.bfloat16)
        error = Reference(self.attention, query, keys, values).error(out)
        if not (error[0] <= RMS_ERROR and error[1] <= LARGEST_ERROR):
            return "WRONG: error {:.4f} rms, {:.4f} largest, of the expected output's".format(*error)
        return None


class Tables:
    """Cosines and sines by name, as `rotated` takes them."""

    def __init__(self, tensors):
        self.cos, self.sin = tensors["cos"], tensors["sin"]


def measure(bench, case, flashcore_call):
    """Rows of a record: one launch, two launches, decode alone."""
    step = Step(bench.flashcore, flashcore_call, case)
    reason, attention = step.wrong(), step.attention
    left_out = {"flashcore": reason} if reason else {}
    states = {"hot": 1} if attention.kv_bytes() <= HOT_BYTES else {}
    states["cold"] = max(1, math.ceil(COLD_BYTES / attention.kv_bytes()))
    one = {"suite": case.suite, "name": case.name, "mask": "neox", "heads": f"{HEADS}/{KV_HEADS} x {DIM}"}
    one |= {"tokens": case.batch, "floor": attention.floor() + AppendCase("", case.batch).floor()}
    for state, count in states.items():
        copies = [(step.copy(), step.out()) for _ in range(count)]
        named = {
            "flashcore": lambda: [step.plans[True].call(*copy) for copy in copies],
            "flashcore-two-launches": lambda: [step.plans[False].call(*copy) for copy in copies],
            "flashcore-decode": lambda: [step.decode(*copy) for copy in copies],
        }
        medians, samples, failed = bench.timed({} if reason else named, one["floor"], count)
        row = {**one, "l2": state, "microseconds": medians, "samples": samples, "left_out": {**left_out, **failed}}
        if len(medians) == len(named):
            row["added_microseconds"] = medians["flashcore"] - medians["flashcore-decode"]
            row["two_launches_add_microseconds"] = medians["flashcore-two-launches"] - medians["flashcore-decode"]
        yield row
