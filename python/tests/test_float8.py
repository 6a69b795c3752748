"""FP8 tensors, their scales, and appends that quantise, against computations in float32."""

import os
import threading

import numpy as np
import pytest

import flashcore

torch = pytest.importorskip("torch")
import flashcore.torch as ft  # noqa: E402
from flashcore._plans import CACHE  # noqa: E402
from flashcore.compat import flash_attn_interface as fa3  # noqa: E402
from flashcore.torch import _fast, _float8, _stable  # noqa: E402

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def reference(q, k, v, causal=False):
    """[batch, row, head, column] in float64, bottom-right."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        rows, keys = scores.shape[-2:]
        mask = torch.arange(keys)[None, :] > torch.arange(rows)[:, None] + keys - rows
        scores = scores.masked_fill(mask, -float("inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def close(found, expected, tolerance):
    error = (found.double() - expected.double()).abs().max().item()
    assert error < tolerance, error


def scale_forms(batch, rows, heads):
    return [(), (1,), (heads,), (batch, heads), (batch, rows, heads)]


def spread(scale, batch, rows, heads):
    """A scale of any form as [batch, row, head, 1]."""
    if scale.dim() == 2:
        scale = scale[:, None, :]
    return scale.expand(batch, rows, heads)[..., None].double()


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("form", range(5))
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_fp8_cache(kv_type, form, layout):
    torch.manual_seed(form)
    batch, rows, keys, heads, kv_heads, dim = 2, 5, 203, 4, 2, 64
    q = torch.randn(batch, rows, heads, dim, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, keys, kv_heads, dim).to(kv_type) for _ in "kv")
    shape = scale_forms(batch, keys, kv_heads)[form]
    k_scale, v_scale = torch.rand(shape) + 0.25, torch.rand(shape) + 0.25
    expected = reference(
        q, k.double() * spread(k_scale, batch, keys, kv_heads), v.double() * spread(v_scale, batch, keys, kv_heads), True
    )
    given = [q, k, v, k_scale, v_scale]
    if layout == "bhsd":
        given = [x.transpose(1, 2) if x.dim() >= 3 else x for x in given]
    out = flashcore.attention(*given[:3], layout=layout, causal=True, k_scale=given[3], v_scale=given[4])
    assert out.dtype == torch.bfloat16
    close(out if layout == "bshd" else out.transpose(1, 2), expected, 0.02)
    bytes_given = [x.view(torch.uint8) for x in given[1:3]]
    again = flashcore.attention(
        given[0], *bytes_given, layout=layout, causal=True, k_scale=given[3], v_scale=given[4], kv_dtype=kv_type
    )
    assert torch.equal(again, out)


def test_all_fp8():
    torch.manual_seed(0)
    batch, rows, heads, kv_heads, dim = 2, 130, 4, 2, 64
    q = torch.randn(batch, rows, heads, dim).to(torch.float8_e4m3fn)
    k, v = (torch.randn(batch, rows, kv_heads, dim).to(torch.float8_e4m3fn) for _ in "kv")
    descales = [torch.rand(batch, kv_heads) + 0.5 for _ in range(3)]
    per_query_head = descales[0].repeat_interleave(2, 1)
    expected = reference(
        q.double() * spread(per_query_head, batch, rows, heads), k.double() * spread(descales[1], batch, rows, kv_heads),
        v.double() * spread(descales[2], batch, rows, kv_heads), True,
    )  # fmt: skip
    out, lse = fa3.flash_attn_func(
        q, k, v, causal=True, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2], return_attn_probs=True
    )
    assert out.dtype == torch.bfloat16 and lse.shape == (batch, heads, rows)
    close(out, expected, 0.05)
    half = flashcore.attention(
        q, k, v, layout="bshd", causal=True, q_scale=descales[0], k_scale=descales[1], v_scale=descales[2],
        out_dtype=torch.float16,
    )  # fmt: skip
    assert half.dtype == torch.float16
    close(half, expected, 0.05)
    # A scale for each row of each query head.
    q_rows = torch.rand(batch, rows, heads) + 0.5
    out = flashcore.attention(q, k, v, layout="bshd", q_scale=q_rows)
    close(out, reference(q.double() * q_rows[..., None], k, v), 0.05)


def test_varlen_and_pages():
    torch.manual_seed(1)
    heads, kv_heads, dim, kv_type = 4, 2, 64, torch.float8_e4m3fn
    lengths = [70, 3, 129]
    cu = torch.tensor([0, 70, 73, 202], dtype=torch.int32)
    q = torch.randn(202, heads, dim, dtype=torch.float16)
    k, v = (torch.randn(202, kv_heads, dim).to(kv_type) for _ in "kv")
    k_descale, v_descale = torch.rand(3, kv_heads) + 0.5, torch.rand(3, kv_heads) + 0.5
    out = fa3.flash_attn_varlen_func(
        q, k, v, cu, cu, 129, 129, causal=True, k_descale=k_descale, v_descale=v_descale
    )
    for b, length in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        scaled = [x[None, rows].double() * s[b][None, None, :, None] for x, s in ((k, k_descale), (v, v_descale))]
        close(out[rows], reference(q[None, rows], *scaled, True)[0], 0.005)
    # Pages of 16 rows with a scale for each row and head.
    pages, table = 20, torch.randperm(20)[:18].reshape(2, 9).int()
    k_cache, v_cache = (torch.randn(pages, 16, kv_heads, dim).to(kv_type) for _ in "kv")
    k_scale, v_scale = torch.rand(pages, 16, kv_heads) + 0.5, torch.rand(pages, 16, kv_heads) + 0.5
    q, used = torch.randn(2, 3, heads, dim, dtype=torch.float16), torch.tensor([130, 77], dtype=torch.int32)
    out = flashcore.attention(
        q, k_cache, v_cache, layout="bshd", causal=True, page_table=table, seqused_k=used, k_scale=k_scale, v_scale=v_scale
    )
    for b in range(2):
        keys, values = (
            (x.double() * s[..., None])[table[b].long()].flatten(0, 1)[None, : int(used[b])]
            for x, s in ((k_cache, k_scale), (v_cache, v_scale))
        )
        close(out[b], reference(q[b : b + 1], keys, values, True)[0], 0.005)


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("compute", [False, True])
def test_append_quantises(kv_type, compute):
    torch.manual_seed(2)
    tokens, heads, dim = 9, 2, 32
    k, v = (torch.randn(tokens, heads, dim, dtype=torch.bfloat16) for _ in "kv")
    k[3, 1] = 0
    caches = [torch.zeros(4, 8, heads, dim).to(kv_type) for _ in "kv"]
    slots = torch.randperm(32)[:tokens]
    slots[5] = -1
    largest = torch.finfo(kv_type).max
    if compute:
        scales = [torch.full((4, 8, heads), -1.0) for _ in "kv"]
    else:
        # Values beyond the largest number saturate.
        scales = [torch.tensor([0.5, 2.0 / largest]) for _ in "kv"]
    ft.append(k, v, *caches, slots, k_scale=scales[0], v_scale=scales[1], compute_scales=compute)
    for x, cache, scale in ((k, caches[0], scales[0]), (v, caches[1], scales[1])):
        rows = cache.flatten(0, 1)
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            own = scale.flatten(0, 1)[slot] if compute else scale
            if compute:
                amax = x[token].float().abs().amax(-1)
                assert torch.equal(own, torch.where(amax == 0, 1.0, amax / largest))
            expected = (x[token].float() / own[:, None]).clamp(-largest, largest).to(kv_type)
            assert torch.equal(rows[slot].view(torch.uint8), expected.view(torch.uint8))
        others = [slot for slot in range(32) if slot not in slots.tolist()]
        assert not rows.view(torch.uint8)[others].any()
        if compute:
            assert (scale.flatten(0, 1)[others] == -1).all()


@pytest.mark.parametrize("compute", [False, True])
def test_kvcache(compute):
    torch.manual_seed(3)
    batch, room, heads, kv_heads, dim, kv_type = 3, 40, 4, 2, 32, torch.float8_e4m3fn
    q, k, v = (torch.randn(batch, 2, h, dim, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))
    caches = [torch.randn(batch, room, kv_heads, dim).to(kv_type) for _ in "kv"]
    lengths = torch.tensor([0, 17, 38], dtype=torch.int32)
    shape = (batch, room, kv_heads) if compute else (batch, kv_heads)
    k_scale, v_scale = torch.rand(shape) + 0.5, torch.rand(shape) + 0.5
    angles = torch.rand(room, dim // 2) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    if compute:
        out, _ = torch.ops.flashcore.float8_kvcache_forward(
            q, *caches, k, v, lengths, k_scale, v_scale, True, cos, sin, False, causal=True
        )
    else:
        out = fa3.flash_attn_with_kvcache(
            q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, k_descale=k_scale, v_descale=v_scale,
            causal=True, rotary_interleaved=False,
        )  # fmt: skip

    def rotated(x, first):
        half, rows = dim // 2, slice(first, first + x.shape[0])
        a, b = x.float()[..., :half], x.float()[..., half:]
        c, s = cos.float()[rows, None], sin.float()[rows, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    for b in range(batch):
        first = int(lengths[b])
        keys, values = (
            cache[b, : first + 2].double() * (scale[b, : first + 2] if compute else scale[b].expand(first + 2, -1))[..., None]
            for cache, scale in zip(caches, (k_scale, v_scale))
        )
        # What was appended is near what was given.
        close(keys[first:], rotated(k[b], first), 0.4)
        close(values[first:], v[b], 0.4)
        query = rotated(q[b], first).bfloat16()
        close(out[b], reference(query[None], keys[None], values[None], True)[0], 0.03)


def test_mistakes_are_named():
    q = torch.randn(1, 2, 4, 32, dtype=torch.float16)
    k = torch.randn(1, 9, 2, 32).to(torch.float8_e4m3fn)
    call = lambda **given: flashcore.attention(q, k, k, layout="bshd", **given)  # noqa: E731
    with pytest.raises(flashcore.InvalidArgument, match=r"k_scale\[1\] is nan|k_scale\[1\] is NaN"):
        call(k_scale=torch.tensor([1.0, float("nan")]))
    with pytest.raises(flashcore.InvalidArgument, match="k_scale has shape"):
        call(k_scale=torch.ones(3))
    with pytest.raises(flashcore.InvalidArgument, match="must be float32"):
        call(k_scale=torch.ones(2, dtype=torch.float64))
    with pytest.raises(flashcore.InvalidArgument, match="q_scale is given and q is float16"):
        call(q_scale=torch.ones(()))
    with pytest.raises(flashcore.InvalidArgument, match="kv_dtype is"):
        call(kv_dtype="int8")
    with pytest.raises(flashcore.InvalidArgument, match="with an FP8 query all are FP8"):
        flashcore.attention(k, q, q, layout="bshd")
    with pytest.raises(flashcore.Unsupported, match="attention_chunk"):
        fa3.flash_attn_func(q, k, k, attention_chunk=4)
    with pytest.raises(flashcore.Unsupported, match="k_descale"):
        fa3.flash_attn_func(q, q, q, k_descale=torch.ones(1, 4))
    with pytest.raises(flashcore.InvalidArgument, match="compute_scales"):
        new = torch.randn(2, 2, 32, dtype=torch.float16)
        caches = [torch.zeros(1, 4, 2, 32).to(torch.float8_e4m3fn) for _ in "kv"]
        ft.append(new, new, *caches, torch.arange(2), compute_scales=True)


def test_numpy():
    generator = np.random.default_rng(0)
    q = generator.standard_normal((1, 4, 3, 32)).astype(np.float32)
    codes = [torch.randn(1, 2, 50, 32).to(torch.float8_e4m3fn) for _ in "kv"]
    k, v = (x.view(torch.uint8).numpy() for x in codes)
    scale = np.array([0.5, 1.5], dtype=np.float32)
    out = flashcore.attention(q, k, v, kv_dtype="float8_e4m3fn", k_scale=scale, v_scale=scale)
    expected = flashcore.attention(
        torch.from_numpy(q), *codes, k_scale=torch.from_numpy(scale), v_scale=torch.from_numpy(scale)
    )
    assert np.array_equal(out, expected.numpy())
    # A scale for each row lies like the tensor.
    rows = generator.random((1, 2, 50), dtype=np.float32) + 0.5
    found = flashcore.attention(q, k, v, kv_dtype="float8_e4m3fn", k_scale=rows)
    expected = flashcore.attention(torch.from_numpy(q), *codes, k_scale=torch.from_numpy(rows))
    assert np.array_equal(found, expected.numpy())
    types = pytest.importorskip("ml_dtypes")
    typed = [x.view(types.float8_e4m3fn) for x in (k, v)]
    assert np.array_equal(flashcore.attention(q, *typed, k_scale=scale, v_scale=scale), out)


def test_compiled():
    q = torch.randn(1, 8, 4, 32, dtype=torch.float16)
    k = torch.randn(1, 9, 2, 32).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.5, 2.0])
    function = lambda q, k: torch.ops.flashcore.float8_forward(q, k, k, None, scale, scale, causal=True)[0]  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k), function(q, k))


def launched_cases():
    kv_type = torch.float8_e4m3fn
    q, k, v = (torch.randn(2, rows, heads, 64) for rows, heads in ((70, 4), (230, 2), (230, 2)))
    half, codes, all_codes = q.half(), [x.to(kv_type) for x in (k, v)], [x.to(kv_type) for x in (q, k, v)]
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    lengths = torch.tensor([211, 3], dtype=torch.int32)
    new, tables = [torch.randn(2, 3, 2, 64).half() for _ in "kv"], [torch.rand(400, 16).half() for _ in range(2)]
    rows = [torch.rand(2, 230, 2) + 0.5 for _ in "kv"]
    rest = (None, None, None, None, 0.2, True, -1, -1, 0.0, False, torch.rand(4), None, None, None, lengths, None, None, None)
    forward, kvcache = "float8_forward", "float8_kvcache_forward"
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 61, 140], [0, 227, 460]))
    packed = [x.flatten(0, 1) for x in (half, *codes)]
    return {
        "keys": (forward, (half, *codes, None, *scales[1:])),
        "all, and LSE": (forward, (*all_codes, *scales, *rest, True)),
        "half output": (forward, (*all_codes, *scales, *rest, False, torch.float16)),
        "rows": (forward, (half, *codes, None, *rows)),
        "packed": (forward, (*packed, None, *scales[1:], cu_q, cu_k, 79, 233, None, True)),
        "append": (kvcache, (half[:, :3], *codes, *new, lengths, *scales[1:], False, *tables)),
        "append and compute scales": (kvcache, (half[:, :3], *codes, *new, lengths, *rows, True, *tables)),
    }


def other_numbers(x):
    """A tensor like `x` with other numbers."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    numbers = torch.rand(x.shape) + 0.5 if x.dtype == torch.float32 else torch.randn(x.shape)
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).copy_(numbers)


def same(first, second):
    if not isinstance(first, torch.Tensor):
        return True
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.skipif(not ft.is_fast(), reason="libflashcore_python.so is not there")
@pytest.mark.parametrize("way", ["exchange", "attributes", "no_grad", "enable_grad", "inference_mode"])
@pytest.mark.parametrize("name", list(launched_cases()))
def test_hits_have_the_bits_of_misses(name, way, monkeypatch):
    torch.manual_seed(6)
    operator, arguments = launched_cases()[name]
    miss = {"float8_forward": _float8.miss_forward, "float8_kvcache_forward": _float8.miss_kvcache_forward}[operator]
    CACHE.clear()
    if way in ("exchange", "attributes"):
        if way == "attributes":
            monkeypatch.setattr(_fast, "_exchange", lambda: 0)

        def refuse(*arguments):
            raise AssertionError("this call is plain")

        mode, function = torch.no_grad, _fast.operation(miss, refuse)
        count = lambda: _fast.launches(function)  # noqa: E731
    else:
        if not _stable.is_registered(operator):
            pytest.skip("operators are implemented in Python")
        mode, function = getattr(torch, way), getattr(torch.ops.flashcore, operator)
        count = lambda: _stable.launches(operator)  # noqa: E731
    with mode():
        for _ in range(3):
            given = [other_numbers(x) for x in arguments]
            twin = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
            actual, (expected, _) = function(*given), miss(*twin)
            assert count() == 1, "the second and third call are hits"
            assert all(same(x, y) for x, y in (*zip(actual, expected), *zip(given, twin)))


def test_grad_is_refused():
    q = torch.randn(1, 3, 2, 64)
    caches = [torch.randn(1, 40, 2, 64).to(torch.float8_e4m3fn) for _ in "kv"]
    lengths = torch.tensor([10], dtype=torch.int32)
    for _ in range(2):
        for x in (q, q.clone().requires_grad_()):
            calls = (
                lambda: torch.ops.flashcore.float8_forward(x, *caches),
                lambda: torch.ops.flashcore.float8_kvcache_forward(x, *caches, q, q, lengths),
                lambda: flashcore.attention(x, *caches, layout="bshd"),
                lambda: fa3.flash_attn_func(x, *caches),
                lambda: fa3.flash_attn_with_kvcache(x, *caches, q, q, cache_seqlens=lengths),
            )
            for call in calls:
                with torch.no_grad():
                    call()
                if x.requires_grad:
                    with pytest.raises(flashcore.NoBackward, match="call it under torch.no_grad"):
                        call()
                else:
                    call()
                assert torch.is_grad_enabled()


def test_types_of_outputs_are_named():
    codes = torch.randn(1, 3, 2, 64).to(torch.float8_e4m3fn)
    for function in (torch.ops.flashcore.float8_forward, _float8.forward):
        nothing = [None] * 7
        given = (codes, codes, codes, *nothing, None, False, -1, -1, 0.0, False, *[None] * 8, False)
        for dtype in (torch.float16, torch.bfloat16):
            assert function(*given, dtype)[0].dtype == dtype
        for dtype in (torch.float32, torch.float64):
            with pytest.raises(flashcore.InvalidArgument, match="with an FP8 query it must be float16 or bfloat16"):
                function(*given, dtype)
        with pytest.raises((flashcore.InvalidArgument, TypeError)):
            function(*given, torch.int64)


def test_threads_and_a_fork():
    cases = []
    for rows in range(60, 72):
        q = torch.randn(1, rows, 2, 64).half()
        codes, scale = [torch.randn(1, 150, 2, 64).to(torch.float8_e4m3fn) for _ in "kv"], torch.rand(1, 2) + 0.5
        cases.append((q, *codes, None, scale, scale))
    with torch.no_grad():
        expected = [_float8.miss_forward(*case)[0][0] for case in cases]
        wrong = []

        def work(offset):
            for turn in range(60):
                index = (5 * offset + turn) % len(cases)
                if turn % 25 == 24 and offset < 2:
                    CACHE.clear()
                function = torch.ops.flashcore.float8_forward if turn % 2 else _float8.forward
                try:
                    is_same = torch.equal(function(*cases[index])[0], expected[index])
                except Exception as error:  # a thread's error is one of the test
                    wrong.append(error)
                else:
                    wrong.extend([] if is_same else [index])

        threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        torch.set_num_threads(1)
        child = os.fork()
        if child == 0:
            try:
                functions = (torch.ops.flashcore.float8_forward, _float8.forward)
                found = [function(*cases[0])[0].numpy() for function in functions]
                os._exit(0 if all(np.array_equal(x, expected[0].numpy()) for x in found) else 3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
