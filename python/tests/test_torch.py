"""torch.ops.flashcore.* against float64, under opcheck and torch.compile, on the CPU and, where there is one, a GPU."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashcore  # noqa: E402
import flashcore.torch as ft  # noqa: E402
from reference import attend, attend_batch, close  # noqa: E402

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")),
]
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
ops = torch.ops.flashcore


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(7)
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


def dtypes(device):
    return [torch.float16, torch.bfloat16] + ([torch.float32] if device.type == "cpu" else [])


def randn(device, *shape, dtype=torch.float16):
    return torch.randn(*shape).to(dtype).to(device)


def host(tensor):
    return tensor.detach().float().cpu().numpy()


def ints(device, values):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_left": 70, "window_right": 9}, {"softcap": 15.0, "causal": True, "top_left": True}],
    ids=str,
)
def test_forward(device, heads, options):
    for dtype in dtypes(device):
        q, k, v = randn(device, 2, 333, heads[0], 64, dtype=dtype), *(randn(device, 2, 401, heads[1], 64, dtype=dtype) for _ in "kv")
        reference = {
            "causal": options.get("causal", False),
            "window": (options.get("window_left", -1), options.get("window_right", -1)),
            "softcap": options.get("softcap", 0.0),
            "top_left": options.get("top_left", False),
        }
        expected, expected_lse = attend_batch(host(q), host(k), host(v), **reference)
        out, lse = ops.forward(q, k, v, return_lse=True, **options)
        close(host(out), expected, NAMES[dtype])
        close(host(lse), expected_lse, NAMES[dtype], "lse")
        again, nothing = ft.forward(q, k, v, **options)
        assert again.dtype == dtype and nothing.numel() == 0
        close(host(again), expected, NAMES[dtype])
        whole = torch.full((2, 333, heads[0], 128), 7, dtype=dtype, device=device)
        ops.forward_out(q, k, v, out=whole[..., 32:96], **options)
        close(host(whole[..., 32:96]), expected, NAMES[dtype])
        assert (whole[..., :32] == 7).all() and (whole[..., 96:] == 7).all()


def test_layouts(device):
    q, k, v = (randn(device, 2, 300, 4, 64) for _ in "qkv")
    expected = attend_batch(host(q), host(k), host(v), causal=True)[0]
    bhsd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out, lse = flashcore.attention(*bhsd, causal=True, return_lse=True)
    assert out.shape == (2, 4, 300, 64) and lse.shape == (2, 4, 300)
    close(host(out.transpose(1, 2)), expected, "float16")
    close(host(flashcore.attention(q, k, v, layout="bshd", causal=True)), expected, "float16")
    packed = torch.stack([q, k, v], 2)
    close(host(ops.forward(*packed.unbind(2), causal=True)[0]), expected, "float16")
    written = torch.empty_like(bhsd[0])
    assert flashcore.attention(*bhsd, causal=True, out=written) is written
    close(host(written.transpose(1, 2)), expected, "float16")


def test_operands(device):
    q, k, v = (randn(device, 2, 300, 4, 64) for _ in "qkv")
    slopes, sinks = torch.rand(4, device=device), torch.randn(4, device=device)
    bias = torch.randn(2, 1, 300, 300, device=device)
    bias[..., 5] = -float("inf")
    used = ints(device, [300, 131])
    out, lse = ops.forward(q, k, v, alibi_slopes=slopes, sinks=sinks, bias=bias, seqused_k=used, return_lse=True)
    for b, keys in enumerate([300, 131]):
        expected, expected_lse = attend(
            host(q[b]), host(k[b, :keys]), host(v[b, :keys]), slopes=host(slopes), sinks=host(sinks),
            bias=host(bias[b].expand(4, 300, 300))[:, :, :keys],
        )  # fmt: skip
        # The distance of ALiBi is from the row's position: bottom-right of the keys there are.
        close(host(out[b]), expected, "float16")
        close(host(lse[b]), expected_lse, "float16", "lse")


def test_padding(device):
    q, k, v = (randn(device, 2, 300, 4, 64) for _ in "qkv")
    used = [300, 131]
    for b in range(2):
        for x in (q, k, v):
            x[b, used[b] :] = float("nan")
    out, lse = ops.forward(
        q, k, v, causal=True, seqused_q=ints(device, used), seqused_k=ints(device, used), return_lse=True
    )
    for b, rows in enumerate(used):
        expected, expected_lse = attend(host(q[b, :rows]), host(k[b, :rows]), host(v[b, :rows]), causal=True)
        close(host(out[b, :rows]), expected, "float16")
        close(host(lse[b, :, :rows]), expected_lse, "float16", "lse")
        assert (out[b, rows:] == 0).all() and (lse[b, :, rows:] == -float("inf")).all()


def packed(device, lengths, heads, dim=64, extra=3):
    x = randn(device, sum(lengths) + extra, heads, dim)
    x[sum(lengths) :] = float("nan")
    return x, ints(device, np.cumsum([0, *lengths]).tolist())


def test_varlen(device):
    lengths_q, lengths_k = [130, 0, 1, 333], [301, 5, 260, 333]
    q, cu_q = packed(device, lengths_q, 4)
    (k, cu_k), (v, _) = packed(device, lengths_k, 2), packed(device, lengths_k, 2)
    whole = torch.full((q.shape[0], 4, 64), 7.0, dtype=q.dtype, device=device)
    out, lse = ops.varlen_forward(q, k, v, cu_q, cu_k, 333, 333, causal=True, return_lse=True)
    ops.varlen_forward_out(q, k, v, cu_q, cu_k, 333, 333, causal=True, out=whole)
    assert lse.shape == (4, q.shape[0])
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        expected, expected_lse = attend(host(q[rows]), host(k[keys]), host(v[keys]), causal=True)
        close(host(out[rows]), expected, "float16")
        close(host(whole[rows]), expected, "float16")
        close(host(lse[:, rows]), expected_lse, "float16", "lse")
    assert (whole[cu_q[-1] :] == 7).all()


def paged(device, lengths, page, heads, dim=64):
    """Shuffled pages with NaN in every row that no sequence has, and a table with entries that do not exist."""
    random = np.random.default_rng(3)
    width = max(-(-length // page) for length in lengths) + 2
    pages = sum(-(-length // page) for length in lengths) + 3
    k, v = (randn(device, pages, page, heads, dim) for _ in "kv")
    order, taken = random.permutation(pages), 0
    table = np.full((len(lengths), width), 2**30, np.int32)
    used = torch.zeros(pages, page, dtype=torch.bool)
    for b, length in enumerate(lengths):
        count = -(-length // page)
        table[b, :count] = order[taken : taken + count]
        taken += count
        for row in range(length):
            used[table[b, row // page], row % page] = True
    k[~used.to(device)] = float("nan")
    v[~used.to(device)] = float("nan")
    return k, v, torch.from_numpy(table).to(device)


def keys_of(cache, table, b, length, page):
    rows = torch.arange(length, device=cache.device)
    return cache[table[b].long()[rows // page], rows % page]


@pytest.mark.parametrize("page", [16, 48, 256])
def test_varlen_pages(device, page):
    lengths_k, lengths_q = [301, 400, 260], [1, 130, 64]
    k, v, table = paged(device, lengths_k, page, 2)
    q, cu_q = packed(device, lengths_q, 4)
    out, _ = ops.varlen_forward(
        q, k, v, cu_q, None, 130, 400, causal=True, seqused_k=ints(device, lengths_k), page_table=table
    )
    for b, length in enumerate(lengths_k):
        rows = slice(cu_q[b], cu_q[b + 1])
        expected = attend(host(q[rows]), host(keys_of(k, table, b, length, page)), host(keys_of(v, table, b, length, page)), causal=True)[0]
        close(host(out[rows]), expected, "float16")


def rotate(x, cos, sin, positions, interleaved):
    """[row, head, column] in float64."""
    x, half = np.array(x, np.float64), cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    c, s = np.float64(cos[positions])[:, None], np.float64(sin[positions])[:, None]
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


@pytest.mark.parametrize("is_paged", [False, True], ids=["batches", "pages"])
@pytest.mark.parametrize("rotary", [None, "neox", "gptj"], ids=str)
@pytest.mark.parametrize("rows", [(1, 1), (5, 5), (9, 4)], ids=str)
def test_kvcache(device, is_paged, rows, rotary):
    lengths, page, (sq, new) = [301, 17, 200], 32, rows
    if is_paged:
        after = [length + new for length in lengths]
        k_cache, v_cache, table = paged(device, after, page, 2)
        index, source = None, None
    else:
        k_cache, v_cache = (randn(device, 5, 330, 2, 64) for _ in "kv")
        table, index = None, [4, 0, 2]
        source = ints(device, index)
    q = randn(device, 3, sq, 4, 64)
    k, v = (randn(device, 3, new, 2, 64) for _ in "kv")
    angle = torch.rand(400, 16) * 6
    cos, sin = angle.cos().half().to(device), angle.sin().half().to(device)
    options = {} if rotary is None else {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary == "gptj"}
    before = [
        [host(keys_of(x, table, b, lengths[b], page) if is_paged else x[index[b], : lengths[b]]) for b in range(3)]
        for x in (k_cache, v_cache)
    ]
    out, lse = ops.kvcache_forward(
        q, k_cache, v_cache, k, v, ints(device, lengths), causal=True, kv_batch_idx=source, page_table=table,
        return_lse=True, **options,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        fresh, query = host(k[b]), host(q[b])
        if rotary:
            tables = host(cos), host(sin)
            fresh = rotate(fresh, *tables, length + np.arange(new), rotary == "gptj")
            query = rotate(query, *tables, length + np.arange(sq), rotary == "gptj")
        keys, values = np.concatenate([before[0][b], fresh]), np.concatenate([before[1][b], host(v[b])])
        total = length + new
        written = [keys_of(x, table, b, total, page) if is_paged else x[index[b], :total] for x in (k_cache, v_cache)]
        close(host(written[0]), keys, "float16", "key cache")
        close(host(written[1]), values, "float16", "value cache")
        expected, expected_lse = attend(query, keys, values, causal=True)
        close(host(out[b]), expected, "float16")
        close(host(lse[b]), expected_lse, "float16", "lse")
    if not is_paged:
        untouched = [b for b in range(5) if b not in index]
        assert not k_cache[untouched].isnan().any()


def test_kvcache_packed(device):
    lengths, new, sq = [200, 0, 300], [4, 7, 1], [4, 7, 1]
    k_cache, v_cache = (randn(device, 3, 320, 2, 64) for _ in "kv")
    q, cu_q = packed(device, sq, 4, extra=0)
    (k, cu_k), (v, _) = packed(device, new, 2, extra=2), packed(device, new, 2, extra=2)
    before = [host(k_cache), host(v_cache)]
    out, _ = ops.kvcache_forward(
        q, k_cache, v_cache, k, v, ints(device, lengths), cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_k, max_seqlen_q=7,
        causal=True,
    )  # fmt: skip
    for b in range(3):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys, values = (
            np.concatenate([x[b, : lengths[b]], host(y[cu_k[b] : cu_k[b + 1]])]) for x, y in zip(before, (k, v))
        )
        close(host(out[rows]), attend(host(q[rows]), keys, values, causal=True)[0], "float16")
        assert (host(k_cache)[b, lengths[b] + new[b] :] == before[0][b, lengths[b] + new[b] :]).all()


def test_append(device):
    tokens, pages, page = 70, 9, 16
    k, v, q = randn(device, tokens, 2, 64), randn(device, tokens, 2, 64), randn(device, tokens, 4, 64)
    both = torch.full((pages, 2, page, 2, 64), 7.0, dtype=k.dtype, device=device)  # K and V of a page side by side
    slots = torch.randperm(pages * page)[:tokens]
    slots[3] = -1
    positions = torch.arange(tokens, device=device)
    angle = torch.rand(100, 32) * 6
    cos, sin = angle.cos().half().to(device), angle.sin().half().to(device)
    rotated = ops.append(k, v, both[:, 0], both[:, 1], slots.to(device), q, positions, cos, sin)
    tables = host(cos), host(sin)
    close(host(rotated), rotate(host(q), *tables, np.arange(tokens), False), "float16")
    expected = np.full(both.shape, 7.0)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // page, 0, slot % page] = rotate(host(k), *tables, np.arange(tokens), False)[token]
            expected[slot // page, 1, slot % page] = host(v)[token]
    close(host(both), expected, "float16")


def test_merge(device):
    q = randn(device, 1, 130, 4, 64)
    k, v = randn(device, 1, 500, 2, 64), randn(device, 1, 500, 2, 64)
    cuts = [0, 100, 333, 500]
    parts, lses = zip(
        *(ops.forward(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in zip(cuts, cuts[1:]))
    )
    parts, lses = torch.cat(parts), torch.cat(lses)
    out, lse = ops.merge(parts, lses, torch.float32)
    expected, expected_lse = attend(host(q[0]), host(k[0]), host(v[0]))
    assert out.dtype == torch.float32
    close(host(out), expected, "float16")
    close(host(lse), expected_lse, "float16", "lse")
    lses[1:] = float("inf")
    parts[1:] = float("nan")
    close(host(ops.merge(parts, lses)[0]), host(parts[0]), "float16")
    close(host(ops.merge(parts[:1], lses[:1])[0]), host(parts[0]), "float16")


def test_continue(device):
    q, k, v = randn(device, 2, 130, 4, 64), randn(device, 2, 500, 2, 64), randn(device, 2, 500, 2, 64)
    used = ints(device, [100, 41])
    out, lse = torch.zeros_like(q), torch.full((2, 4, 130), -float("inf"), device=device)
    ops.continue_forward(q, k[:, 400:], v[:, 400:], out, lse, seqused_k=used)
    ops.continue_forward(q, k[:, :400], v[:, :400], out, lse)
    for b, count in enumerate([100, 41]):
        keys, values = (np.concatenate([host(x[b, :400]), host(x[b, 400 : 400 + count])]) for x in (k, v))
        expected, expected_lse = attend(host(q[b]), keys, values)
        close(host(out[b]), expected, "float16")
        close(host(lse[b]), expected_lse, "float16", "lse")
    with pytest.raises(flashcore.InvalidArgument, match="lse has strides"):
        ops.continue_forward(q, k, v, out, lse.transpose(1, 2).contiguous().transpose(1, 2))


def samples(device):
    q, k, v = (randn(device, 2, 70, 4, 64) for _ in "qkv")
    lengths = [60, 80]
    cu = ints(device, [0, 60, 140])
    packed_q = q.reshape(140, 4, 64)
    cos, sin = (randn(device, 100, 16) for _ in range(2))
    slots = torch.randperm(140, device=device)
    return {
        "forward": ((q, k, v), {"causal": True, "return_lse": True}),
        "forward_out": ((q, k, v), {"out": torch.empty_like(q)}),
        "varlen_forward": ((packed_q, k.reshape(140, 4, 64), v.reshape(140, 4, 64), cu, cu, 80, 80), {"return_lse": True}),
        "varlen_forward_out": (
            (packed_q, k.reshape(140, 4, 64), v.reshape(140, 4, 64), cu, cu, 80, 80), {"out": torch.empty_like(packed_q)},
        ),
        "kvcache_forward": (
            (q[:, :1], k.clone(), v.clone(), k[:, :1], v[:, :1], ints(device, [6, 9]), cos, sin), {"causal": True},
        ),
        "continue_forward": ((q, k, v, torch.zeros_like(q), torch.zeros(2, 4, 70, device=device)), {"causal": True}),
        "append": ((packed_q, packed_q, k.clone(), v.clone(), slots), {}),
        "merge": ((q, torch.randn(2, 4, 70, device=device)), {}),
        "merge_out": ((q, torch.randn(2, 4, 70, device=device)), {"out": torch.empty_like(q[0])}),
    }  # fmt: skip


OPERATORS = ["forward", "forward_out", "varlen_forward", "varlen_forward_out", "kvcache_forward", "continue_forward", "append", "merge", "merge_out"]


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(device, name):
    arguments, options = samples(device)[name]
    torch.library.opcheck(getattr(ops, name).default, arguments, options)


def test_compiled_equals_eager(device):
    def block(q, k, v):
        out, lse = ft.forward(q * 2, k, v, causal=True, return_lse=True)
        return torch.relu(out) + 1, lse

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (70, 133, 300):
        q, k, v = (randn(device, 2, rows, 4, 64) for _ in "qkv")
        for actual, expected in zip(compiled(q, k, v), block(q, k, v)):
            assert torch.equal(actual, expected)


def test_dynamic_shapes_compile_once(device):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    def block(q, k, v, k_cache, v_cache, lengths):
        out, _ = ft.forward(q, k, v, causal=True)
        row, _ = ft.kvcache_forward(out[:, :1], k_cache, v_cache, k[:, :1], v[:, :1], lengths, causal=True)
        return out, row

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for rows in (70, 133, 200, 257, 300):
        q, k, v = (randn(device, 2, rows, 4, 64) for _ in "qkv")
        caches = [randn(device, 2, rows, 4, 64) for _ in "kv"]
        twins = [x.clone() for x in caches]
        lengths = ints(device, [7, rows - 1])
        for actual, expected in zip(compiled(q, k, v, *caches, lengths), block(q, k, v, *twins, lengths)):
            assert torch.equal(actual, expected)
        assert torch.equal(caches[0], twins[0])
    assert len(graphs) <= 2, "one for the first shape, one for all others"
    torch._dynamo.reset()


def test_compiled_varlen_and_cache(device):
    def block(q, k, v, cu, longest, k_cache, v_cache, lengths):
        out, _ = ft.varlen_forward(q, k, v, cu, cu, longest, longest, causal=True)
        row, _ = ft.kvcache_forward(out[None, :1], k_cache, v_cache, k[None, :1], v[None, :1], lengths, causal=True)
        return out + 1, row

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([60, 80], [200, 133]):
        total = sum(lengths)
        q, k, v = (randn(device, total, 4, 64) for _ in "qkv")
        caches = [randn(device, 1, 50, 4, 64) for _ in range(2)]
        arguments = (q, k, v, ints(device, [0, lengths[0], total]), max(lengths))
        first, second = [x.clone() for x in caches], [x.clone() for x in caches]
        for actual, expected in zip(
            compiled(*arguments, *first, ints(device, [7])), block(*arguments, *second, ints(device, [7]))
        ):
            assert torch.equal(actual, expected)
        assert torch.equal(first[0], second[0]) and not torch.equal(first[0], caches[0])


def test_no_backward(device):
    q, k, v = (randn(device, 1, 70, 2, 64).requires_grad_() for _ in "qkv")
    out, _ = ft.forward(q, k, v)
    with pytest.raises(flashcore.NoBackward, match="forward pass only"):
        out.sum().backward()
    compiled = torch.compile(lambda q, k, v: ft.forward(q, k, v)[0], fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    with pytest.raises(flashcore.NoBackward, match="forward pass only"):
        out.sum().backward()
    with pytest.raises(flashcore.NoBackward, match="requires grad"):
        ops.forward_out(q, k, v, out=torch.empty_like(q))
    with torch.no_grad():
        ops.forward_out(q, k, v, out=torch.empty_like(q))


def test_bad_input(device):
    q = randn(device, 1, 70, 2, 64)
    check = [
        (lambda: ops.forward(q, q.float(), q), "k is float32 and q is float16"),
        (lambda: ops.forward(q.int(), q.int(), q.int()), "q is int32; it must be float16"),
        (lambda: ops.forward(q, q.transpose(1, 3), q), "the columns of k are 128 elements apart"),
        (lambda: ops.forward(q[0], q[0], q[0]), r"q has shape \(70, 2, 64\); it must be \[batch, rows"),
        (lambda: ops.forward(q, q[:, :, :1, :32], q[:, :, :1]), "the head dim of k is 32 and that of q 64"),
        (lambda: ops.forward(q, q, q, softcap=-2.0), "softcap is -2"),
        (lambda: ops.forward(q, q, q, sinks=torch.zeros(2, dtype=torch.float16, device=device)), "sinks is float16"),
        (lambda: ops.varlen_forward(q[0], q[0], q[0], torch.tensor([0, 70], device=device), None, 70, 70), "k has shape"),
        (lambda: ops.forward_out(q, q, q, out=q.float()), "out is torch.float32"),
        (lambda: ft.forward(q, q, q.transpose(1, 3)), "v has shape|the columns of v are 128 elements apart"),
        (lambda: ft.forward(q.to(torch.float8_e4m3fn), q, q), "with an FP8 query all are FP8"),
        (lambda: ops.kvcache_forward(q, q.clone(), q.clone(), q.float(), q, ints(device, [0])), "k is float32 and q is float16"),
        (lambda: ops.kvcache_forward(q, q.clone(), q.clone(), q[..., :32], q, ints(device, [0])), r"k has shape \(1, 70, 2, 32\)"),
        (lambda: ops.kvcache_forward(q, q.clone(), q.clone(), q, q, ints(device, [0]).long()), "cache_seqlens is torch.int64"),
        (lambda: ops.kvcache_forward(q, q.clone(), q.clone(), q, q), "k is given without cache_seqlens"),
        (lambda: flashcore.attention(q, q, np.zeros(3)), "v is a ndarray; it must be a torch tensor"),
        (lambda: flashcore.attention(q, q, q, device="cuda"), "leave them out"),
    ]
    for call, message in check:
        with pytest.raises(flashcore.InvalidArgument, match=message):
            call()
    with pytest.raises((TypeError, RuntimeError), match="dropout"):
        ops.forward(q, q, q, dropout=0.1)
    with pytest.raises(TypeError, match="dropout"):
        ft.forward(q, q, q, dropout=0.1)
    with pytest.raises(flashcore.NoBackward, match="requires grad"):
        ft.kvcache_forward(q, q.clone(), q.clone(), q.clone().requires_grad_(), q, ints(device, [0]))
    with pytest.raises(flashcore.NoBackward, match="requires grad"):
        ft.continue_forward(q.clone().requires_grad_(), q, q, q.clone(), torch.zeros(1, 2, 70, device=device))
    if device.type == "cuda":
        with pytest.raises(flashcore.InvalidArgument, match="k is on cpu and q on cuda:0"):
            ft.forward(q, q.cpu(), q)
        with pytest.raises(flashcore.FlashcoreError, match="head_dim"):
            ops.forward(*(randn(device, 1, 70, 2, 60) for _ in "qkv"))


def test_meta_device():
    q = torch.randn(1, 70, 2, 64, device="meta")
    out, lse = ops.forward(q, q, q, return_lse=True)
    assert out.shape == q.shape and out.device.type == "meta" and lse.shape == (1, 2, 70)


def test_empty(device):
    q, k = randn(device, 2, 3, 4, 64), randn(device, 2, 0, 4, 64)
    out, lse = ops.forward(q, k, k, return_lse=True)
    assert (out == 0).all() and (lse == -float("inf")).all()
    assert ops.forward(k, q, q)[0].shape == (2, 0, 4, 64)


def test_threads(device):
    cases = [[randn(device, 1, rows, 4, 64) for _ in "qkv"] for rows in (130, 200, 257, 300)]
    expected = [ft.forward(*case, causal=True)[0] for case in cases]
    wrong = []

    def work(offset):
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(stream):
            for turn in range(30):
                index = (offset + turn) % len(cases)
                if not torch.equal(ft.forward(*cases[index], causal=True)[0], expected[index]):
                    wrong.append(index)

    if device.type == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")
class TestCuda:
    """What only a GPU has: streams, graphs, devices."""

    def test_stream(self):
        stream = torch.cuda.Stream()
        q, k, v = (torch.randn(4, 2048, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
        expected = ft.forward(q, k, v, causal=True)[0]
        torch.cuda.synchronize()
        late = torch.zeros_like(q)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # the copy comes long after the call was made
            late.copy_(q)
            out = ft.forward(late, k, v, causal=True)[0]
        stream.synchronize()
        assert torch.equal(out, expected), "the launch waits for its own stream"

    def test_graph(self):
        q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.float16)
        k, v = (torch.randn(2, 4096, 2, 128, device="cuda", dtype=torch.float16) for _ in "kv")
        used = torch.tensor([4096, 100], dtype=torch.int32, device="cuda")
        ft.forward(q, k, v, seqused_k=used)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = ft.forward(q, k, v, seqused_k=used)
        for lengths in ([4096, 100], [33, 4000]):
            used.copy_(torch.tensor(lengths, dtype=torch.int32))
            q.normal_()
            graph.replay()
            torch.cuda.synchronize()
            for b, keys in enumerate(lengths):
                close(host(out[b]), attend(host(q[b]), host(k[b, :keys]), host(v[b, :keys]))[0], "float16")

    def test_inductor(self):
        q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.float16) for _ in "qkv")
        compiled = torch.compile(lambda q, k, v: ft.forward(q * 2, k, v, causal=True)[0] + 1, fullgraph=True)
        close(host(compiled(q, k, v)), host(ft.forward(q * 2, k, v, causal=True)[0] + 1), "float16")

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
    def test_other_device(self):
        q, k, v = (torch.randn(1, 300, 4, 64, device="cuda:1", dtype=torch.float16) for _ in "qkv")
        assert torch.cuda.current_device() == 0
        close(host(ft.forward(q, k, v)[0]), attend_batch(host(q), host(k), host(v))[0], "float16")

    def test_cuda_array_interface(self):
        q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.float16) for _ in "qkv")
        out = torch.empty_like(q)

        class Array:
            def __init__(self, tensor):
                self.__cuda_array_interface__ = tensor.__cuda_array_interface__

        torch.cuda.synchronize()
        flashcore.attention(Array(q), Array(k), Array(v), out=Array(out))
        torch.cuda.synchronize()
        assert torch.equal(out, flashcore.attention(q, k, v))
        with pytest.raises(flashcore.InvalidArgument, match="give out="):
            flashcore.attention(Array(q), Array(k), Array(v))
