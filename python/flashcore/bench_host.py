"""Host cost of a call, beside that of torch's SDPA and of flash_attn where it is installed.

    python -m flashcore.bench_host [--device cuda] [--grad no_grad] [--json FILE]

The first figure is that of the whole call, for all functions alike. On the CPU the computation is a part of it, SDPA's too;
the time that libflashcore itself needs is measured, and a second figure of our functions is without it: the way there, which
is the same for a GPU but for the stream. Compare the first figures with one another, and never the second with SDPA's.
On a GPU a call returns when the kernel is enqueued.
Calls of all functions alternate in short batches; a figure is the median of the quietest quarter of its batches, with the
best beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import platform
import sys
import time
from typing import Any, Callable, Dict, List

import torch

import flashcore
import flashcore.torch as ft
from flashcore._plans import Plan
from flashcore.compat import flash_attn_interface as fa3
from flashcore.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashcore.torch import _float8, _kvcache, _ops, _stable

BATCH = 64
MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "enabled": torch.enable_grad}
OTHERS = ("torch SDPA", "torch.empty_like", "flash_attn 2")
BASES = ("attention", "kvcache", "FP8 attention", "FP8 kvcache")


def measure(functions: "Dict[str, Callable[[], Any]]", batches: int) -> "Dict[str, Dict[str, float]]":
    """Microseconds of each function, by batches that alternate."""
    clock = time.perf_counter_ns
    samples: "Dict[str, List[float]]" = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(BATCH):
            function()
    for _ in range(batches):
        for name, function in functions.items():
            start = clock()
            for _ in range(BATCH):
                function()
            samples[name].append((clock() - start) / BATCH / 1000)
    quiet = {name: sorted(values)[: max(batches // 4, 1)] for name, values in samples.items()}
    return {name: {"us": values[len(values) // 2], "best_us": values[0]} for name, values in quiet.items()}


def library_call(plan: Plan, tensors: "List[torch.Tensor]") -> "Callable[[], Any]":
    """The call of libflashcore alone, with tensors that are ready."""
    plan.run([tensor.data_ptr() for tensor in tensors])
    words, given = plan._free.pop()  # no other call may write addresses into it

    def call(function: Any = plan._call, handle: int = plan.handle, kept: Any = (words, tensors)) -> None:
        function(handle, *given)

    return call


def ctypes_call() -> "Callable[[], Any]":
    """A call by ctypes that does nothing, with as many arguments: what a call of libflashcore costs here beside itself."""
    function = ctypes.CDLL(None).memcmp
    function.restype, function.argtypes = ctypes.c_int32, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    structs = [0, 0, 0]
    return lambda: function(*structs)


def functions_of(device: torch.device) -> "Dict[str, Callable[[], Any]]":
    """Calls of tiny tensors: one sequence, one head, two rows of 64 columns."""
    dtype = torch.float16
    q, k, v = (torch.randn(1, 2, 1, 64, dtype=dtype, device=device) for _ in range(3))
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    packed = [x[0] for x in (q, k, v)]
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=device)
    caches = [torch.zeros(1, 8, 1, 64, dtype=dtype, device=device) for _ in range(2)]
    lengths = torch.tensor([3], dtype=torch.int32, device=device)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ops = ft.OPERATORS
    codes = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    cached_codes = [x.to(torch.float8_e4m3fn) for x in caches]
    scale = torch.ones(1, 1, device=device)
    scales = {"k_descale": scale, "v_descale": scale}
    functions: "Dict[str, Callable[[], Any]]" = {
        "flash_attn_func": lambda: flash_attn_func(q, k, v, causal=True),
        "flashcore.torch.forward": lambda: ft.forward(q, k, v, causal=True),
        "torch.ops.flashcore.forward": lambda: ops.forward.default(q, k, v, None, True),
        "torch.ops.flashcore.varlen_forward": lambda: ops.varlen_forward.default(*packed, offsets, offsets, 2, 2, None, True),
        "torch.ops.flashcore.kvcache_forward": lambda: ops.kvcache_forward.default(q, *caches, k, v, lengths, causal=True),
        "flashcore.torch.varlen_forward": lambda: ft.varlen_forward(*packed, offsets, offsets, 2, 2, None, True),
        "flashcore.torch.kvcache_forward": lambda: ft.kvcache_forward(q, *caches, k, v, lengths, causal=True),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(*packed, offsets, offsets, 2, 2, causal=True),
        "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True),
        "torch.ops.flashcore.float8_forward": lambda: ops.float8_forward.default(q, *codes, None, scale, scale, causal=True),
        "attention, FP8 keys": lambda: ft.attention(q, *codes, layout="bshd", causal=True, k_scale=scale, v_scale=scale),
        "flash_attn_func 3, FP8 keys": lambda: fa3.flash_attn_func(q, *codes, causal=True, **scales),
        "flash_attn_with_kvcache 3, FP8 cache": lambda: fa3.flash_attn_with_kvcache(
            q, *cached_codes, k, v, cache_seqlens=lengths, causal=True, **scales
        ),
        "torch SDPA": lambda: sdpa(*by_head, is_causal=True),
        "torch.empty_like": lambda: torch.empty_like(q),
    }
    if device.type == "cpu":
        out = torch.empty_like(q)
        plan = _ops.attend(q, k, v, out, None, None, True, -1, -1, 0.0)
        functions["libflashcore attention"] = library_call(plan, [q, k, v, out])
        (_, launch) = _kvcache.miss_kvcache_forward(q, *caches, k, v, lengths, causal=True)
        if launch:
            functions["libflashcore kvcache"] = library_call(launch[-1], [q, *caches, out, lengths, k, v])
        (_, launch) = _float8.miss_forward(q, *codes, None, scale, scale, causal=True)
        if launch:
            functions["libflashcore FP8 attention"] = library_call(launch[-1], [q, *codes, out, scale, scale])
        (_, launch) = _float8.miss_kvcache_forward(q, *cached_codes, k, v, lengths, scale, scale, causal=True)
        if launch:
            functions["libflashcore FP8 kvcache"] = library_call(launch[-1], [q, *cached_codes, out, lengths, scale, scale, k, v])
        functions["libflashcore nothing"] = ctypes_call()
    try:
        if device.type == "cuda":
            theirs = importlib.import_module("flash_attn").flash_attn_func
            functions["flash_attn 2"] = lambda: theirs(q, k, v, causal=True)
    except ImportError:
        pass
    return functions


def _base_of(name: str) -> str:
    """The plan that a function runs."""
    return ("FP8 " if "FP8" in name or "float8" in name else "") + ("kvcache" if "kvcache" in name else "attention")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--grad", choices=list(MODES), default="inference_mode", help="the mode that calls are made in")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with MODES[options.grad]():
        figures = measure(functions_of(torch.device(options.device)), options.batches)
    base = {name: figures.pop(f"libflashcore {name}", None) for name in BASES}
    nothing = figures.pop("libflashcore nothing", None)
    for library in base.values():
        if library and nothing:
            library.update({name: value - nothing[name] for name, value in library.items()})
    where = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else platform.processor()
    print(f"flashcore {flashcore.version()}, torch {torch.__version__}, Python {platform.python_version()}, {where or 'CPU'}, {options.grad}")
    print("short way: " + ("yes" if ft.is_fast() else "no, libflashcore_python.so is not there or FLASHCORE_FAST=0"))
    print("torch.ops: kernels " + ("of libtorch's C interface" if _stable.is_registered("forward") else "in Python"))
    for name, library in base.items():
        if library:
            print(f"libflashcore itself, {name}: {library['us']:.2f} us")
    print(f"{'us a call':38}{'whole':>8}{'best':>8}{'without the library':>22}")
    for name, figure in figures.items():
        of = base[_base_of(name)] if name not in OTHERS else None
        if of:
            figure["way_us"] = figure["us"] - of["us"]
        print(f"{name:38}{figure['us']:8.2f}{figure['best_us']:8.2f}" + (f"{figure['way_us']:22.2f}" if of else ""))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "python": sys.version, "host_us": figures}, file, indent=1)


if __name__ == "__main__":
    main()
