"""One process of cpu.py: one element type, one number of threads, all contenders in rotation.

Threads are those of the process, because flashcore's pool is made once; and what PyTorch needs in its environment is
there before it is imported. Reads its orders as JSON from the command line, writes one JSON line for each problem.
"""

import json
import math
import os
import random
import statistics
import sys
import time

import torch
import torch.nn.functional as functional
from flashcore_ctypes import DEVICE_CPU, Flashcore

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# The largest error allowed to any contender, over the largest output: a few roundings of the type, and in f32 the
# approximate exponentials that peers use.
ERROR_LIMITS = {"f32": 2e-5, "bf16": 2.0**-6, "f16": 2.0**-9}
SAMPLE_SECONDS = 0.02
# Threads of OpenMP and of ONNX Runtime go on spinning when their work is done, some for longer than a sample takes. Before
# the next contender runs, the process must have used less than a tenth of a core for as long as this.
PAUSE_SECONDS = 0.02
# A process that never comes to rest is measured as it is.
LONGEST_PAUSE_SECONDS = 2.0
# ONNX Runtime spins only where that makes it faster by this much.
WORTH_IT = 0.97


def causal_mask(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def reference(query, key, value, causal):
    """Attention in f64 of the first and the last head."""
    outputs = []
    for batch, head in ((0, 0), (-1, -1)):
        q, k, v = (tensor[batch, head].double() for tensor in (query, key, value))
        scores = q @ k.T / math.sqrt(q.shape[1])
        if causal:
            scores = scores.masked_fill(causal_mask(q.shape[0]), -math.inf)
        outputs.append(torch.softmax(scores, -1) @ v)
    return torch.stack(outputs)


def flashcore_contender(library, query, key, value, dtype, causal):
    output = torch.full_like(query, math.nan)
    plan = library.plan(query.shape, key.shape, dtype, causal, device=DEVICE_CPU)
    return plan.host_call(query, key, value, output), lambda: output


def torch_contender(query, key, value, causal):
    result = [None]

    def call():
        result[0] = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return call, lambda: result[0]


class OnnxRuntime:
    """The two attentions of ONNX Runtime as models of one node, made in memory."""

    def __init__(self, threads):
        import onnx
        import onnxruntime

        self.onnx, self.runtime, self.threads = onnx, onnxruntime, threads
        self.types = {"f32": onnx.TensorProto.FLOAT, "f16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}
        self.spinning = "1"

    def session(self, node, shapes, output_shape, dtype, domains):
        helper = self.onnx.helper
        info = [helper.make_tensor_value_info(name, self.types[dtype], shape) for name, shape in shapes.items()]
        output = helper.make_tensor_value_info("output", self.types[dtype], output_shape)
        graph = helper.make_graph([node], "attention", info, [output])
        opsets = [helper.make_opsetid(domain, version) for domain, version in domains]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", self.spinning)
        return self.runtime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def value(self, tensor, dtype):
        """The tensor's own memory as ONNX Runtime sees it."""
        of = self.runtime.OrtValue
        if dtype == "bf16":
            return of.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.int16).numpy(), self.types[dtype])
        return of.ortvalue_from_numpy(tensor.numpy())

    def bound(self, session, tensors, dtype):
        """A binding, and the values that must live as long: it holds their addresses."""
        binding = session.io_binding()
        values = {name: self.value(tensor, dtype) for name, tensor in tensors.items()}
        for name, value in values.items():
            (binding.bind_ortvalue_output if name == "output" else binding.bind_ortvalue_input)(name, value)
        return binding, values

    def contender(self, kind, query, key, value, dtype, causal):
        batch, heads, length, dim = query.shape
        tensors = {"query": query, "key": key, "value": value}
        if kind == "ort-mha":
            # [batch, row, head x column] is what it takes; the others get [batch, head, row, column].
            tensors = {
                name: tensor.transpose(1, 2).reshape(batch, tensor.shape[2], heads * dim).contiguous()
                for name, tensor in tensors.items()
            }
            node = self.onnx.helper.make_node(
                "MultiHeadAttention",
                list(tensors),
                ["output"],
                domain="com.microsoft",
                num_heads=heads,
                unidirectional=int(causal),
            )
            domains = [("", 21), ("com.microsoft", 1)]
        else:
            node = self.onnx.helper.make_node("Attention", list(tensors), ["output"], is_causal=int(causal))
            domains = [("", 23)]
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        session = self.session(node, shapes, shapes["query"], dtype, domains)
        # Memory of our own, so that no call allocates and none of it belongs to a session that is gone.
        result = torch.full_like(tensors["query"], math.nan)
        binding, values = self.bound(session, {**tensors, "output": result}, dtype)

        def output():
            return result.reshape(batch, length, heads, dim).transpose(1, 2) if kind == "ort-mha" else result

        # Both functions keep all that is bound.
        return lambda values=values, result=result: session.run_with_iobinding(binding), output


def seconds(call, calls):
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def come_to_rest():
    """Waits until no thread of the process is busy; returns False if that takes too long."""
    end = time.perf_counter() + LONGEST_PAUSE_SECONDS
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(PAUSE_SECONDS)
        if time.process_time() - before < 0.1 * PAUSE_SECONDS:
            return True
    return False


def calls_for(call):
    """Number of calls that make a sample long enough."""
    call()
    return max(1, math.ceil(SAMPLE_SECONDS / min(seconds(call, 1), seconds(call, 1))))


def choose_spinning(runtime):
    """Lets the threads of ONNX Runtime spin while they wait if that is faster; returns the choice and the times."""
    tensors = [torch.randn(1, 8, 512, 64) for _ in range(3)]
    times = {}
    for runtime.spinning in ("0", "1"):
        call, _ = runtime.contender("ort-mha", *tensors, "f32", False)
        calls = calls_for(call)
        times[runtime.spinning] = statistics.median(seconds(call, calls) for _ in range(7))
    runtime.spinning = "1" if times["1"] < WORTH_IT * times["0"] else "0"
    return {"chosen": runtime.spinning, "seconds": times}


def measure(library, runtime, problem, dtype, rounds):
    batch, heads, length, keys, dim = problem["shape"]
    causal = problem["causal"]
    query = torch.randn(batch, heads, length, dim).to(TORCH_DTYPES[dtype])
    key, value = (torch.randn(batch, heads, keys, dim).to(TORCH_DTYPES[dtype]) for _ in range(2))
    makers = {
        "flashcore": lambda: flashcore_contender(library, query, key, value, dtype, causal),
        "torch": lambda: torch_contender(query, key, value, causal),
    }
    if runtime:
        for kind in ("ort-mha", "ort-attention"):
            makers[kind] = lambda kind=kind: runtime.contender(kind, query, key, value, dtype, causal)
    expected = reference(query, key, value, causal)
    limit = ERROR_LIMITS[dtype] * expected.abs().max().item()
    contenders, errors, left_out = {}, {}, {}
    for name, make in makers.items():
        try:
            call, output = make()
            call()
            result = output()
        except Exception as error:  # whatever a peer says against a problem is its reason
            if name == "flashcore":
                raise
            left_out[name] = f"refused: {str(error).strip().splitlines()[0][:300]}"
            continue
        error = (torch.stack([result[0, 0], result[-1, -1]]).double() - expected).abs().max().item()
        if error <= limit:
            errors[name], contenders[name] = error, (call, calls_for(call))
        elif name == "flashcore":
            sys.exit(f"flashcore is wrong on {problem} {dtype}: error {error}, allowed {limit}")
        else:
            left_out[name] = f"wrong: error {error}, allowed {limit}"
    samples = {name: [] for name in contenders}
    order = list(contenders)
    restless = 0
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            restless += not come_to_rest()
            call, calls = contenders[name]
            call()  # wakes its threads
            samples[name].append(seconds(call, calls))
    attended = length * (length + 1) / 2 if causal else length * keys
    return {
        "shape": "x".join(map(str, (batch, heads, length if length == keys else f"{length},{keys}", dim))),
        "dtype": dtype,
        "mask": "causal" if causal else "full",
        "threads": torch.get_num_threads(),
        "flops": 4 * batch * heads * dim * attended,
        "seconds": {name: statistics.median(values) for name, values in samples.items()},
        "samples": samples,
        "samples_without_rest_before": restless,
        "calls_per_sample": {name: calls for name, (_, calls) in contenders.items()},
        "max_error": errors,
        "left_out": left_out,
    }


def probe(dtype, threads):
    """The speed of PyTorch alone under the settings of this process; the caller sees if it survived."""
    torch.set_num_threads(threads)
    query, key, value = (torch.randn(1, 8, 512, 64).to(TORCH_DTYPES[dtype]) for _ in range(3))
    call, _ = torch_contender(query, key, value, False)
    calls = calls_for(call)
    return statistics.median(seconds(call, calls) for _ in range(9))


def main():
    orders = json.loads(sys.argv[1])
    if orders["job"] == "probe":
        print(json.dumps({"seconds": probe(orders["dtype"], orders["threads"])}), flush=True)
        return
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(orders["threads"])
    library = Flashcore(orders["library"])
    runtime, spinning = None, None
    if orders["onnxruntime"]:
        runtime = OnnxRuntime(orders["threads"])
        spinning = choose_spinning(runtime)
    plan = library.plan((1, 1, 1, 64), (1, 1, 1, 64), orders["dtype"], False, device=DEVICE_CPU)
    about = {
        "threads": orders["threads"],
        "dtype": orders["dtype"],
        "flashcore": plan.describe(),
        "flashcore_cpu_level": os.environ.get("FLASHCORE_CPU_LEVEL", "the best of the machine"),
        "onnxruntime_spinning": spinning,
    }
    print(json.dumps({"process": about}), flush=True)
    for problem in orders["problems"]:
        print(json.dumps({"row": measure(library, runtime, problem, orders["dtype"], orders["rounds"])}), flush=True)


if __name__ == "__main__":
    main()
