"""Times flashcore next to the attention of PyTorch and of ONNX Runtime on the CPU.

For each number of threads and each element type one process holds all contenders: same inputs, outputs checked against
f64 before anything is timed, samples of at least 20 ms taken in turn, in another order each round, and the median over
the rounds counts. What a peer refuses is left out, with its reason in the record. PyTorch runs with the fastest settings
that work on this machine, which are probed first, each in a process of its own (some hypervisors kill oneDNN's bf16).
ONNX Runtime runs as its MultiHeadAttention (com.microsoft) and as the standard Attention of opset 23.

    scripts/install-cpu-peers.sh
    cargo build --release
    .venv/peers/bin/python bench/peers/cpu.py --out record.json
    FLASHCORE_CPU_LEVEL=avx2 .venv/peers/bin/python bench/peers/cpu.py --suite prefill --threads 1 --rounds 31
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKER = HERE / "cpu_worker.py"
LIBRARY = HERE.parent.parent / "target" / "release" / "libflashcore.so"
PEERS = ("torch", "ort-mha", "ort-attention")
# Batch, heads, length, head dim; each full and causal.
PREFILL = [(1, 8, 512, 64), (2, 8, 256, 64), (2, 8, 512, 64), (8, 8, 512, 64), (1, 8, 2048, 64), (1, 8, 2048, 128)]
# Batch, heads, queries, keys, head dim; full.
DECODE = [(1, 32, 1, 4096, 128)]
SUITES = {
    "prefill": {"f32": PREFILL},
    "prefill-bf16": {"bf16": PREFILL},
    "prefill-f16": {"f16": PREFILL},
    "decode": {"f32": DECODE, "bf16": DECODE, "f16": DECODE},
}
# Threads of OpenMP that wait asleep disturb nobody; used where PyTorch is as fast that way.
PASSIVE = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
# oneDNN's best instructions, and those it is left with where a hypervisor has no AMX.
ONEDNN = [{}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}]
# A setting must be this much faster to be preferred to one before it.
WORTH_IT = 0.97


def problems(suites, dtype):
    for suite in suites:
        for shape in SUITES[suite].get(dtype, []):
            if len(shape) == 5:
                yield {"suite": suite, "shape": shape, "causal": False}
                continue
            batch, heads, length, dim = shape
            for causal in (False, True):
                yield {"suite": suite, "shape": (batch, heads, length, length, dim), "causal": causal}


def environment(threads, settings):
    # One number of threads for everybody: rayon's pool is made once in a process.
    count = str(threads)
    return {**os.environ, "RAYON_NUM_THREADS": count, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, **settings}


def work(orders, settings):
    """The JSON lines of a worker, as they come."""
    command = [sys.executable, str(WORKER), json.dumps(orders)]
    environ = environment(orders["threads"], settings)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        yield from map(json.loads, process.stdout)
    if process.returncode < 0:
        raise RuntimeError(f"died of {signal.Signals(-process.returncode).name}")
    if process.returncode != 0:
        raise RuntimeError(f"ended with {process.returncode}")


def choose_settings(dtype, threads):
    """The fastest environment for PyTorch that it survives, and what was tried."""
    tried, best = [], None
    for settings in ONEDNN if dtype != "f32" else ONEDNN[:1]:
        for waiting in (PASSIVE, {}):
            both = {**settings, **waiting}
            try:
                (answer,) = work({"job": "probe", "dtype": dtype, "threads": threads}, both)
            except RuntimeError as error:
                tried.append({"environment": both, "result": str(error)})
                continue
            tried.append({"environment": both, "seconds": answer["seconds"]})
            if best is None or answer["seconds"] < WORTH_IT * best[0]:
                best = answer["seconds"], both
    return (best[1] if best else PASSIVE), tried


def machine():
    processor, flags = platform.processor(), []
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
        fields = {name.strip(): value.strip() for name, value in fields.items()}
        processor, flags = fields.get("model name", processor), fields.get("flags", "").split()
    except OSError:
        pass
    versions = {}
    for package in ("torch", "onnxruntime", "onnx", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "flags": flags,
        "system": platform.platform(),
        "versions": versions,
        "load_average_before": os.getloadavg(),
    }


def best_peer(row):
    times = {name: row["seconds"][name] for name in PEERS if name in row["seconds"]}
    return min(times, key=times.get) if times else None


def ratio(row):
    peer = best_peer(row)
    return row["seconds"][peer] / row["seconds"]["flashcore"] if peer else None


def geometric_mean(numbers):
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def summarise(rows):
    """Geometric mean and worst ratio of the best peer's time to ours, by element type and threads, and of all."""
    groups = {}
    for row in rows:
        if ratio(row) is not None:
            for name in (f"{row['dtype']}, {row['threads']} threads", "all"):
                groups.setdefault(name, []).append(row)
    return {
        name: {
            "rows": len(group),
            "geometric_mean": geometric_mean([ratio(row) for row in group]),
            "worst": min(map(ratio, group)),
            "worst_row": "{shape} {dtype} {mask} {threads} threads".format(**min(group, key=ratio)),
        }
        for name, group in sorted(groups.items(), key=lambda item: item[0] == "all")
    }


def cell(row, name):
    if name not in row["seconds"]:
        return "-"
    time = row["seconds"][name]
    return f"{time * 1e3:.3f} ({row['flops'] / time / 1e9:.0f})"


def print_row(row):
    cells = [f"{cell(row, name):>15}" for name in ("flashcore", *PEERS)]
    best = f"{ratio(row):6.2f} {best_peer(row)}" if ratio(row) else "     -"
    print(f"{row['shape']:>15} {row['dtype']:>4} {row['mask']:>6} {row['threads']}", *cells, best, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=str(LIBRARY), help="libflashcore.so; that of the release build unless said")
    parser.add_argument("--suite", nargs="+", default=["prefill", "prefill-bf16", "decode"], choices=list(SUITES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="numbers of threads, each in turn")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each contender; 15 or more for a record")
    parser.add_argument("--out", help="the JSON record to write")
    arguments = parser.parse_args()
    if not Path(arguments.library).exists():
        parser.error(f"{arguments.library} is not there; build it with `cargo build --release`")
    if importlib.util.find_spec("torch") is None:
        parser.error("torch is not installed; scripts/install-cpu-peers.sh installs it into .venv/peers")
    has_runtime = all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnx"))
    if not has_runtime:
        print("onnxruntime and onnx are not both installed: ONNX Runtime is left out")
    record = {
        "schema": 1,
        "machine": machine(),
        "rounds": arguments.rounds,
        "interleaved": "all contenders of one element type and number of threads, in one process under one environment",
        "processes": [],
        "rows": [],
    }
    heads = [f"{name:>15}" for name in ("flashcore", *PEERS)]
    print("milliseconds (GFLOP/s), medians; t: threads")
    print(f"{'shape':>15} {'type':>4} {'mask':>6} t", *heads, "best peer / flashcore", flush=True)
    for dtype in ("f32", "bf16", "f16"):
        listed = list(problems(arguments.suite, dtype))
        for threads in arguments.threads if listed else []:
            settings, tried = choose_settings(dtype, threads)
            orders = {
                "job": "measure",
                "library": str(Path(arguments.library).resolve()),
                "dtype": dtype,
                "threads": threads,
                "rounds": arguments.rounds,
                "onnxruntime": has_runtime,
                "problems": listed,
            }
            for answer in work(orders, settings):
                if "process" in answer:
                    record["processes"].append({**answer["process"], "environment": settings, "torch_settings": tried})
                else:
                    record["rows"].append(answer["row"])
                    print_row(answer["row"])
    record["machine"]["load_average_after"] = os.getloadavg()
    record["summary"] = summarise(record["rows"])
    for name, group in record["summary"].items():
        print(
            f"{name}: best peer over flashcore, geometric mean of {group['rows']}: {group['geometric_mean']:.2f}, "
            f"worst {group['worst']:.2f} ({group['worst_row']})"
        )
    refused = sorted({(name, row["dtype"], why) for row in record["rows"] for name, why in row["left_out"].items()})
    for name, dtype, why in refused:
        print(f"left out: {name} in {dtype}, {why}")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
