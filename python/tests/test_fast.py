"""The short way of eager calls: the same bits as the Python way, and never taken where something listens."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashcore  # noqa: E402
import flashcore.torch as ft  # noqa: E402
from flashcore._plans import CACHE  # noqa: E402
from flashcore.compat import _common, _short, flash_attn, flash_attn_interface  # noqa: E402
from flashcore.torch import _fast, _kvcache, _ops  # noqa: E402

pytestmark = pytest.mark.skipif(not ft.is_fast(), reason="libflashcore_python.so is not there")
ops = torch.ops.flashcore


@pytest.fixture(params=["exchange", "attributes"])
def make(request, monkeypatch):
    """Makes operations that read tensors by DLPack's exchange table, or by attributes."""
    if request.param == "attributes":
        monkeypatch.setattr(_fast, "_exchange", lambda: 0)
    elif not _fast._exchange():
        pytest.skip(f"torch {torch.__version__} has no exchange table")
    return _fast.operation


def refuse(*arguments):
    raise AssertionError("this call is plain")


def miss_output(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", scale, causal, left, right, softcap):
    """The output of `forward` alone."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    plan = _ops.attend(q, k, v, out, None, scale, causal, left, right, softcap)
    return out, _fast.launch_of(plan, _ops._FORWARD, 8, (out,), False)


def attention_cases():
    q, k, v = torch.randn(2, 130, 4, 64), torch.randn(2, 300, 2, 64), torch.randn(2, 300, 2, 64)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor([0, 100, 260], dtype=torch.int32), torch.tensor([0, 333, 600], dtype=torch.int32))
    pages = [torch.randn(11, 32, 2, 64) for _ in "kv"]
    table = torch.randperm(11)[:10].view(2, 5).to(torch.int32)
    lengths = torch.tensor([151, 3], dtype=torch.int32)
    new = [torch.randn(2, 5, 2, 64) for _ in "kv"]
    tables = [torch.rand(200, 16) for _ in range(2)]
    bias, sinks = torch.randn(1, 4, 130, 300), torch.randn(4)
    return {
        "forward": (_ops.miss_forward, (q, k, v, None, True, -1, -1, 0.0)),
        "lse": (_ops.miss_forward, (q, k, v, 0.2, False, 70, 9, 5.0, False, None, sinks, bias, None, None, None, True)),
        "output": (miss_output, (q, k.transpose(1, 2).contiguous().transpose(1, 2), v, None, True, -1, -1, 0.0)),
        "varlen": (_ops.miss_varlen_forward, (*packed, cu_q, cu_k, 160, 333, None, True)),
        "cache": (_kvcache.miss_kvcache_forward, (q[:, :5], *pages, None, None, lengths, *[None] * 2, True, None, None, None, table)),
        "append": (_kvcache.miss_kvcache_forward, (q[:, :5], *pages, *new, lengths, *tables, True, None, None, None, table)),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(attention_cases()))
def test_hits_have_the_bits_of_misses(make, name):
    torch.manual_seed(3)
    miss, arguments = attention_cases()[name]
    function = make(miss, refuse)
    for turn in range(3):
        # The same sizes, other numbers: addresses of the first call must not come back.
        floats = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in arguments]
        given = [torch.randn_like(x) if is_float else x for x, is_float in zip(arguments, floats)]
        twin = [x.clone() if is_float else x for x, is_float in zip(given, floats)]
        actual, (expected, _) = function(*given), miss(*twin)
        assert _fast.launches(function) == 1, "the second and third call are hits"
        actual, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (actual, expected))
        assert len(actual) == len(expected)
        for first, second in (*zip(actual, expected), *zip(given, twin)):
            assert not isinstance(first, torch.Tensor) or torch.equal(first, second) and first.dtype == second.dtype


def test_keys_tell_calls_apart(make):
    function = make(miss_output, refuse)
    q = torch.randn(2, 130, 4, 64)
    k = torch.randn(2, 130, 4, 64)
    calls = [
        (q, k, k, None, False, -1, -1, 0.0),
        (q, k, k, None, True, -1, -1, 0.0),
        (q, k, k, 0.5, True, -1, -1, 0.0),
        (q, k, k, None, False, 1, -1, 0.0),
        (q, k, k, None, False, -1, 1, 0.0),
        (q, k, k, None, False, -1, -1, 1.0),
        (q.half(), k.half(), k.half(), None, False, -1, -1, 0.0),
        (q.bfloat16(), k.bfloat16(), k.bfloat16(), None, False, -1, -1, 0.0),
        (q[:, :70], k, k, None, False, -1, -1, 0.0),
        (q, k[:, :, :2], k[:, :, 2:], None, False, -1, -1, 0.0),
        (q, k, k[..., :32], None, False, -1, -1, 0.0),
        (q[:1], k[:1], k[:1], None, False, -1, -1, 0.0),
        (q, k.transpose(1, 2).contiguous().transpose(1, 2), k, None, False, -1, -1, 0.0),  # other strides alone
    ]
    for _ in range(2):
        for arguments in calls:
            assert torch.equal(function(*arguments), miss_output(*arguments)[0])
    assert _fast.launches(function) == len(calls)


def test_not_plain_is_dispatched(make):
    seen = []

    def dispatch(*arguments):
        seen.append(arguments)
        return "dispatched"

    function = make(miss_output, dispatch)
    q, k = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 2, 64)
    rest = (None, False, -1, -1, 0.0)
    function(q, k, k, *rest)

    class Subclass(torch.Tensor):
        pass

    negative = torch.randn(1, 70, 2, 64, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    for other in (
        q.clone().requires_grad_(), torch.nn.Parameter(q.clone()), q.as_subclass(Subclass), negative, q.to("meta"), q.to_sparse(), 3.0,
    ):  # fmt: skip
        for place in range(3):
            arguments = [q, k, k]
            arguments[place] = other
            assert isinstance(function(*arguments, *rest), str), (type(other), place)
    with torch.no_grad():
        assert isinstance(function(q.clone().requires_grad_(), k, k, *rest), torch.Tensor)

    class FunctionMode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, call, types, args=(), kwargs=None):
            return call(*args, **(kwargs or {}))

    class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):
            return call(*args, **(kwargs or {}))

    count = len(seen)
    for mode in (FunctionMode(), DispatchMode()):
        with mode:
            assert isinstance(function(q, k, k, *rest), str), mode
    assert len(seen) == count + 2
    assert isinstance(function(q, k, k, *rest), torch.Tensor)


def test_listeners_get_right_results():
    q, k = torch.randn(3, 1, 70, 2, 64), torch.randn(1, 70, 2, 64)
    expected = torch.stack([ft.forward(x, k, k)[0] for x in q])
    assert torch.equal(torch.vmap(lambda x: ft.forward(x, k, k)[0])(q), expected)
    negative = torch.randn(1, 70, 2, 64, dtype=torch.complex64).conj().imag
    assert torch.equal(ft.forward(negative, k, k)[0], ft.forward(negative.resolve_neg(), k, k)[0])
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: ft.forward(x, k, k)[0])(q[0])
    assert torch.equal(graph(q[1]), expected[1])
    with torch._subclasses.FakeTensorMode():
        assert type(ft.forward(*[torch.empty(1, 70, 2, 64)] * 3)[0]).__name__ == "FakeTensor"


def test_what_a_hit_refuses(make):
    function = make(_kvcache.miss_kvcache_forward, refuse)
    q, k_cache, v_cache, k = (torch.randn(1, rows, 2, 64) for rows in (1, 40, 40, 1))
    function(q, k_cache, v_cache, k, k, torch.tensor([10], dtype=torch.int32))
    before = k_cache.clone()
    for _ in range(2):
        with pytest.raises(flashcore.InvalidArgument, match="sequence 0 uses 40 rows of the cache and gets 1 more"):
            function(q, k_cache, v_cache, k, k, torch.tensor([40], dtype=torch.int32))
    assert torch.equal(k_cache, before)
    function(q, k_cache, v_cache, k, k, torch.tensor([39], dtype=torch.int32))
    assert torch.equal(k_cache[:, 39], k[:, 0])
    with pytest.raises(TypeError, match="positional argument"):
        function(q)
    with pytest.raises(TypeError, match="positional argument"):
        function(*[q] * 30)


def test_plans_that_go(make):
    function = make(miss_output, refuse)
    q = torch.randn(1, 133, 2, 64)
    arguments = (q, q, q, None, True, -1, -1, 0.0)
    expected = function(*arguments)
    plan = miss_output(*arguments)[1][-1]
    # A plan that was destroyed under the table: the call goes the Python way, which makes another.
    CACHE.plans.clear()
    plan.destroy()
    assert torch.equal(function(*arguments), expected)
    assert torch.equal(function(*arguments), expected)
    assert _fast.launches(function) == 1
    CACHE.clear()
    assert _fast.launches(function) == 0
    assert torch.equal(function(*arguments), expected)


def test_threads(make):
    function = make(miss_output, refuse)
    cases = [torch.randn(1, rows, 2, 64) for rows in range(100, 130)]
    expected = [miss_output(q, q, q, None, True, -1, -1, 0.0)[0] for q in cases]
    wrong = []

    def work(offset):
        for turn in range(90):
            index = (7 * offset + turn) % len(cases)
            q = cases[index]
            if turn == 40 and offset == 0:
                CACHE.clear()
            if not torch.equal(function(q, q, q, None, True, -1, -1, 0.0), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fork(make):
    function = make(miss_output, refuse)
    torch.set_num_threads(1)
    q = torch.randn(1, 70, 2, 64)
    expected = function(q, q, q, None, True, -1, -1, 0.0)
    child = os.fork()
    if child == 0:
        try:
            is_same = np.array_equal(function(q, q, q, None, True, -1, -1, 0.0).numpy(), expected.numpy())
            os._exit(0 if is_same else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_references_are_given_back(make):
    import gc
    import sys

    function = make(_ops.miss_forward, refuse)
    q = torch.randn(1, 70, 2, 64)
    shape, counts = 0.125, []
    for _ in range(3):
        for _ in range(50):
            function(q, q, q, shape, True)
        gc.collect()
        counts.append((sys.getrefcount(q), sys.getrefcount(shape), sys.getrefcount(torch.float32), sys.getrefcount(torch.Tensor)))
    assert counts[1] == counts[2], counts


def compat_cases():
    q, k, v = torch.randn(2, 70, 4, 64), torch.randn(2, 230, 2, 64), torch.randn(2, 230, 2, 64)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 61, 140], [0, 227, 460]))
    caches = [torch.randn(2, 300, 2, 64) for _ in "kv"]
    new = [torch.randn(2, 70, 2, 64) for _ in "kv"]
    tables = [torch.rand(400, 16) for _ in range(2)]
    lengths = torch.tensor([211, 3], dtype=torch.int32)
    slopes = torch.rand(4)
    two, three = flash_attn, flash_attn_interface
    causal = {"causal": True}
    return {
        "dense": (two.flash_attn_func, _short.dense, (q, k, v), causal),
        "dense with all": (two.flash_attn_func, _short.dense, (q, k, v, 0.0, 0.2, False, (60, 3), 5.0, slopes, False, True), {}),
        "dense 3": (three.flash_attn_func, _short.dense, (q, k, v), {"window_size": (33, 0), "return_attn_probs": True}),
        "varlen": (two.flash_attn_varlen_func, _short.packed, (*packed, cu_q, cu_k, 79, 233), causal),
        "varlen with all": (
            two.flash_attn_varlen_func, _short.packed,
            (*packed, cu_q, cu_k, 79, 233, 0.0, 0.2, True, (60, 0), 5.0, slopes, False, True), {},
        ),
        "varlen 3": (three.flash_attn_varlen_func, _short.packed, (*packed, cu_q, cu_k, 79, 233, None, lengths), causal),
        "cache": (two.flash_attn_with_kvcache, two._cached, (q, *caches), {"cache_seqlens": lengths, "return_softmax_lse": True}),
        "append": (two.flash_attn_with_kvcache, two._cached, (q, *caches, *new, *tables, lengths), causal),
        "append 3": (
            three.flash_attn_with_kvcache, three._cached, (q, *caches, *new, None, *tables, lengths),
            {"softcap": 9.0, "window_size": (99, 0), "cache_leftpad": torch.tensor([9, 1], dtype=torch.int32)},
        ),
    }  # fmt: skip


def flat(result):
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


@pytest.mark.parametrize("name", list(compat_cases()))
def test_functions_of_flash_attn_hit(name):
    torch.manual_seed(4)
    function, builtin, arguments, options = compat_cases()[name]
    CACHE.clear()
    # First one tensor in all places of its shape, but for caches that are written: a launch must keep them apart.
    is_written = name.startswith("append")
    kinds = {}
    alike = [
        kinds.setdefault(x.shape, x)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and not (is_written and place in (1, 2))
        else x
        for place, x in enumerate(arguments)
    ]
    function(*alike, **options)
    assert _fast.launches(builtin) == 1
    for _ in range(2):
        given = [torch.randn_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
        twin = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
        actual = flat(function(*given, **options))
        assert _fast.launches(builtin) == 1, "a hit"
        CACHE.clear()
        expected = flat(function(*twin, **options))
        function(*twin, **options)
        assert len(actual) == len(expected)
        for first, second in zip(actual, expected):
            assert torch.equal(first, second) and first.dtype == second.dtype
        if is_written:
            assert all(torch.equal(x, y) for x, y in zip(given[1:3], twin[1:3])), "the caches"


def test_functions_of_flash_attn_that_copy_do_not_hit():
    CACHE.clear()
    # Columns apart are copied, and slopes of each batch are split: nothing of it is one launch of the given tensors.
    q = torch.randn(2, 70, 64, 4).transpose(-1, -2)
    k = torch.randn(2, 70, 4, 64)
    for _ in range(2):
        expected = flash_attn.flash_attn_func(q.contiguous(), k, k)
        assert torch.equal(flash_attn.flash_attn_func(q, k, k), expected)
    assert _fast.launches(_short.dense) == 1, "that of the contiguous query alone"
    slopes = torch.rand(2, 4)
    for _ in range(2):
        by_batch = [flash_attn.flash_attn_func(k[b : b + 1], k[b : b + 1], k[b : b + 1], alibi_slopes=slopes[b]) for b in range(2)]
        assert torch.equal(flash_attn.flash_attn_func(k, k, k, alibi_slopes=slopes), torch.cat(by_batch))
    assert _fast.launches(_short.dense) == 2


def test_windows_tell_calls_apart():
    CACHE.clear()
    q = torch.randn(1, 90, 2, 64)
    windows = [(-1, -1), (5, 0), (0, 5), (5, 5), (5, -1)]
    for _ in range(2):
        for window in windows:
            expected, _ = _common.dense(q, q, q, None, False, window, 0.0, None, False)
            assert torch.equal(flash_attn.flash_attn_func(q, q, q, window_size=window), expected)
            assert torch.equal(flash_attn.flash_attn_func(q, q, q, window_size=list(window)), expected)
            tensors = torch.tensor(window).unbind()
            assert torch.equal(flash_attn.flash_attn_func(q, q, q, window_size=tensors), expected)
    assert _fast.launches(_short.dense) == len(windows)


def test_lengths_are_checked_in_every_call():
    pages = [torch.randn(6, 16, 2, 64) for _ in "kv"]
    table = torch.arange(4, dtype=torch.int32).view(1, 4)
    q = torch.randn(1, 1, 2, 64)
    for lengths in (10, 60, 64):
        flash_attn.flash_attn_with_kvcache(q, *pages, cache_seqlens=torch.tensor([lengths], dtype=torch.int32), block_table=table)
    with pytest.raises(flashcore.InvalidArgument, match="a sequence has 65 keys .* block_table"):
        flash_attn.flash_attn_with_kvcache(q, *pages, cache_seqlens=torch.tensor([65], dtype=torch.int32), block_table=table)


def test_bench_host_compares_whole_calls(tmp_path):
    """The library's own time is in every figure, or in none: SDPA's figure has its computation in it."""
    file = tmp_path / "figures.json"
    program = [sys.executable, "-m", "flashcore.bench_host", "--batches", "4", "--json", str(file)]
    subprocess.run(program, check=True, capture_output=True, cwd=tmp_path)
    figures = json.loads(file.read_text())["host_us"]
    assert "torch SDPA" in figures and "way_us" not in figures["torch SDPA"]
    for name in ("flash_attn_func", "torch.ops.flashcore.forward", "flash_attn_with_kvcache"):
        assert figures[name]["us"] > figures[name]["way_us"]
