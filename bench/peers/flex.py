"""Times expressions (score_mod, mask_mod) of flashcore beside FlexAttention of PyTorch on one GPU.

One run, in turns: `flashcore bench` measures its kernels on graphs of launches, then FlexAttention, compiled with
max-autotune, is captured into graphs of calls on tensors of the same shapes, and so on, several rounds. The documents of
the mask are the same for both: they follow from the generator that flashcore fills its tables with. FlexAttention has its
block mask made beforehand and not timed; flashcore finds its tiles in every launch, which is timed. Both are verified:
flashcore by its own gate before it times anything, FlexAttention here, against attention in f64.

    python3 bench/peers/flex.py --flashcore target/release/flashcore --out flex.json
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import tempfile

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

FURTHEST = 128
ROUNDS = 3
CALLS = 20
MASK = (1 << 64) - 1


class SplitMix64:
    """The generator of flashcore's inputs."""

    INCREMENT = 0x9E3779B97F4A7C15

    def __init__(self, seed, stream):
        self.state = self.mix((seed + self.mix((stream + self.INCREMENT) & MASK)) & MASK)

    @staticmethod
    def mix(value):
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    def below(self, count):
        self.state = (self.state + self.INCREMENT) & MASK
        return self.mix(self.state) % count


def documents(length):
    """The number of the document of each position, as flashcore fills its table of integers for seed 0."""
    random, longest = SplitMix64(0, 7), max(150, length // 4)
    numbers = []
    while len(numbers) < length:
        document = numbers[-1] + 1 if numbers else 0
        numbers += [document] * (1 + random.below(longest))
    return numbers[:length]


def ours(program, shape, dtype):
    """Medians of flashcore, in seconds, and the config that it took."""
    with tempfile.TemporaryDirectory() as folder:
        record = pathlib.Path(folder) / "record.json"
        command = [program, "bench", "--backend", "cuda", "--shape", shape, "--dtype", dtype, "--record", str(record)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        row = json.loads(record.read_text())["content"]["rows"][0]
    return statistics.median(row["hot_seconds"]), row["kernel"]


def graph_of(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def replay(graph):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = []
    for _ in range(5):
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(samples)


def check(output, query, key, value, change, rows=64):
    """Whether the last rows of the last head are as right as plain 16-bit operations make them."""
    head = query.shape[1] - 1
    q, k, v = (tensor[-1, -1].double() for tensor in (query, key, value))
    scores = change(q[-rows:] @ k.T / math.sqrt(q.shape[1]), head, torch.arange(len(q) - rows, len(q), device=q.device))
    right = torch.softmax(scores, -1) @ v
    error = (output[-1, -1, -rows:].double() - right).abs().max().item()
    weights = torch.softmax(scores.float(), -1).to(query.dtype)
    yardstick = ((weights @ value[-1, -1]).double() - right).abs().max().item()
    assert error <= 2 * yardstick + 1e-6, f"FlexAttention is wrong: {error} of {yardstick}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashcore", required=True, help="the flashcore program")
    parser.add_argument("--shape", default="2x16x8192x128", help="batch x heads x length x dim")
    parser.add_argument("--dtype", default="f16", choices=["f16", "bf16"])
    parser.add_argument("--mode", default="max-autotune-no-cudagraphs", help="of torch.compile")
    parser.add_argument("--out", help="a file for the record")
    arguments = parser.parse_args()
    batch, heads, length, dim = map(int, arguments.shape.split("x"))
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[arguments.dtype]
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, heads, length, dim, device="cuda", dtype=dtype) for _ in range(3))
    table = torch.randn(heads * (2 * FURTHEST + 1), device="cuda")
    numbers = torch.tensor(documents(length), device="cuda", dtype=torch.int32)

    def relative(score, b, h, q, k):
        distance = (q - k).clamp(-FURTHEST, FURTHEST)
        return score + table[h * (2 * FURTHEST + 1) + distance + FURTHEST]

    def same_document(b, h, q, k):
        return numbers[q] == numbers[k]

    def change_relative(scores, head, rows):
        distance = (rows[:, None] - torch.arange(length, device="cuda")[None]).clamp(-FURTHEST, FURTHEST)
        return scores + table[head * (2 * FURTHEST + 1) + distance + FURTHEST].double()

    def change_documents(scores, head, rows):
        return scores.masked_fill(numbers[rows][:, None] != numbers[None], -math.inf)

    compiled = torch.compile(flex_attention, mode=arguments.mode, dynamic=False)
    block_mask = create_block_mask(same_document, None, None, length, length, device="cuda")
    cases = {
        "relative": (lambda: compiled(query, key, value, score_mod=relative), change_relative),
        "documents": (lambda: compiled(query, key, value, block_mask=block_mask), change_documents),
    }
    graphs = {}
    for name, (call, change) in cases.items():
        with torch.no_grad():
            check(call(), query, key, value, change)
        graphs[name] = graph_of(call)
    attended = {"relative": length * length, "documents": sum(numbers.tolist().count(n) ** 2 for n in set(numbers.tolist()))}
    # What blocks of 128 x 128 with anything attended have, which is how FlexAttention counts what a mask leaves.
    in_blocks = {"relative": 1.0, "documents": 1 - block_mask.sparsity() / 100}
    times = {name: {"ours": [], "flex": []} for name in cases}
    plain, kernels = [], {}
    for _ in range(ROUNDS):
        plain.append(ours(arguments.flashcore, arguments.shape, arguments.dtype)[0])
        for name in cases:
            seconds, kernels[name] = ours(arguments.flashcore, f"{arguments.shape}+{name}", arguments.dtype)
            times[name]["ours"].append(seconds)
            times[name]["flex"].append(replay(graphs[name]))
    medians = {name: {who: statistics.median(samples) for who, samples in both.items()} for name, both in times.items()}
    plain_rate = 4 * batch * heads * dim * length * length / statistics.median(plain)
    rows = []
    for name, both in medians.items():
        rate = 4 * batch * heads * dim * attended[name] / both["ours"]
        block_rate = 4 * batch * heads * dim * in_blocks[name] * length**2 / both["ours"]
        rows.append(
            {
                "expression": name,
                "shape": arguments.shape,
                "dtype": arguments.dtype,
                "kernel": kernels[name],
                "ours_seconds": both["ours"],
                "flex_seconds": both["flex"],
                "flex_over_ours": both["flex"] / both["ours"],
                "attended": attended[name] / length**2,
                "rate": rate,
                "rate_over_plain": rate / plain_rate,
                "in_blocks": in_blocks[name],
                "block_rate_over_plain": block_rate / plain_rate,
                "samples": times[name],
            }
        )
        print(
            f"{name:10} ours {both['ours'] * 1e6:8.1f} us  FlexAttention {both['flex'] * 1e6:8.1f} us  "
            f"ratio {both['flex'] / both['ours']:.2f}  attended {attended[name] / length**2:.3f}  "
            f"{rate / 1e12:.0f} TFLOP/s, {rate / plain_rate:.2f} of plain ({plain_rate / 1e12:.0f}), "
            f"{block_rate / plain_rate:.2f} by blocks"
        )
    if arguments.out:
        state = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.draw", "--format=csv,noheader"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        record = {"torch": torch.__version__, "mode": arguments.mode, "gpu": state, "plain_seconds": plain, "rows": rows}
        pathlib.Path(arguments.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
