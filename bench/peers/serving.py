"""Times flashcore beside FlashAttention-3, cuDNN and FlashAttention-2 on serving problems on one GPU.

One process: every output is compared with attention in f32, then each implementation is captured into a CUDA graph of
several calls, the graphs are replayed in turn, in another order each round, and the median over the rounds counts. "hot":
every call on the same tensors, which L2 holds; "cold": calls rotate over copies of K and V of 200 MB in all, or one copy is
larger than that; "warm": one copy that L2 holds in part. A case that flashcore refuses is printed with the reason; a peer
that refuses one or is wrong is left out. A CUDA error that ends the context, or a kernel that does not end, restarts the
program after the case that caused it. --check compares and times nothing; with --device cpu it needs no GPU.

    python3 bench/peers/serving.py --library libflashcore.so --fa3 FOLDER_OF_C_SO --out serving.json
    python3 bench/peers/serving.py --library libflashcore.so --suite decode paged --quick --budget 120 --out serving.json
    python3 bench/peers/serving.py --library libflashcore.so --suite fp8-cache --quick --check --device cpu --out check.json
    python3 bench/peers/serving_table.py serving.json
"""

import argparse
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import threading
import time
from pathlib import Path

import serving_append
import serving_kvcache
import serving_precision
import serving_splits
import torch
from flashcore_serving import HEADER, Flashcore, Refused
from gpu import replay, state
from serving_cases import COLD_BYTES, HOT_BYTES, LARGEST_ERROR, RMS_ERROR, TIMED, Reference, arrange, offsets
from serving_checks import CHECKS
from serving_peers import Fa3, absent_fa3, peer_calls

PEERS = ["fa3", "fa2", "cudnn", "cudnn-varlen", "torch-compiled"]
KINDS = ["rect", "padded", "varlen", "paged"]
GRAPH_MICROSECONDS = 400


def flashcore_call(flashcore, case, q, kv, cu_seqlens_q, out, config=None):
    """A launch of flashcore on one copy of the tensors; without a config, with its own choice."""
    operands = dict(kv.operands)
    bounds = {}
    if cu_seqlens_q is not None:
        operands["cu_seqlens_q"] = cu_seqlens_q
        bounds["total_q"] = q.shape[0]
    if kv.kind == "varlen":
        bounds["total_k"] = kv.k.shape[0]
    if kv.page:
        table = kv.operands["page_table"]
        bounds |= {"page_size": kv.page, "num_pages": kv.k.shape[0]}
        bounds |= {"table_width": table.shape[1], "table_stride": table.stride(0)}
    sizes = case.batch, case.heads, case.kv_heads, max(case.q_lens), kv.max_k, case.dim
    plan = flashcore.plan(*sizes, causal=case.causal, operands=tuple(operands), config=config, **bounds)

    def call():
        flashcore.launch(plan, q, kv.k, kv.v, out, **operands)
        return out

    return call


def shaped(case, q, kind):
    """Q for a layout of K and V, and its cu_seqlens if it is packed."""
    if kind == "varlen" or len(set(case.q_lens)) > 1:
        return q, offsets(case.q_lens, q.device)
    return q.view(case.batch, case.q_lens[0], case.heads, case.dim), None


def capture(calls, count):
    """A graph of `count` calls that rotate over the copies."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(count):
                calls[index % len(calls)]()
    return graph


def run_lengths(lens):
    """Lengths as [length, how many of it in a row]."""
    return [[length, len(list(group))] for length, group in itertools.groupby(lens)]


def brief(error):
    return (str(error).splitlines() or [repr(error)])[0][:200]


def is_fatal(error):
    """True for CUDA errors after which the context cannot be used."""
    words = "illegal", "misaligned address", "launch failure", "assert triggered", "launch timed out", "CUDA_ERROR"
    if any(word in str(error) for word in words):
        return True
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Bench:
    """The libraries, and how to time them."""

    refused = Refused
    is_fatal = staticmethod(is_fatal)

    def __init__(self, arguments):
        self.arguments = arguments
        self.flashcore = Flashcore(arguments.library, arguments.header, arguments.device)
        self.absent = absent_fa3(arguments.fa3) if "fa3" in arguments.peers else None
        self.fa3 = Fa3(arguments.fa3) if "fa3" in arguments.peers and not self.absent else None
        self.rounds = 7 if arguments.quick else arguments.rounds

    def builders(self, case, kvs, q):
        """Functions from the copies of K and V to calls, by name: flashcore's layouts, then the peers'."""

        def ours(kind):
            query, cu_seqlens_q = shaped(case, q, kind)
            out = torch.full_like(query, math.nan)
            return lambda kv: flashcore_call(self.flashcore, case, query, kv, cu_seqlens_q, out)

        def theirs(name):
            query, cu_seqlens_q = shaped(case, q, case.kind)
            out = torch.full_like(query, math.nan)
            return lambda kv: peer_calls(self.arguments.peers, self.fa3, case, query, kv, cu_seqlens_q, out)[name]

        found = {"flashcore": (case.kind, ours(case.kind))}
        for kind in case.beside:
            found[f"flashcore-{kind}"] = (kind, ours(kind))
        query, cu_seqlens_q = shaped(case, q, case.kind)
        for name in peer_calls(self.arguments.peers, self.fa3, case, query, kvs[case.kind], cu_seqlens_q, None):
            found[name] = (case.kind, theirs(name))
        return found

    def checked(self, case, kvs, q, reference):
        """The builders whose output is right, the errors, and why others are left out."""
        good, errors, left_out, outputs = {}, {}, {}, {}
        for name, (kind, build) in self.builders(case, kvs, q).items():
            try:
                output = build(kvs[kind])()
                if output.is_cuda:
                    torch.cuda.synchronize()
            except Refused as refusal:
                left_out[name] = f"refused: {refusal}"
                continue
            except (RuntimeError, NotImplementedError) as error:
                if is_fatal(error):
                    raise
                left_out[name] = f"failed: {brief(error)}"
                continue
            errors[name] = reference.error(output)
            if errors[name][0] <= RMS_ERROR and errors[name][1] <= LARGEST_ERROR:
                good[name] = kind, build
                outputs[name] = output.reshape(q.shape).clone()
            else:
                left_out[name] = "WRONG: error {:.4f} rms, {:.4f} largest, of the expected output's".format(*errors[name])
        # Rows that the reference does not hold are compared with a peer's.
        for peer in ("fa3", "fa2"):
            if "flashcore" in outputs and peer in outputs:
                difference = (outputs["flashcore"].float() - outputs[peer].float()).abs().max()
                errors["flashcore against " + peer] = (difference / outputs[peer].abs().max()).item()
        return good, errors, left_out

    def timed(self, calls, floor, copies):
        """Medians and samples of microseconds per call, and why others have none.

        `calls` has functions by name that give the calls of one implementation on each of the copies of its tensors.
        """
        if self.arguments.check:
            return {}, {}, {}
        count = min(50, max(3, math.ceil(GRAPH_MICROSECONDS / max(floor, 4))))
        count = math.ceil(count / copies) * copies
        made, graphs, times, failed = {}, {}, {}, {}
        for name, build in calls.items():
            try:
                # The calls own the tensors that the graph reads.
                made[name] = build()
                graphs[name] = capture(made[name], count)
                times[name] = []
            except (RuntimeError, Refused) as error:
                if is_fatal(error):
                    raise
                failed[name] = f"no graph: {brief(error)}"
        names = list(times)
        for _ in range(self.rounds):
            random.shuffle(names)
            for name in names:
                times[name].append(replay(graphs[name], count))
        return {name: statistics.median(samples) for name, samples in times.items()}, times, failed

    def measure(self, case):
        """Rows of a record: hot, cold or both."""
        device, dtype = self.flashcore.device, torch.bfloat16
        q = torch.randn(sum(case.q_lens), case.heads, case.dim, device=device, dtype=dtype)
        k, v = (torch.randn(sum(case.k_lens), case.kv_heads, case.dim, device=device, dtype=dtype) for _ in range(2))
        kvs = {kind: arrange(kind, k, v, case.k_lens, case.page) for kind in {case.kind, *case.beside}}
        builders, errors, left_out = self.checked(case, kvs, q, Reference(case, q, k, v))
        one = {
            "suite": case.suite,
            "name": case.name,
            "kind": case.kind,
            "page": case.page,
            "q_lens": run_lengths(case.q_lens),
            "k_lens": run_lengths(case.k_lens),
            "mask": "causal" if case.causal else "full",
            "heads": f"{case.heads}/{case.kv_heads} x {case.dim}",
            "floor": case.floor(),
            "errors": errors,
            "left_out": left_out,
        }
        states = {"hot": 1} if case.kv_bytes() <= HOT_BYTES else {}
        if case.suite not in ("chunks", "varlen", "prefill"):
            states["cold"] = max(1, math.ceil(COLD_BYTES / case.kv_bytes()))
        elif not states:
            # Bound by products: the same tensors in every call, larger than L2 or in part of it.
            states["cold" if case.kv_bytes() >= COLD_BYTES else "warm"] = 1
        for state, copies in states.items():
            sets = {kind: [kvs[kind], *(kvs[kind].clone() for _ in range(copies - 1))] for kind, _ in builders.values()}
            calls = {
                name: lambda kind=kind, build=build: [build(kv) for kv in sets[kind]]
                for name, (kind, build) in builders.items()
            }
            medians, samples, failed = self.timed(calls, case.floor(), copies)
            row = {**one, "l2": state, "microseconds": medians, "samples": samples, "left_out": {**left_out, **failed}}
            left_out = {name: reason for name, reason in left_out.items() if name == "flashcore"}
            ours = medians.get("flashcore")
            peers = {name: time_of for name, time_of in medians.items() if not name.startswith("flashcore")}
            if ours and peers:
                row["best_peer"] = min(peers, key=peers.get)
                row["ratio"] = peers[row["best_peer"]] / ours
                fa3 = [time_of for name, time_of in peers.items() if name.startswith("fa3")]
                if fa3:
                    row["ratio_fa3"] = min(fa3) / ours
            for kind in case.beside:
                if ours and f"flashcore-{kind}" in medians:
                    row[f"over_{kind}"] = ours / medians[f"flashcore-{kind}"]
            yield row


def has_failed(row):
    """True if something of flashcore, whichever config, was left out for another reason than a refusal."""
    ours = [why for name, why in row["left_out"].items() if name.startswith(("flashcore", "ampere", "hopper"))]
    return not all(why.startswith("refused") for why in ours)


def line(row):
    """A row for a reader."""
    text = f"{row['suite']:>8} {row['name']:<32} {row['mask']:<6} {row['l2']:<4} floor {row['floor']:8.2f}:"
    text += "".join(f" {name} {median:.2f}" for name, median in row["microseconds"].items())
    if not row["microseconds"]:
        errors = {name: error for name, error in row["errors"].items() if isinstance(error, tuple)}
        text += "".join(f" error of {name} {error[0]:.1e}" for name, error in errors.items())
    text += f"  ratio {row['ratio']:.3f}" if "ratio" in row else ""
    if "flashcore" in row["microseconds"]:
        text += f", {row['microseconds']['flashcore'] / row['floor']:.2f} x floor"
    if "terabytes_per_second" in row:
        text += f", {row['terabytes_per_second']:.2f} TB/s"
    if "teraflops" in row:
        text += f", {row['teraflops']:.0f} TFLOP/s"
    if "error_over_scalar" in row:
        text += f", error {row['error_over_scalar']:.2f} of scalar's"
    if "cost_percent" in row:
        text += f", invariance costs {row['cost_percent']:.1f} % over {row['best']}"
    if "added_microseconds" in row:
        text += f", append adds {row['added_microseconds']:.2f}"
    if "two_launches_add_microseconds" in row:
        text += f", in two launches {row['two_launches_add_microseconds']:.2f}"
    for key, value in row.items():
        if key.startswith("over_"):
            text += f", {value:.3f} of {key[5:]}"
    return text + "".join(f"\n{'':>11}{name} {reason}" for name, reason in row["left_out"].items())


def summary(rows):
    """Geometric mean and lowest ratio for each suite and state of L2; "same": as when every call has the same tensors."""
    groups, hot = {}, {(row["suite"], row["name"], row["mask"]) for row in rows if row["l2"] == "hot"}
    for row in rows:
        groups.setdefault((row["suite"], row["l2"]), []).append(row)
        if row["l2"] == "hot" or (row["suite"], row["name"], row["mask"]) not in hot:
            groups.setdefault((row["suite"], "same"), []).append(row)
    found = []
    for (suite, state), members in groups.items():
        entry = {"suite": suite, "l2": state, "cases": len(members)}
        for key in ("ratio", "ratio_fa3"):
            ratios = [row[key] for row in members if key in row]
            if ratios:
                lowest = min(members, key=lambda row: row.get(key, math.inf))
                entry[key] = {
                    "mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
                    "lowest": min(ratios),
                    "of": f"{lowest['name']} {lowest['mask']}",
                    "count": len(ratios),
                }
        floors = [row["microseconds"]["flashcore"] / row["floor"] for row in members if "flashcore" in row["microseconds"]]
        if floors:
            entry["most_over_floor"] = max(floors)
        costs = [row["cost_percent"] for row in members if "cost_percent" in row]
        if costs:
            factors = [math.log(1 + cost / 100) for cost in costs]
            mean = 100 * (math.exp(sum(factors) / len(factors)) - 1)
            entry["cost_percent"] = {"mean": mean, "most": max(costs), "count": len(costs)}
        over = [value for row in members for key, value in row.items() if key.startswith("over_")]
        if over:
            entry["most_over_beside"] = max(over)
        found.append(entry)
    return found


def machine(flashcore):
    """The GPU, its driver and its state, and the versions of all software."""
    before = state() if flashcore.device == "cuda" else ""
    cudnn = torch.backends.cudnn.version()
    versions = {"flashcore": flashcore.version(), "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": cudnn}
    versions["python"] = platform.python_version()
    device = torch.cuda.get_device_name() if flashcore.device == "cuda" else platform.machine()
    found = {"device": device, "driver": (before.split(", ") + ["unknown"] * 2)[1]}
    return {**found, "versions": versions, "state_before": before}


class Record:
    """The JSON file, written after every case, so that a run that ends early leaves what it has."""

    def __init__(self, path, resume):
        self.path = Path(path)
        self.data = {"schema": 1, "machine": {}, "begun": [], "rows": [], "checks": [], "crashed": {}, "summary": []}
        self.lock = threading.Lock()
        if resume and self.path.exists():
            self.data = json.loads(self.path.read_text(encoding="utf-8"))

    def write(self):
        with self.lock:
            self.data["summary"] = summary(self.data["rows"])
            self.path.write_text(json.dumps(self.data, default=str) + "\n", encoding="utf-8")

    def begin(self, key):
        """False if a run before a restart has begun it."""
        if key in self.data["begun"]:
            return False
        self.data["begun"].append(key)
        self.write()
        return True


def restart(record, key, error):
    """Goes on after the case that ended the CUDA context, in a new process image."""
    record.data["crashed"][key] = brief(error)
    record.write()
    print(f"CRASHED {key}: {record.data['crashed'][key]}; starting again after it", flush=True)
    arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
    os.execv(sys.executable, [sys.executable, sys.argv[0], *arguments, "--resume"])


def work(bench, arguments):
    """Cases and checks by key, in the order of the suites."""
    for suite in arguments.suite:
        if suite in CHECKS:
            yield suite, lambda suite=suite: CHECKS[suite](bench.flashcore, arguments.quick)
            continue
        if suite in FURTHER:
            yield from FURTHER[suite](bench, arguments)
            continue
        for case in TIMED[suite](arguments.quick):
            if case.kind not in arguments.kinds:
                continue
            yield f"{suite}: {case.name} {'causal' if case.causal else 'full'}", lambda case=case: bench.measure(case)


def append_work(bench, arguments):
    """Cases of the suite `append` by key."""
    for case in serving_append.cases(arguments.quick):
        yield f"append: {case.name}", lambda case=case: serving_append.measure(bench, case, arguments.peers)
    for case in serving_append.step_cases(arguments.quick):
        yield f"append: {case.name}", lambda case=case: serving_append.measure_step(bench, case, flashcore_call)
    for case in serving_kvcache.cases(arguments.quick):
        yield f"append: {case.name}", lambda case=case: serving_kvcache.measure(bench, case, flashcore_call)


def splits_work(bench, arguments):
    """Cases of the suite `splits` by key."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for case in serving_splits.cases(arguments.quick):
        yield (
            f"splits: {case.name}",
            lambda case=case: serving_splits.measure(bench, case, flashcore_call, num_sms),
        )


def precision_work(suite):
    """Cases of a suite of FP8 or f32 by key."""

    def work_of(bench, arguments):
        for case in serving_precision.cases(suite, arguments.quick):
            key = f"{suite}: {case.name} {'causal' if case.causal else 'full'}"
            yield key, lambda case=case: serving_precision.measure(bench, case)

    return work_of


# Suites that are not attention in 16 bits beside its peers.
FURTHER = {"append": append_work, "splits": splits_work}
FURTHER |= {suite: precision_work(suite) for suite in ("fp8-cache", "fp8", "f32")}


def parse(arguments=None):
    suites = [*TIMED, *FURTHER, *CHECKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libflashcore.so")
    parser.add_argument("--header", default=str(HEADER), help="flashcore.h of that library")
    parser.add_argument("--fa3", help="the folder with FlashAttention-3's _C.so")
    parser.add_argument("--suite", nargs="+", default=suites, choices=suites)
    parser.add_argument("--peers", nargs="+", default=PEERS[:3], choices=PEERS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="layouts of K and V of attention in 16 bits")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--check", action="store_true", help="compare outputs and time nothing")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="the CPU only with --check")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0, help="of the tensors and of the order of the rounds")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further case begins")
    parser.add_argument("--case-seconds", type=float, default=90, help="seconds after which a case counts as hanging")
    parser.add_argument("--resume", action="store_true", help="go on with the record of --out")
    parser.add_argument("--out", required=True, help="the JSON record to write")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cpu":
        if not parsed.check or set(parsed.suite) & {"append", "splits", *CHECKS}:
            parser.error("--device cpu needs --check, and --suite without append, splits, " + ", ".join(CHECKS))
        parsed.peers = []
    return parsed


def main():
    arguments = parse()
    begun = float(os.environ.setdefault("SERVING_BEGUN", str(time.time())))
    torch.manual_seed(arguments.seed)
    random.seed(arguments.seed)
    record = Record(arguments.out, arguments.resume)
    bench = Bench(arguments)
    record.data["machine"] = machine(bench.flashcore)
    record.data |= {"seed": arguments.seed, "rounds": bench.rounds, "quick": arguments.quick, "peers": arguments.peers}
    if bench.absent:
        record.data["machine"]["absent"] = bench.absent
        print(bench.absent, flush=True)
    wrong = False
    with torch.inference_mode():
        for key, step in work(bench, arguments):
            if time.time() - begun > arguments.budget:
                print(f"out of time before {key}", flush=True)
                break
            if not record.begin(key):
                continue
            # A kernel that does not end is a crash too: exec from another thread takes its context down.
            late = f"no end within {arguments.case_seconds} seconds"
            watchdog = threading.Timer(arguments.case_seconds, restart, (record, key, late))
            watchdog.daemon = True
            watchdog.start()
            try:
                for row in step():
                    is_check = "microseconds" not in row
                    record.data["checks" if is_check else "rows"].append(row)
                    print(row["text"] if is_check else line(row), flush=True)
                    wrong |= not row["passed"] if is_check else has_failed(row)
            except Refused as refusal:
                print(f"{key}: flashcore refused: {refusal}", flush=True)
            except torch.OutOfMemoryError as error:
                print(f"{key}: left out, {brief(error)}", flush=True)
            except RuntimeError as error:
                if is_fatal(error):
                    restart(record, key, error)
                print(f"{key}: failed: {brief(error)}", flush=True)
                wrong = True
            watchdog.cancel()
            record.write()
            bench.flashcore.plans.clear()
            torch.cuda.empty_cache()
    if arguments.device == "cuda":
        record.data["machine"]["state_after"] = state()
    record.write()
    for entry in record.data["summary"]:
        parts = []
        for ratio, name in (("ratio", "best peer"), ("ratio_fa3", "FA3")):
            if ratio in entry:
                text = "{} / ours mean {mean:.3f}, lowest {lowest:.3f} ({of}), of {count}"
                parts.append(text.format(name, **entry[ratio]))
        if "cost_percent" in entry:
            text = "invariance costs {mean:.1f} % on average, at most {most:.1f} %, of {count}"
            parts.append(text.format(**entry["cost_percent"]))
        for key in ("most_over_floor", "most_over_beside"):
            if key in entry:
                parts.append(f"{key.replace('_', ' ')} {entry[key]:.3f}")
        print(f"{entry['suite']:>8} {entry['l2']:<4} " + "; ".join(parts), flush=True)
    if record.data["crashed"]:
        print(f"crashed: {record.data['crashed']}")
    sys.exit(1 if wrong or record.data["crashed"] else 0)


if __name__ == "__main__":
    main()
