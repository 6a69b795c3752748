"""Holds a record of serving.py against what was aimed at on an H200, one line for each aim.

    python3 bench/peers/serving_targets.py serving.json

Times are those of calls on the same tensors where L2 holds them, else of calls that find L2 cold. An aim without rows is
"not measured", which is no pass. Exits with 1 unless every aim is met.
"""

import argparse
import json
import math
import sys
from pathlib import Path


def mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def same_tensors(rows):
    """One row of each case: hot if it was measured so."""
    kept = {}
    for row in sorted(rows, key=lambda row: row["l2"] != "hot"):
        kept.setdefault((row["name"], row["mask"]), row)
    return list(kept.values())


class Aim:
    """A bound of one figure of the rows of a suite."""

    def __init__(self, text, suite, figure, bound, at_least=True, where=None, needs=None):
        self.text, self.suite, self.figure, self.bound = text, suite, figure, bound
        self.at_least, self.where, self.needs = at_least, where or (lambda row: True), needs

    def judge(self, rows):
        """Whether it is met, none without rows, and the figure with its bound."""
        rows = same_tensors(row for row in rows if row["suite"] == self.suite and self.where(row))
        rows = [row for row in rows if "flashcore" in row["microseconds"] and (not self.needs or self.needs in row)]
        sign = ">=" if self.at_least else "<="
        if not rows:
            return None, f"not measured, aim {sign} {self.bound:g}"
        figure = self.figure(rows)
        met = figure >= self.bound if self.at_least else figure <= self.bound
        return met, f"{figure:.3f}, aim {sign} {self.bound:g}, of {len(rows)}"


def of(key):
    return lambda rows: [row[key] for row in rows]


def geometric(key):
    return lambda rows: mean(of(key)(rows))


def lowest(key):
    return lambda rows: min(of(key)(rows))


def highest(key):
    return lambda rows: max(of(key)(rows))


def microseconds(rows):
    return max(row["microseconds"]["flashcore"] for row in rows)


def over_floor(rows):
    return max(row["microseconds"]["flashcore"] / row["floor"] for row in rows)


def added_by_pages(rows):
    return max(row["microseconds"]["flashcore"] - row["microseconds"]["flashcore-rect"] for row in rows)


def rate(rows):
    return min(row["terabytes_per_second"] for row in rows)


def speedup(name):
    return lambda rows: min(row["microseconds"][name] / row["microseconds"]["flashcore"] for row in rows)


def named(*parts):
    return lambda row: all(part in row["name"] for part in parts)


def batch_1(row):
    return row["name"].startswith("1 x")


def batches(row):
    return not batch_1(row)


def mask(name, *parts):
    return lambda row: row["mask"] == name and named(*parts)(row)


AIMS = [
    Aim("decode, best peer over ours, mean", "decode", geometric("ratio"), 1.08, needs="ratio"),
    Aim("decode, best peer over ours, lowest", "decode", lowest("ratio"), 1.0, needs="ratio"),
    Aim("decode, 1 x 1k, us", "decode", microseconds, 5.5, False, lambda row: row["name"] == "1 x 1k"),
    Aim("pages, batch 1, us over contiguous", "paged", added_by_pages, 0.7, False, batch_1, "over_rect"),
    Aim("pages, batch 8 and more, over contiguous", "paged", highest("over_rect"), 1.02, False, batches, "over_rect"),
    Aim("pages, FA3 over ours, mean", "paged", geometric("ratio_fa3"), 1.25, needs="ratio_fa3"),
    Aim("1 x 128k + 31 x 4k, over the time of its bytes", "mixed", over_floor, 1.12, False),
    Aim("16 to 256 rows, FA3 over ours, mean", "rows", geometric("ratio_fa3"), 1.10, needs="ratio_fa3"),
    Aim("16 to 256 rows, FA3 over ours, lowest", "rows", lowest("ratio_fa3"), 1.0, needs="ratio_fa3"),
    Aim("chunks of 512 and 2,048 rows, FA3 over ours, lowest", "chunks", lowest("ratio_fa3"), 1.03, needs="ratio_fa3"),
    Aim(
        "varlen, FA3 over ours, mean",
        "varlen",
        geometric("ratio_fa3"),
        1.15,
        where=lambda row: row["name"] != "8192 x 32",
        needs="ratio_fa3",
    ),
    Aim(
        "varlen, FA3 over ours, lowest",
        "varlen",
        lowest("ratio_fa3"),
        1.0,
        where=lambda row: row["name"] != "8192 x 32",
        needs="ratio_fa3",
    ),
    Aim("varlen, equal lengths, over rectangular", "varlen", highest("over_rect"), 1 / 0.97, False, needs="over_rect"),
    Aim("8,192 sequences of 32 rows, over floor", "varlen", over_floor, 2.5, False, named("8192 x 32")),
    Aim("prefill over pages, over contiguous", "prefill", highest("over_rect"), 1.03, False, needs="over_rect"),
    Aim("append of 64 tokens, us", "append", microseconds, 2.5, False, lambda row: row["name"].startswith("64 tokens")),
    Aim("append of 8,192 tokens, TB/s", "append", rate, 4.0, True, named("8192 tokens"), "terabytes_per_second"),
    Aim(
        "append inside of decode, us added",
        "append",
        highest("added_microseconds"),
        0.5,
        False,
        lambda row: "two_launches_add_microseconds" in row,
        "added_microseconds",
    ),
    Aim("batch invariance, % on average", "splits", lambda rows: sum(of("cost_percent")(rows)) / len(rows), 3, False, needs="cost_percent"),
    Aim(
        "FP8 cache, batch 8 and more, over bf16", "fp8-cache", highest("over_bf16"), 0.58, False, batches, "over_bf16"
    ),
    Aim("FP8 cache, 1 x 1k, us", "fp8-cache", microseconds, 5.5, False, lambda row: row["name"] == "1 x 1k"),
    Aim("FP8 cache, 1 x 32k, us", "fp8-cache", microseconds, 20, False, lambda row: row["name"] == "1 x 32k"),
    Aim("FP8 full 16k, TFLOP/s", "fp8", lowest("teraflops"), 1000, True, mask("full", "x16384x128"), "teraflops"),
    Aim("FP8 causal 16k, TFLOP/s", "fp8", lowest("teraflops"), 950, True, mask("causal", "x16384x128"), "teraflops"),
    Aim("FP8, FA3 over ours, mean", "fp8", geometric("ratio_fa3"), 1.15, needs="ratio_fa3"),
    Aim("f32 on tensor cores, scalar over ours, lowest", "f32", speedup("flashcore-scalar"), 5, needs="over_scalar"),
    Aim("f32 on tensor cores, best peer over ours, lowest", "f32", lowest("ratio"), 1.5, needs="ratio"),
    Aim("f32 on tensor cores, error over scalar's", "f32", highest("error_over_scalar"), 4, False, needs="error_over_scalar"),
]


def report(record):
    """Lines with the verdict of each aim and check, and whether all are met."""
    lines, all_met = [], True
    for aim in AIMS:
        met, text = aim.judge(record["rows"])
        all_met &= met is True
        lines.append(f"{'met' if met else 'NOT MET' if met is False else '-':<8}{aim.suite:<10}{aim.text}: {text}")
    for check in record["checks"]:
        all_met &= check["passed"]
        lines.append(f"{'met' if check['passed'] else 'NOT MET':<8}{check['text'].strip()}")
    for name in ("steps", "dependents", "invariance"):
        if not any(check["check"] == name for check in record["checks"]):
            all_met = False
            lines.append(f"{'-':<8}{name}: not measured")
    return lines, all_met


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", help="a record of serving.py")
    record = json.loads(Path(parser.parse_args().record).read_text(encoding="utf-8"))
    lines, all_met = report(record)
    print("\n".join(lines))
    sys.exit(0 if all_met else 1)


if __name__ == "__main__":
    main()
