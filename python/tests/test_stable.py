"""Kernels of torch.ops by libtorch's C interface: the same bits, errors and references as those in Python."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashcore  # noqa: E402
import flashcore.torch as ft  # noqa: E402
from flashcore._plans import CACHE  # noqa: E402
from flashcore.torch import _kvcache, _ops, _stable  # noqa: E402

ops = torch.ops.flashcore
pytestmark = pytest.mark.skipif(not _stable.is_registered("forward"), reason="operators are implemented in Python")


def cases():
    q, k, v = torch.randn(2, 70, 4, 64), torch.randn(2, 230, 2, 64), torch.randn(2, 230, 2, 64)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 61, 140], [0, 227, 460]))
    caches = [torch.randn(2, 300, 2, 64) for _ in "kv"]
    new = [torch.randn(2, 70, 2, 64) for _ in "kv"]
    tables = [torch.rand(400, 16) for _ in range(2)]
    lengths = torch.tensor([211, 3], dtype=torch.int32)
    pages = [torch.randn(11, 32, 2, 64) for _ in "kv"]
    table = torch.randperm(11)[:10].view(2, 5).to(torch.int32)
    slopes, sinks, bias = torch.rand(4), torch.randn(4), torch.randn(1, 4, 70, 230)
    forward, varlen, cache = _ops.miss_forward, _ops.miss_varlen_forward, _kvcache.miss_kvcache_forward
    return {
        "forward": ("forward", forward, (q, k, v, None, True)),
        "transposed": ("forward", forward, (q, k.transpose(1, 2).contiguous().transpose(1, 2), v, 0.0, False)),
        "with all": ("forward", forward, (q, k, v, 0.2, False, 60, 9, 5.0, True, slopes, sinks, bias, None, lengths, None, True)),
        "bfloat16": ("forward", forward, tuple(x.bfloat16() for x in (q, k, v))),
        "varlen": ("varlen_forward", varlen, (*packed, cu_q, cu_k, 79, 233, None, True)),
        "pages": ("varlen_forward", varlen, (packed[0], *pages, cu_q, None, 79, 160, None, True, *[-1] * 2, 0.0, False, None, None, None, lengths.clamp(max=160), None, None, table, True)),
        "cache": ("kvcache_forward", cache, (q, *caches, None, None, lengths)),
        "append": ("kvcache_forward", cache, (q, *caches, *new, lengths, *tables, False, None, None, None, None, None, None, None, 0.3, True)),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(cases()))
def test_hits_have_the_bits_of_misses(name):
    torch.manual_seed(5)
    operator, miss, arguments = cases()[name]
    CACHE.clear()
    with torch.no_grad():
        for turn in range(3):
            given = [torch.randn_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
            twin = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
            given = [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).copy_(x) if isinstance(x, torch.Tensor) else x for x in given]
            actual, (expected, _) = getattr(ops, operator)(*given), miss(*twin)
            assert _stable.launches(operator) == 1, "the second and third call are hits"
            for first, second in (*zip(actual, expected), *zip(given, twin)):
                if isinstance(first, torch.Tensor):
                    assert torch.equal(first, second) and first.dtype == second.dtype and first.shape == second.shape


def test_keys_tell_calls_apart():
    CACHE.clear()
    q, k = torch.randn(2, 130, 4, 64), torch.randn(2, 130, 4, 64)
    calls = [
        (q, k, k),
        (q, k, k, None, True),
        (q, k, k, 0.5),
        (q, k, k, 0.0),
        (q, k, k, None, False, 1),
        (q, k, k, None, False, -1, 1),
        (q, k, k, None, False, -1, -1, 1.0),
        (q, k, k, None, True, -1, -1, 0.0, True, torch.rand(4)),
        (q.half(), k.half(), k.half()),
        (q.bfloat16(), k.bfloat16(), k.bfloat16()),
        (q[:, :70], k, k),
        (q, k[:, :, :2], k[:, :, 2:]),
        (q, k, k[..., :32]),
        (q[:1], k[:1], k[:1]),
        (q, k.transpose(1, 2).contiguous().transpose(1, 2), k),  # other strides alone
    ]
    for _ in range(2):
        for arguments in calls:
            assert torch.equal(ops.forward(*arguments)[0], _ops.miss_forward(*arguments)[0][0])
    assert _stable.launches("forward") == len(calls)


def test_errors_are_those_of_python():
    q, k = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 2, 64)
    for call in (ops.forward, ops.forward.default):
        with pytest.raises(flashcore.InvalidArgument, match="v is float64 and q is float32"):
            call(q, k, k.double())
        with pytest.raises(RuntimeError, match="missing value for argument"):
            call(q)
        with pytest.raises(flashcore.InvalidArgument, match="v has shape"):
            call(q.clone().requires_grad_(), k, k[:, :30])
    # A launch that fails: the library says why in the call itself.
    cache, new = torch.randn(1, 40, 2, 64), torch.randn(1, 1, 2, 64)
    arguments = (torch.randn(1, 1, 2, 64), cache, cache.clone(), new, new)
    with torch.no_grad():
        ops.kvcache_forward(*arguments, torch.tensor([10], dtype=torch.int32))
        for _ in range(2):
            with pytest.raises(flashcore.InvalidArgument, match="sequence 0 uses 40 rows of the cache and gets 1 more"):
                ops.kvcache_forward(*arguments, torch.tensor([40], dtype=torch.int32))
        ops.kvcache_forward(*arguments, torch.tensor([39], dtype=torch.int32))
    assert torch.equal(cache[:, 39], new[:, 0])


def test_an_error_is_raised_once():
    q = torch.randn(1, 70, 2, 64)
    with pytest.raises(flashcore.InvalidArgument):
        ops.forward(q, q, q.double())
    # The next error is torch's own: that of the kernel must not come back in its place.
    with pytest.raises(RuntimeError, match="missing value") as caught:
        ops.forward(q)
    assert not isinstance(caught.value, flashcore.FlashcoreError)


def test_grad_is_refused_in_every_call():
    q, cache = torch.randn(1, 1, 2, 64), torch.randn(1, 40, 2, 64)
    lengths = torch.tensor([10], dtype=torch.int32)
    for _ in range(2):
        ops.kvcache_forward(q, cache, cache, None, None, lengths)
        with torch.no_grad():
            ops.kvcache_forward(q.clone().requires_grad_(), cache, cache, None, None, lengths)
        with pytest.raises(flashcore.NoBackward):
            ops.kvcache_forward(q.clone().requires_grad_(), cache, cache, None, None, lengths)
    x = q.clone().requires_grad_()
    out = ops.forward(x, q, q)[0]
    with pytest.raises(flashcore.NoBackward):
        out.sum().backward()


def steps_of_autograd(call):
    """How often the Python part of autograd runs in a call."""
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen.count("autograd_impl")


def test_autograd_has_no_step_without_grad():
    q, k = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 2, 64)
    x = q.clone().requires_grad_()
    for operator in (ops.forward, ops.forward.default):
        assert steps_of_autograd(lambda: operator(x, k, k)) == 1
        assert steps_of_autograd(lambda: operator(q, k, k)) == 0
        with torch.no_grad():
            assert steps_of_autograd(lambda: operator(x, k, k)) == 0
        assert operator(x, k, k)[0].requires_grad and not operator(q, k, k)[0].requires_grad
        # By name as well as by place.
        assert operator(q, k=k, v=x)[0].requires_grad


def test_modes_see_calls_without_grad():
    q, k = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 2, 64)
    seen = []

    class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):
            seen.append(call)
            return call(*args, **(kwargs or {}))

    class FunctionMode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, call, types, args=(), kwargs=None):
            seen.append(call)
            return call(*args, **(kwargs or {}))

    expected, lengths = ops.forward(q, k, k)[0], torch.tensor([70], dtype=torch.int32)
    for mode in (DispatchMode, FunctionMode):
        for grad in (torch.no_grad, torch.enable_grad):
            with grad(), mode():
                seen.clear()
                assert torch.equal(ops.forward.default(q, k, k)[0], expected)
                assert seen.pop(0) is ops.forward.default
                seen.clear()
                assert torch.equal(ops.kvcache_forward.default(q, k, k, None, None, lengths)[0], expected)
                assert seen.pop(0) is ops.kvcache_forward.default
    found = torch.func.vmap(lambda x: ops.forward(x, k, k)[0])(q[None])
    assert torch.equal(found[0], expected)


def test_plans_that_go():
    q = torch.randn(1, 133, 2, 64)
    CACHE.clear()
    assert _stable.launches("forward") == 0
    expected = ops.forward(q, q, q)[0]
    plan = _ops.miss_forward(q, q, q)[1][-1]
    CACHE.plans.clear()
    plan.destroy()
    assert torch.equal(ops.forward(q, q, q)[0], expected)
    assert torch.equal(ops.forward(q, q, q)[0], expected)
    assert _stable.launches("forward") == 1


def test_nothing_is_kept():
    lengths = torch.tensor([10], dtype=torch.int32)
    tensors = []

    def work(is_right):
        q, cache = torch.randn(1, 1, 2, 64), torch.randn(1, 40, 2, 64)
        slopes = torch.rand(2)
        try:
            with torch.no_grad():
                results = ops.kvcache_forward(q, cache, cache, None, None, lengths, alibi_slopes=slopes, scale=0.5)
                results += ops.forward(q, cache, cache if is_right else cache.double(), alibi_slopes=slopes)
        except flashcore.InvalidArgument as error:
            error.__traceback__ = None
        for x in (q, cache, slopes, *results):
            tensors.append(weakref.ref(x))

    for is_right in (True, True, False, True):  # a miss, a hit, an error, a hit
        work(is_right)
    gc.collect()
    assert [x() for x in tensors] == [None] * len(tensors)


def test_threads_run_beside_each_other():
    cases = [torch.randn(1, rows, 2, 64) for rows in range(100, 120)]
    with torch.inference_mode():
        expected = [_ops.miss_forward(q, q, q)[0][0] for q in cases]
    wrong = []

    def work(offset):
        with torch.inference_mode():
            for turn in range(150):
                index = (7 * offset + turn) % len(cases)
                if turn % 40 == 39 and offset < 2:
                    CACHE.clear()
                try:
                    is_same = torch.equal(ops.forward(*[cases[index]] * 3)[0], expected[index])
                except Exception as error:  # a thread's error is one of the test
                    wrong.append(error)
                else:
                    if not is_same:
                        wrong.append(index)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fork():
    torch.set_num_threads(1)
    q = torch.randn(1, 70, 2, 64)
    expected = ops.forward(q, q, q)[0]
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if np.array_equal(ops.forward(q, q, q)[0].numpy(), expected.numpy()) else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("variable", ["FLASHCORE_STABLE", "FLASHCORE_FAST"])
def test_without_it(variable):
    program = (
        "import torch, flashcore.torch as ft; from flashcore.torch import _stable\n"
        "assert not _stable.is_registered('forward')\n"
        "q = torch.ones(1, 3, 1, 64); assert torch.equal(torch.ops.flashcore.forward(q, q, q)[0], q)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, variable: "0"})


def test_graphs_call_it():
    q, k = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 2, 64)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(q, k):
        return ft.forward(q * 2, k, k, causal=True)[0] + 1

    with torch.no_grad():
        expected = ft.forward(q * 2, k, k, causal=True)[0] + 1
        CACHE.clear()
        for _ in range(2):
            assert torch.equal(model(q, k), expected)
        assert _stable.launches("forward") == 1
        with pytest.raises(flashcore.InvalidArgument, match="the head dim of k is 32"):
            model(q, k[..., :32])


COPIES = """
import importlib, os, shutil, sys, tempfile
import torch
import flashcore, flashcore.torch as first
from flashcore import _library
from flashcore.compat.flash_attn import flash_attn_func
from flashcore.torch import _stable

folder = tempfile.mkdtemp()
try:
    modules = [first]
    for name in ("flashcore_other", "flashcore_third"):
        copy = os.path.join(folder, name)
        shutil.copytree(os.path.dirname(flashcore.__file__), copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for library in ("libflashcore.so", "libflashcore_python.so"):
            shutil.copyfile(os.path.join(os.path.dirname(_library.path()), library), os.path.join(copy, library))
        os.environ["FLASHCORE_LIBRARY"] = os.path.join(copy, "libflashcore.so")
        sys.path.insert(0, folder)
        modules.append(importlib.import_module(f"{name}.torch"))
        importlib.import_module(f"{name}.compat.flash_attn")
    names = [module.NAMESPACE for module in modules]
    assert names[0] == "flashcore" and len(set(names)) == 3, names
    assert all(name.startswith("flashcore_") for name in names[1:]), names
    q, k = torch.randn(2, 130, 4, 64), torch.randn(2, 300, 2, 64)
    expected = first.forward(q, k, k, None, True)[0]
    for module in modules:
        stable = importlib.import_module(module.__name__ + "._stable")
        cache = importlib.import_module(module.__name__.replace(".torch", "") + "._plans").CACHE
        plain = importlib.import_module(module.__name__.replace(".torch", "") + ".compat.flash_attn")
        others = [len(importlib.import_module(x.__name__.replace(".torch", "") + "._plans").CACHE.plans) for x in modules if x is not module]
        operator = getattr(torch.ops, module.NAMESPACE).forward
        for _ in range(2):
            assert torch.equal(operator(q, k, k, None, True)[0], expected)
            assert torch.equal(module.forward(q, k, k, None, True)[0], expected)
            assert torch.equal(plain.flash_attn_func(q, k, k, causal=True), expected)
        assert stable.is_registered("forward") and stable.launches("forward") >= 1
        assert len(cache.plans) >= 1
        assert others == [len(importlib.import_module(x.__name__.replace(".torch", "") + "._plans").CACHE.plans) for x in modules if x is not module]
        x = q.clone().requires_grad_()
        try:
            module.forward(x, k, k)[0].sum().backward()
        except Exception as error:
            assert type(error).__module__.split(".")[0] == module.__name__.split(".")[0], type(error)
        else:
            raise AssertionError("there is no backward")
        compiled = torch.compile(lambda x: module.forward(x, k, k, causal=True)[0], fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(compiled(q), expected)
finally:
    shutil.rmtree(folder)
print("apart")
"""


def test_copies_of_the_package_beside_each_other():
    done = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True)
    assert done.stdout.strip() == "apart", done.stderr[-3000:]
