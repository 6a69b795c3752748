"""The cost of batch invariance: the plan's chunks, fixed for all steps, beside the best split of the keys of one step.

A plan is made from upper bounds, and the length of its chunks follows from those, so that the bits of a row do not depend on
the batch. Here the plan is for sequences of at most 32k keys, or of exactly those of the step; the steps have fewer. "free"
is the fastest of other chunk lengths and of fixed numbers of splits, chosen for the step by timing all of them: what a
library could at best have that chooses its split for each batch, as FlashAttention-3 chooses num_splits.
"""

import math
import re
from dataclasses import dataclass

import torch
from serving_cases import COLD_BYTES, HOT_BYTES, LARGEST_ERROR, RMS_ERROR, Case, Reference, arrange, size

PAGE = 16
MOST_KEYS = 32768
CHUNKS = [64 * 2**power for power in range(10)]
SPLITS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
# Persistent CTAs of an SM, as the plan has them.
CTAS_PER_SM = 2


@dataclass
class SplitCase:
    """Decode over pages; `bound` is the most keys that the plan allows a sequence."""

    keys: list
    bound: int
    suite = "splits"

    @property
    def name(self):
        lens = [f"{self.keys.count(keys)} x {size(keys)}" for keys in sorted(set(self.keys), reverse=True)]
        return f"{' + '.join(lens)}, plan for {size(self.bound)}"

    def attention(self):
        return Case(self.suite, self.name, [1] * len(self.keys), self.keys, "paged", page=PAGE)


def cases(quick):
    shapes = [(1, 1024), (1, 8192), (8, 1024), (8, 8192), (32, 1024), (32, 8192), (128, 2048)]
    for batch, keys in [(1, 8192), (32, 1024)] if quick else shapes:
        for bound in (keys, MOST_KEYS):
            yield SplitCase([keys] * batch, bound)
    if not quick:
        yield SplitCase([MOST_KEYS] * 8, MOST_KEYS)
        yield SplitCase([MOST_KEYS] + [1024] * 31, MOST_KEYS)


def configs(description, num_sms, longest):
    """Configs that divide keys otherwise than the plan of this description does, but are the same in the rest."""
    found = re.search(r"kernel flashcore_(\w+?)_\d+persistent_\d+chunk", description)
    if not found:
        return []
    base = found[1].replace("_", "-")
    chunks = [keys for keys in CHUNKS if keys < 2 * longest]
    plain = base.removesuffix("-pdl")
    names = [f"{base}-{CTAS_PER_SM * num_sms}persistent-{keys}chunk" for keys in chunks]
    return names + [plain if splits == 1 else f"{plain}-{splits}splits" for splits in SPLITS]


def widened(kv, bound):
    """The same pages in a table for sequences of `bound` keys; unused entries are far outside of the cache."""
    table = kv.operands["page_table"]
    wide = torch.full((table.shape[0], math.ceil(bound / PAGE)), 2**30, dtype=torch.int32, device=table.device)
    wide[:, : table.shape[1]] = table
    kv.operands["page_table"], kv.max_k = wide, wide.shape[1] * PAGE
    return kv


def measure(bench, case, flashcore_call, num_sms):
    """One row of a record: the plan's own time, that of the best other split, and the cost in percent."""
    attention = case.attention()
    shape = sum(case.keys), attention.kv_heads, attention.dim
    q = torch.randn(attention.batch, attention.heads, attention.dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    kv, reference = widened(arrange("paged", k, v, case.keys, PAGE), case.bound), Reference(attention, q, k, v)
    query = q.view(attention.batch, 1, attention.heads, attention.dim)
    out = torch.full_like(query, math.nan)

    def build(config, copy):
        return flashcore_call(bench.flashcore, attention, query, copy, None, out, config)

    build(None, kv)()
    description = next(reversed(bench.flashcore.plans.values())).describe()
    good, left_out = {}, {}
    for config in (None, *configs(description, num_sms, max(case.keys))):
        name = config or "flashcore"
        try:
            out.fill_(math.nan)
            build(config, kv)()
            torch.cuda.synchronize()
        except bench.refused as refusal:
            left_out[name] = f"refused: {refusal}"
            continue
        error = reference.error(out)
        if error[0] <= RMS_ERROR and error[1] <= LARGEST_ERROR:
            good[name] = config
        else:
            left_out[name] = "WRONG: error {:.4f} rms, {:.4f} largest, of the expected output's".format(*error)
    state = "hot" if attention.kv_bytes() <= HOT_BYTES else "cold"
    count = 1 if state == "hot" else max(1, math.ceil(COLD_BYTES / attention.kv_bytes()))
    copies = [kv, *(kv.clone() for _ in range(count - 1))]
    calls = {name: lambda config=config: [build(config, copy) for copy in copies] for name, config in good.items()}
    medians, _, failed = bench.timed(calls, attention.floor(), count)
    row = {"suite": case.suite, "name": case.name, "mask": "full", "l2": state, "floor": attention.floor()}
    row |= {"heads": f"{attention.heads}/{attention.kv_heads} x {attention.dim}", "plan": description}
    row |= {"kind": "paged", "page": PAGE, "k_lens": [[keys, case.keys.count(keys)] for keys in dict.fromkeys(case.keys)]}
    row |= {"configs": medians, "microseconds": {}, "left_out": {**left_out, **failed}}
    if "flashcore" in medians:
        # The least of many times is less than its config's: the two are timed once more, by themselves.
        best = min(medians, key=medians.get)
        pair = {"flashcore": calls["flashcore"], "free": calls[best]}
        row["microseconds"], row["samples"], _ = bench.timed(pair, attention.floor(), count)
        ours, free = (row["microseconds"][name] for name in pair)
        row |= {"best": best, "cost_percent": 100 * (ours / free - 1)}
    yield row
