"""Times two builds of libflashcore against each other on one GPU: did a change make anything slower?

One process, one run: for each problem both builds are captured into a CUDA graph of several calls on the same tensors,
outputs are compared, the graphs are replayed in turn, in another order each round, and the median over the rounds counts.
A build whose structs differ brings the flashcore_ctypes.py of its commit.

    python3 bench/peers/builds.py --before old/libflashcore.so --before-binding old/flashcore_ctypes.py \
        --after target/release/libflashcore.so --suite prefill seeds decode windows --out record.json
"""

import argparse
import importlib.util
import json
import math
import random
import statistics
from pathlib import Path

import torch
from gpu import TORCH_DTYPES, capture, problems, replay, state

TOP_LEFT, BOTTOM_RIGHT = 0, 1
# Batch, query heads, key heads, queries, keys, head dim.
DECODE = [
    (1, 32, 8, 1, 1024, 128),
    (1, 32, 8, 1, 32768, 128),
    (8, 32, 8, 1, 8192, 128),
    (64, 32, 8, 1, 4096, 128),
    (1, 32, 8, 16, 32768, 128),
    (1, 16, 16, 64, 30000, 128),
]
# The same, with the keys to the left and to the right of a row that it attends, and the alignment.
WINDOWS = [
    ((2, 16, 16, 8192, 8192, 128), (1023, 0), BOTTOM_RIGHT),
    ((2, 16, 16, 8192, 8192, 128), (4095, 0), BOTTOM_RIGHT),
    ((4, 32, 32, 4096, 4096, 64), (511, 0), BOTTOM_RIGHT),
    ((4, 32, 32, 4096, 4096, 64), (255, 256), BOTTOM_RIGHT),
    ((4, 16, 16, 500, 4096, 128), (1000, 0), BOTTOM_RIGHT),
    ((4, 16, 16, 2000, 4096, 128), (None, 0), TOP_LEFT),
    ((32, 32, 8, 1, 8192, 128), (1023, 0), BOTTOM_RIGHT),
]


def listed(suites, dtypes):
    for _, (batch, heads, length, dim), dtype, causal in problems([s for s in suites if s in ("seeds", "prefill")], dtypes):
        yield (batch, heads, heads, length, length, dim), dtype, (None, 0) if causal else None, BOTTOM_RIGHT
    for dtype in dtypes:
        for shape in DECODE if "decode" in suites else []:
            yield shape, dtype, None, BOTTOM_RIGHT
        for shape, window, alignment in WINDOWS if "windows" in suites else []:
            yield shape, dtype, window, alignment


class Build:
    """A library and the binding that knows its structs."""

    def __init__(self, name, library, binding):
        spec = importlib.util.spec_from_file_location(f"binding_{name}", binding)
        self.binding = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.binding)
        self.flashcore = self.binding.Flashcore(library)

    def call(self, shape, dtype, window, alignment, tensors):
        """A function that launches the problem on the current stream."""
        batch, heads, key_heads, queries, keys, dim = shape
        shapes = (batch, heads, queries, dim), (batch, key_heads, keys, dim)
        plan = self.flashcore.plan(*shapes, dtype, window=window, alignment=alignment)
        addresses = [tensor.data_ptr() for tensor in tensors]

        def launch():
            stream = torch.cuda.current_stream().cuda_stream
            plan.launch(stream, *addresses)

        return launch


def attended(shape, window, alignment):
    """Scores that rows attend, of one head."""
    _, _, _, queries, keys, _ = shape
    if window is None:
        return queries * keys
    offset = keys - queries if alignment == BOTTOM_RIGHT else 0
    left, right = window
    rows = torch.arange(queries) + offset
    first = torch.zeros_like(rows) if left is None else (rows - left).clamp(0, keys)
    end = (rows + right + 1).clamp(0, keys)
    return int((end - first).clamp(min=0).sum())


def measure(builds, shape, dtype, window, alignment, rounds):
    batch, heads, key_heads, queries, keys, dim = shape
    sizes = ((heads, queries), (key_heads, keys), (key_heads, keys))
    inputs = [torch.randn((batch, *size, dim), device="cuda").to(TORCH_DTYPES[dtype]) for size in sizes]
    flops = 4 * batch * heads * dim * attended(shape, window, alignment)
    calls = 20 if flops < 2e11 else 5
    outputs, graphs = {}, {}
    for name, build in builds.items():
        outputs[name] = torch.full_like(inputs[0], float("nan"))
        graphs[name] = capture(build.call(shape, dtype, window, alignment, [*inputs, outputs[name]]), calls)
        graphs[name].replay()
    torch.cuda.synchronize()
    before, after = (outputs[name].float() for name in ("before", "after"))
    difference = (before - after).abs().max().item()
    assert math.isfinite(difference) and difference < 2e-2, f"{shape} {window}: outputs differ by {difference}"
    times, names = {name: [] for name in graphs}, list(graphs)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            times[name].append(replay(graphs[name], calls))
    return {
        "shape": f"{batch}x{heads}/{key_heads}x{queries},{keys}x{dim}",
        "dtype": dtype,
        "window": window,
        "alignment": "bottom-right" if alignment == BOTTOM_RIGHT else "top-left",
        "bits_equal": bool(torch.equal(outputs["before"], outputs["after"])),
        "microseconds": {name: statistics.median(samples) for name, samples in times.items()},
        "spread": {name: [min(samples), max(samples)] for name, samples in times.items()},
    }


def main():
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="libflashcore.so of the older build")
    parser.add_argument("--before-binding", default=str(here / "flashcore_ctypes.py"), help="flashcore_ctypes.py for it")
    parser.add_argument("--after", required=True, help="libflashcore.so of the newer build")
    parser.add_argument("--suite", nargs="+", default=["prefill", "seeds", "decode", "windows"])
    parser.add_argument("--dtype", nargs="+", default=["f16"], choices=list(TORCH_DTYPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help="the JSON record to write")
    arguments = parser.parse_args()
    builds = {
        "before": Build("before", arguments.before, arguments.before_binding),
        "after": Build("after", arguments.after, here / "flashcore_ctypes.py"),
    }
    rows = []
    for problem in listed(arguments.suite, arguments.dtype):
        row = measure(builds, *problem, arguments.rounds)
        rows.append(row)
        before, after = (row["microseconds"][name] for name in ("before", "after"))
        mask = "full" if row["window"] is None else f"{row['window']} {row['alignment']}"
        bits = "same bits" if row["bits_equal"] else "other bits"
        print(f"{row['shape']:>24} {row['dtype']:>4} {mask:<26} {before:9.2f} {after:9.2f} {before / after:6.3f} {bits}", flush=True)
    ratios = [row["microseconds"]["before"] / row["microseconds"]["after"] for row in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"before over after: geometric mean {mean:.3f}, lowest {min(ratios):.3f}, of {len(ratios)}")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps({"gpu": state(), "rounds": arguments.rounds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
