"""Times flashcore next to the attention of PyTorch (FlashAttention-2, cuDNN, memory-efficient) and FlashAttention-3.

One process, one run: for each problem every implementation is captured into a CUDA graph of several calls on the same
tensors (hot L2), the graphs are replayed in turn, in another order each round, and the median over the rounds counts.
Before that every output is compared with attention in f64. A backend that refuses a problem is left out, and so is
FlashAttention-3 without a folder that has it. It gets copies of the tensors in its own layout, [batch, row, head, column].

    python3 bench/peers/gpu.py --library target/release/libflashcore.so --suite seeds prefill --out record.json
    python3 bench/peers/gpu.py --library libflashcore.so --fa3 FOLDER_OF_C_SO --suite prefill --dtype bf16 --out record.json
    flashcore bench --peers-record record.json
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import time

import torch
import torch.nn.functional as functional
from flashcore_ctypes import Flashcore
from serving_peers import absent_fa3, load_fa3
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = {
    "flash2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FA3 = "fa3"
TORCH_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
# The largest error allowed to any implementation, over that of the same attention in PyTorch's plain 16-bit operations.
ERROR_FACTOR = 2.0
ROUNDS = 15
MATMUL_CALLS = 14
# Keys from which on problems are compared with the rate of a product.
LONG = 16384
# Seconds that each has the GPU to itself there, and the number of rounds.
STEADY_SECONDS = 0.3
STEADY_TURNS = 3


def problems(suites, dtypes):
    seeds = [(1, 2, 64, 64), (1, 4, 128, 64), (2, 2, 64, 64), (1, 8, 512, 64), (2, 8, 256, 64), (2, 8, 512, 64)]
    seeds += [(8, 8, 512, 64), (4, 16, 2048, 128)]
    prefill = [(16384 // s, 2048 // d, s, d) for d in (64, 128, 256) for s in (512, 1024, 2048, 4096, 8192, 16384)]
    wide = [(16384 // s, 2048 // d, s, d) for d in (96, 192) for s in (512, 1024, 4096, 16384)]
    long = [shape for shape in prefill if shape[2] >= LONG]
    shapes = {"seeds": seeds, "prefill": prefill, "wide": wide, "long": long}
    for suite in suites:
        for dtype in dtypes:
            for shape in shapes[suite]:
                for causal in (False, True):
                    yield suite, shape, dtype, causal


def attended(length, causal):
    return length * (length + 1) / 2 if causal else length * length


def reference(query, key, value, causal, rows):
    """Attention in f64 of the last `rows` rows of the first and the last head."""
    outputs = []
    for batch, head in ((0, 0), (query.shape[0] - 1, query.shape[1] - 1)):
        q, k, v = (tensor[batch, head].double() for tensor in (query, key, value))
        length = q.shape[0]
        scores = q[-rows:] @ k.T / math.sqrt(q.shape[1])
        if causal:
            scores = scores.masked_fill(
                torch.ones_like(scores, dtype=torch.bool).triu(length - min(rows, length) + 1), -math.inf
            )
        outputs.append(torch.softmax(scores, -1) @ v)
    return torch.stack(outputs)


def sample(output, rows):
    return torch.stack([output[0, 0, -rows:], output[-1, -1, -rows:]]).double()


def plain(query, key, value, causal):
    """The same attention in plain operations of the same precision: the yardstick of errors."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(scores.float(), -1).to(query.dtype) @ value


def capture(call, calls):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
    return graph


def replay(graph, calls):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def steady(graphs):
    """Microseconds of a call of each at the clocks that the power limit allows, in the second half of a time of its own.

    Long problems and products reach the power limit, and clocks fall by a quarter within a second. A product that is
    timed right after a milder load runs at a clock that it cannot keep.
    """
    times = {name: [] for name in graphs}
    names = list(graphs)
    for _ in range(STEADY_TURNS):
        random.shuffle(names)
        for name in names:
            samples, end = [], time.monotonic() + STEADY_SECONDS
            while time.monotonic() < end:
                samples.append(replay(*graphs[name]))
            times[name] += samples[len(samples) // 2 :]
    return {name: statistics.median(values) for name, values in times.items()}


def config_of(configs, shape):
    """The config for a shape: the one for the shape itself, or for its head dimension, or for all."""
    named = dict(config.split("=", 1) if "=" in config else ("", config) for config in configs)
    return named.get("x".join(map(str, shape)), named.get(str(shape[3]), named.get("")))


def measure(flashcore, shape, dtype, causal, arguments):
    batch, heads, length, dim = shape
    query, key, value = (
        torch.randn(shape, device="cuda", dtype=torch.float32).to(TORCH_DTYPES[dtype]) for _ in range(3)
    )
    flops = 4 * batch * heads * dim * attended(length, causal)
    calls = 20 if flops < 2e11 else 5
    rows = min(64, length)
    expected = reference(query, key, value, causal, rows)
    small = [tensor[[0, -1]][:, [0, -1]] for tensor in (query, key, value)] if length <= 4096 else None
    if small:
        yardstick = (sample(plain(*small, causal), rows) - expected).abs().max().item()
    else:
        yardstick = 2.0 ** (-10 if dtype == "f16" else -7) * expected.abs().max().item()

    calls_by_name, outputs = {}, {}

    def ours(name, config):
        output = torch.full_like(query, math.nan)
        plan = flashcore.plan(query.shape, key.shape, dtype, causal, config)
        outputs[name] = output
        calls_by_name[name] = lambda: plan.launch(
            torch.cuda.current_stream().cuda_stream,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.data_ptr(),
        )

    def peer(name, backend):
        def call():
            with sdpa_kernel(backend):
                outputs[name] = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

        calls_by_name[name] = call

    def fa3(forward):
        own = [tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)]

        def call():
            # One split: these problems have tiles for every SM. Its own choice was not looked at.
            outputs[FA3] = forward(*own, is_causal=causal, num_splits=1)[0].transpose(1, 2)

        calls_by_name[FA3] = call

    ours("flashcore", config_of(arguments.config, shape))
    if arguments.scalar and length <= 512:
        ours("flashcore-scalar", "scalar")
    for name in arguments.peers:
        if name in PEERS:
            peer(name, PEERS[name])
    if arguments.forward_fa3:
        fa3(arguments.forward_fa3)

    graphs, errors = {}, {}
    for name, call in list(calls_by_name.items()):
        try:
            call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            if name.startswith("flashcore"):
                raise
            errors[name] = f"refused: {str(error).splitlines()[0]}"
            continue
        error = (sample(outputs[name], rows) - expected).abs().max().item()
        errors[name] = error
        if not error <= ERROR_FACTOR * yardstick + 1e-4:
            raise SystemExit(f"{name} is wrong on {shape} {dtype} causal={causal}: {error} against {yardstick}")
        graphs[name] = capture(call, calls)
    graphs = {name: (graph, calls) for name, graph in graphs.items()}
    # The rate that long problems are compared with is measured interleaved with them, and steadily.
    if arguments.products and length >= LONG:
        graphs["matmul"] = (matmul_graph(), MATMUL_CALLS)
    times = {name: [] for name in graphs}
    names = list(graphs)
    for _ in range(ROUNDS):
        random.shuffle(names)
        for name in names:
            times[name].append(replay(*graphs[name]))
    beside = {}
    if "matmul" in times:
        lasting = steady({name: graphs[name] for name in ("flashcore", "cudnn", "matmul") if name in graphs})
        beside["matmul_8192_tflops"] = matmul_rate(times.pop("matmul"))
        beside["steady_matmul_8192_tflops"] = matmul_rate([lasting.pop("matmul")])
        beside["steady_microseconds"] = lasting
    return {
        **beside,
        "shape": "x".join(map(str, shape)),
        "dtype": dtype,
        "mask": "causal" if causal else "full",
        "flops": flops,
        "microseconds": {name: statistics.median(values) for name, values in times.items()},
        "samples": times,
        "max_error": errors,
        "reference_error": yardstick,
    }


def state():
    fields = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def matmul_graph():
    """An 8192-cubed f16 product, to compare runs by."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    return capture(lambda: torch.matmul(a, b), MATMUL_CALLS)


def matmul_rate(samples):
    return 2 * 8192**3 / statistics.median(samples) / 1e6


def matmul_tflops():
    """The rate of that product at the end of the run, when the GPU has had a rest."""
    graph = matmul_graph()
    return matmul_rate([replay(graph, MATMUL_CALLS) for _ in range(7)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libflashcore.so")
    parser.add_argument("--suite", nargs="+", default=["seeds"], choices=["seeds", "prefill", "wide", "long"])
    parser.add_argument("--dtype", nargs="+", default=["f16"], choices=list(TORCH_DTYPES))
    parser.add_argument("--peers", nargs="+", default=[*PEERS, FA3], choices=[*PEERS, FA3])
    parser.add_argument("--fa3", help="the folder with FlashAttention-3's _C.so")
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        help="the kernel config of flashcore, or one for a head dimension, DIM=CONFIG, or a shape, SHAPE=CONFIG; its default unless said",
    )
    parser.add_argument(
        "--products", action="store_true", help="compare long problems with the rate of an 8192-cubed f16 product"
    )
    parser.add_argument("--scalar", action="store_true", help="flashcore's scalar kernel too, on short sequences")
    parser.add_argument("--out", required=True, help="the JSON record to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    flashcore = Flashcore(arguments.library)
    absent = absent_fa3(arguments.fa3) if FA3 in arguments.peers else None
    arguments.forward_fa3 = load_fa3(arguments.fa3)[0] if FA3 in arguments.peers and not absent else None
    if absent:
        print(absent, flush=True)
        arguments.peers = [name for name in arguments.peers if name != FA3]
    before = state()
    rows = []
    for suite, shape, dtype, causal in problems(arguments.suite, arguments.dtype):
        row = measure(flashcore, shape, dtype, causal, arguments)
        rows.append({"suite": suite, **row})
        times = " ".join(f"{name} {median:.2f}" for name, median in row["microseconds"].items())
        times += "".join(f" {name} {error}" for name, error in row["max_error"].items() if isinstance(error, str))
        rate = ""
        for kind in ("", "steady_"):
            if product := row.get(f"{kind}matmul_8192_tflops"):
                ratio = row["flops"] / row[f"{kind}microseconds"]["flashcore"] / 1e6 / product
                rate += f", {kind.replace('_', ' ')}{ratio:.3f} of a product at {product:.0f}"
        print(f"{row['shape']:>16} {dtype} {row['mask']:>6}: {times}{rate}", flush=True)
    software = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, flashcore {flashcore.version()}"
    record = {
        "schema": 1,
        "machine": {
            "device": torch.cuda.get_device_name(),
            "software": software,
            "state_before": before,
            "state_after": state(),
            "matmul_8192_tflops": matmul_tflops(),
            **({"absent": absent} if absent else {}),
        },
        "peers": arguments.peers,
        "configs": arguments.config,
        "rows": rows,
    }
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
