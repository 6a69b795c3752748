"""flash_attn's functions by their names, against float64, on the CPU and, where there is one, a GPU."""

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashcore  # noqa: E402
from flashcore.compat import _common as compat_common  # noqa: E402
from flashcore.compat import bert_padding  # noqa: E402
from flashcore.compat import flash_attn as fa2  # noqa: E402
from flashcore.compat import flash_attn_interface as fa3  # noqa: E402
from flashcore.compat.rotary import apply_rotary_emb  # noqa: E402
from flashcore_signatures import differences  # noqa: E402
from reference import attend, attend_batch, close  # noqa: E402
from test_torch import DEVICES, host, ints, keys_of, ops, packed, paged, randn, rotate  # noqa: E402


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(11)
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.mark.parametrize("dim", [40, 59, 64, 128])
@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_func(device, module, dim):
    q, k, v = randn(device, 2, 333, 4, dim), randn(device, 2, 401, 2, dim), randn(device, 2, 401, 2, dim)
    out, lse, *rest = module.flash_attn_func(q, k, v, causal=True, window_size=(300, -1), softcap=20.0, return_attn_probs=True)
    expected, expected_lse = attend_batch(host(q), host(k), host(v), causal=True, window=(300, -1), softcap=20.0)
    close(host(out), expected, "float16")
    close(host(lse), expected_lse, "float16", "lse")
    assert rest == ([None] if module is fa2 else [])
    assert isinstance(module.flash_attn_func(q, k, v), torch.Tensor)


def calls(q, k, v, **options):
    """The eager calls of attention, each of which has a key of its own: by function, by operator."""
    left, right = options.get("window_size", (-1, -1))
    others = {name: options[name] for name in ("causal", "softcap") if name in options}
    scale = options.get("softmax_scale")
    yield lambda: fa2.flash_attn_func(q, k, v, **options)
    yield lambda: ops.forward(q, k, v, scale=scale, window_left=left, window_right=right, **others)[0]


def test_calls_of_other_strides_and_options_have_other_plans(device):
    """Calls that differ in one thing, one after another, so that a plan of the one before would be found."""
    q, k, v = (randn(device, 2, 130, 4, 64) for _ in "qkv")
    tensors = {"q": q, "k": k, "v": v}
    variants = [({}, {})]
    for name, x in tensors.items():
        wide = torch.full((2, 130, 4, 128), 9.0, dtype=x.dtype, device=device)
        wide[..., :64] = x
        variants.append(({name: wide[..., :64]}, {}))
    variants += [
        ({}, {"causal": True}), ({}, {"softmax_scale": 0.3}), ({}, {"softcap": 3.0}), ({}, {"window_size": (20, -1)}),
        ({}, {"window_size": (-1, 20)}), ({}, {"window_size": (20, 20)}), ({}, {}),
    ]  # fmt: skip
    for other, options in variants:
        given = {**tensors, **other}
        reference = {"causal": options.get("causal", False), "window": options.get("window_size", (-1, -1))}
        reference.update(scale=options.get("softmax_scale"), softcap=options.get("softcap", 0.0))
        expected = attend_batch(*(host(x) for x in given.values()), **reference)[0]
        for call in calls(**given, **options):
            close(host(call()), expected, "float16")
    for name in "qkv":
        for wrong in (torch.float32, torch.bfloat16):
            for call in calls(**{**tensors, name: tensors[name].to(wrong)}):
                with pytest.raises(flashcore.InvalidArgument, match="convert one of them"):
                    call()
    # The strides of one batch less are the same.
    for call in calls(q, k, v[:1]):
        with pytest.raises(flashcore.InvalidArgument, match="v has shape"):
            call()


def test_packed_tensors(device):
    qkv = randn(device, 2, 300, 3, 4, 64)
    q, k, v = (host(x) for x in qkv.unbind(2))
    expected = attend_batch(q, k, v, causal=True)[0]
    close(host(fa2.flash_attn_qkvpacked_func(qkv, causal=True)), expected, "float16")
    close(host(fa3.flash_attn_qkvpacked_func(qkv, causal=True)), expected, "float16")
    close(host(fa2.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True)), expected, "float16")
    heads = qkv.flatten(2, 3)[:, :, : 4 + 2 + 2]
    grouped = attend_batch(host(heads[:, :, :4]), host(heads[:, :, 4:6]), host(heads[:, :, 6:]))[0]
    close(host(fa3.flash_attn_qkvpacked_func(heads, num_heads_q=4)), grouped, "float16")
    flat, cu = qkv.flatten(0, 1), ints(device, [0, 300, 600])
    close(host(fa2.flash_attn_varlen_qkvpacked_func(flat, cu, 300, causal=True)), expected.reshape(600, 4, 64), "float16")
    out = fa2.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 300, 300, causal=True)
    close(host(out), expected.reshape(600, 4, 64), "float16")
    turned = qkv.unbind(2)[1].transpose(1, 3).contiguous().transpose(1, 3)
    assert turned.stride(-1) != 1
    close(host(fa2.flash_attn_func(qkv[:, :, 0], turned, qkv[:, :, 2], causal=True)), expected, "float16")


def test_alibi(device):
    q, k, v = (randn(device, 3, 200, 4, 64) for _ in "qkv")
    slopes = torch.rand(3, 4, device=device) * 0.3
    one = attend_batch(host(q), host(k), host(v), slopes=host(slopes[0]))[0]
    close(host(fa2.flash_attn_func(q, k, v, alibi_slopes=slopes[0])), one, "float16")
    close(host(fa2.flash_attn_func(q, k, v, alibi_slopes=slopes[:1].expand(3, 4))), one, "float16")
    each = [attend(host(q[b]), host(k[b]), host(v[b]), slopes=host(slopes[b]), causal=True) for b in range(3)]
    out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    close(host(out), np.stack([x for x, _ in each]), "float16")
    close(host(lse), np.stack([x for _, x in each]), "float16", "lse")
    cu = ints(device, [0, 200, 400, 600])
    out, lse, _ = fa2.flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu, cu, 200, 200, causal=True, alibi_slopes=slopes,
        return_attn_probs=True,
    )  # fmt: skip
    close(host(out), np.concatenate([x for x, _ in each]), "float16")
    close(host(lse), np.concatenate([x for _, x in each], 1), "float16", "lse")
    out = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=200, causal=True, alibi_slopes=slopes)
    close(host(out), np.stack([x for x, _ in each]), "float16")


def test_varlen(device):
    lengths_q, lengths_k = [130, 1, 333], [301, 260, 333]
    q, cu_q = packed(device, lengths_q, 4)
    (k, cu_k), (v, _) = packed(device, lengths_k, 2), packed(device, lengths_k, 2)
    used = [300, 17, 333]
    results = [
        (fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 333, 333, causal=True), lengths_k),
        (fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 333, 333, causal=True), lengths_k),
        (fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 333, 333, seqused_k=ints(device, used), causal=True), used),
    ]
    for out, lengths in results:
        for b in range(3):
            rows, start = slice(cu_q[b], cu_q[b + 1]), int(cu_k[b])
            keys = slice(start, start + lengths[b])
            close(host(out[rows]), attend(host(q[rows]), host(k[keys]), host(v[keys]), causal=True)[0], "float16")


def test_varlen_pages(device):
    lengths_q, lengths_k, page = [1, 130, 64], [301, 400, 260], 256
    q, cu_q = packed(device, lengths_q, 4)
    k, v, table = paged(device, lengths_k, page, 2)
    cu_k = ints(device, np.cumsum([0, *lengths_k]).tolist())
    out = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 130, 400, causal=True, block_table=table)
    for b, length in enumerate(lengths_k):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys, values = (host(keys_of(x, table, b, length, page)) for x in (k, v))
        close(host(out[rows]), attend(host(q[rows]), keys, values, causal=True)[0], "float16")


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_kvcache(device, module, causal):
    lengths, new, left = [301, 40, 200], 5, [7, 0, 30]
    k_cache, v_cache = (randn(device, 3, 330, 2, 64) for _ in "kv")
    q, k, v = randn(device, 3, new, 4, 64), randn(device, 3, new, 2, 64), randn(device, 3, new, 2, 64)
    angle = torch.rand(400, 16) * 6
    cos, sin = angle.cos().half().to(device), angle.sin().half().to(device)
    before = host(k_cache), host(v_cache)
    out, lse = module.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=ints(device, lengths),
        cache_leftpad=ints(device, left), causal=causal, rotary_interleaved=False, return_softmax_lse=True,
    )  # fmt: skip
    tables = host(cos), host(sin)
    for b, length in enumerate(lengths):
        place = length + np.arange(new)  # padding counts, as in FlashAttention
        fresh = rotate(host(k[b]), *tables, place, False)
        query = rotate(host(q[b]), *tables, place if causal else place * 0 + place[0], False)
        keys = np.concatenate([before[0][b, left[b] : length], fresh])
        values = np.concatenate([before[1][b, left[b] : length], host(v[b])])
        expected, expected_lse = attend(query, keys, values, causal=causal)
        close(host(out[b]), expected, "float16")
        close(host(lse[b]), expected_lse, "float16", "lse")
        close(host(k_cache[b, length : length + new]), fresh, "float16", "key cache")


def test_combine(device):
    for parts, dim in ((1, 64), (2, 64), (17, 256)):
        partial = torch.randn(parts, 2, 70, 4, dim, device=device)
        lses = torch.randn(parts, 2, 4, 70, device=device).transpose(-1, -2)
        lses[0] = -float("inf") if parts > 1 else lses[0]
        out, lse = fa3.flash_attn_combine(partial, lses, out_dtype=torch.float16)
        total = torch.logsumexp(lses.double(), 0)
        expected = (partial.double() * (lses.double() - total).exp()[..., None]).sum(0)
        assert out.dtype == torch.float16 and lse.shape == (2, 70, 4)
        close(host(out), expected.cpu(), "float16")
        close(host(lse), total.cpu(), "float32", "lse")


def test_padding(device):
    x = randn(device, 3, 7, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0] * 7, [1] * 7], device=device)
    unused = torch.tensor([[0, 0, 0, 1, 0, 0, 0], [0] * 7, [0] * 7], device=device)
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert cu.dtype == torch.int32 and cu.tolist() == [0, 3, 3, 10] and longest == 7 and used.tolist() == [3, 0, 7]
    assert torch.equal(tokens, torch.cat([x[0, :3], x[2]]))
    assert torch.equal(bert_padding.pad_input(tokens, indices, 3, 7), x * mask[..., None])
    _, _, cu, _, used = bert_padding.unpad_input(x, mask, unused)
    assert cu.tolist() == [0, 4, 4, 11] and used.tolist() == [3, 0, 7]
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]], device=device)
    tokens, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 12, 13, 14, 15] and longest == 7
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1], x[2, :3]]))


def in_chunks(q, k, v, chunk, **options):
    """One sequence row after row: the keys of its chunk, as a row at the end of them."""
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full((q.shape[1], q.shape[0]), -np.inf)
    for row in range(q.shape[0]):
        position = row + k.shape[0] - q.shape[0]
        if position < 0:
            continue
        first = position // chunk * chunk
        last = min(first + chunk, k.shape[0])
        # The rows after this one in its chunk stand for the keys after it.
        after = last - 1 - position
        rows = np.concatenate([q[row : row + 1], np.zeros((after, *q.shape[1:]))])
        one, one_lse = attend(rows, k[first:last], v[first:last], **options)
        out[row], lse[:, row] = one[0], one_lse[:, 0]
    return out, lse


@pytest.mark.parametrize("causal, window", [(True, (-1, -1)), (False, (-1, -1)), (False, (23, 9))], ids=["causal", "all", "window"])
def test_attention_chunk(device, causal, window):
    """Chunks that lengths do not divide, more rows than keys, sequences without keys, and a cache in pages."""
    options = dict(causal=causal, window_size=window)
    reference = dict(causal=causal, window=window)
    for rows, keys, chunk in [(150, 213, 64), (213, 150, 47), (70, 70, 200), (1, 333, 64)]:
        q, k, v = randn(device, 2, rows, 4, 64), randn(device, 2, keys, 2, 64), randn(device, 2, keys, 2, 32)
        out, lse = fa3.flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **options)
        for b in range(2):
            expected, expected_lse = in_chunks(host(q)[b], host(k)[b], host(v)[b], chunk, **reference)
            close(host(out)[b], expected, "float16")
            close(host(lse)[b], expected_lse, "float16", "lse")
    lengths_q, lengths_k = [130, 1, 64, 90], [200, 150, 0, 40]
    q, k, v = randn(device, 300, 4, 64), randn(device, 400, 2, 64), randn(device, 400, 2, 64)
    cu_q, cu_k = (ints(device, np.cumsum([0, *lengths])) for lengths in (lengths_q, lengths_k))
    used_q, used_k = ints(device, [130, 1, 50, 90]), ints(device, [171, 150, 0, 33])
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 130, 200, seqused_q=used_q, seqused_k=used_k, attention_chunk=53, return_attn_probs=True, **options
    )
    for b in range(4):
        at_q, at_k = cu_q[b].item(), cu_k[b].item()
        rows, keys = slice(at_q, at_q + used_q[b].item()), slice(at_k, at_k + used_k[b].item())
        expected, expected_lse = in_chunks(host(q)[rows], host(k)[keys], host(v)[keys], 53, **reference)
        close(host(out)[rows], expected, "float16")
        close(host(lse)[:, rows], expected_lse, "float16", "lse")
        assert not host(out)[rows.stop : cu_q[b + 1].item()].any()


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
def test_attention_chunk_of_pages(device, rotary):
    """New keys are appended to pages, then each row sees its chunk."""
    k_cache, v_cache = randn(device, 24, 16, 2, 64), randn(device, 24, 16, 2, 64)
    table = torch.randperm(24, device=device).to(torch.int32).view(2, 12)
    lengths, leftpad = ints(device, [170, 31]), ints(device, [20, 0])
    q, k, v = randn(device, 2, 7, 4, 64), randn(device, 2, 7, 2, 64), randn(device, 2, 7, 2, 64)
    given = dict(cache_seqlens=lengths, cache_leftpad=leftpad, page_table=table, causal=True)
    if rotary:
        angle = torch.rand(200, 16, device=device)
        given.update(rotary_cos=angle.cos().half(), rotary_sin=angle.sin().half(), rotary_seqlens=lengths)
    out = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, attention_chunk=33, **given)
    if rotary:
        # One chunk that holds everything is no chunk at all, which goes another way.
        caches = [k_cache.clone(), v_cache.clone()]
        whole = fa3.flash_attn_with_kvcache(q, *caches, k, v, attention_chunk=1000, **given)
        close(host(whole), host(fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **given)), "float16")
        assert torch.allclose(caches[0], k_cache, atol=2e-3) and torch.equal(caches[1], v_cache)
        return
    for b in range(2):
        keys, values = (host(cache)[host(table)[b].astype(int)].reshape(-1, 2, 64) for cache in (k_cache, v_cache))
        end = lengths[b].item() + 7
        assert (keys[end - 7 : end] == host(k)[b]).all() and (values[end - 7 : end] == host(v)[b]).all()
        inside = slice(leftpad[b].item(), end)
        close(host(out)[b], in_chunks(host(q)[b], keys[inside], values[inside], 33, causal=True)[0], "float16")


def test_positions_without_an_embedding_are_ignored(device):
    """FlashAttention 3 takes rotary_seqlens with and without rotary_cos, for 16-bit and FP8 caches."""
    q, k, v = randn(device, 2, 5, 4, 64), randn(device, 2, 5, 2, 64), randn(device, 2, 5, 2, 64)
    lengths = ints(device, [250, 31])
    for dtype in (torch.float16, torch.float8_e4m3fn):
        caches = [randn(device, 2, 300, 2, 64).to(dtype) for _ in "kv"]
        results = []
        for positions in (None, ints(device, [7, 3]), ints(device, [7, 3])):
            given = [x.clone() for x in caches]
            out = fa3.flash_attn_with_kvcache(
                q, *given, k, v, cache_seqlens=lengths, rotary_seqlens=positions, causal=True
            )
            results.append([out, *(x.float() for x in given)])
        for found in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(found, results[0]))


def test_wide_values(device, monkeypatch):
    """Values of more columns than kernels of GPUs have; on the CPU the same way is taken here."""
    monkeypatch.setattr(compat_common, "_has_limit", lambda v: True)
    q, k, v = randn(device, 1, 70, 4, 64), randn(device, 1, 150, 2, 64), randn(device, 1, 150, 2, 520)
    expected, expected_lse = attend_batch(host(q), host(k), host(v), causal=True)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    close(host(out), expected, "float16")
    close(host(lse), expected_lse, "float16", "lse")
    cu_q, cu_k = ints(device, [0, 70]), ints(device, [0, 150])
    out, lse = fa3.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 70, 150, causal=True, return_attn_probs=True)
    close(host(out), expected[0], "float16")
    close(host(lse), expected_lse[0], "float16", "lse")


def test_windows_may_be_tensors(device):
    q = randn(device, 1, 150, 2, 64)
    expected = fa2.flash_attn_func(q, q, q, window_size=(20, 3))
    assert torch.equal(fa2.flash_attn_func(q, q, q, window_size=torch.tensor([20, 3])), expected)


def test_private_functions(device):
    """Those of FlashAttention 2 that context-parallel libraries call."""
    q, k = randn(device, 1, 150, 4, 64), randn(device, 1, 170, 2, 64)
    expected, expected_lse = attend_batch(host(q), host(k), host(k), causal=True, scale=0.2)
    out, lse, *rest = fa2._flash_attn_forward(q, k, k, 0.0, 0.2, True, -1, -1, 0.0, None, False)
    close(host(out), expected, "float16")
    close(host(lse), expected_lse, "float16", "lse")
    cu_q, cu_k = ints(device, [0, 150]), ints(device, [0, 170])
    given = (q[0], k[0], k[0], cu_q, cu_k, 150, 170, 0.0, 0.2, True)
    out, lse, *rest = fa2._flash_attn_varlen_forward(*given)
    close(host(out), expected[0], "float16")
    close(host(lse), expected_lse[0], "float16", "lse")
    assert rest == [None, None]
    with pytest.raises(flashcore.Unsupported, match="num_splits is 2"):
        fa2._flash_attn_varlen_forward(*given, num_splits=2)


def test_gradients_of_calls_in_parts_are_refused(device):
    q = randn(device, 20, 2, 64).requires_grad_()
    cu, slopes = ints(device, [0, 13, 20]), torch.rand(2, 2, device=device)
    out = fa2.flash_attn_varlen_func(q, q, q, cu, cu, 13, 13, alibi_slopes=slopes)
    expected = fa2.flash_attn_varlen_func(q.detach(), q.detach(), q.detach(), cu, cu, 13, 13, alibi_slopes=slopes)
    assert torch.equal(out.detach(), expected)
    with pytest.raises(flashcore.NoBackward):
        out.sum().backward()


def test_rotary(device):
    x = randn(device, 2, 9, 3, 64)
    angle = torch.rand(40, 16) * 6
    cos, sin = angle.cos().half().to(device), angle.sin().half().to(device)
    for interleaved in (False, True):
        out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=ints(device, [3, 20]))
        for b, offset in enumerate((3, 20)):
            close(host(out[b]), rotate(host(x[b]), host(cos), host(sin), offset + np.arange(9), interleaved), "float16")
    cu = ints(device, [0, 4, 9])
    out = apply_rotary_emb(x[0], cos, sin, cu_seqlens=cu, max_seqlen=5)
    close(host(out), rotate(host(x[0]), host(cos), host(sin), np.array([0, 1, 2, 3, 0, 1, 2, 3, 4]), False), "float16")


def test_compiled(device):
    q, k, v = (randn(device, 2, 200, 4, 64) for _ in "qkv")
    compiled = torch.compile(
        lambda q, k, v: fa2.flash_attn_func(q, k, v, causal=True) + 1, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q, k, v), fa2.flash_attn_func(q, k, v, causal=True) + 1)


def test_refusals(device):
    q = randn(device, 1, 8, 2, 64)
    for call, message in [
        (lambda: fa2.flash_attn_func(q, q, q, dropout_p=0.1), "dropout_p is 0.1; flashcore has no dropout"),
        (lambda: fa3.flash_attn_func(q, q, q, qv=q), "qv is given"),
        (lambda: fa3.flash_attn_func(q, q, q, q_descale=torch.ones(1, 2)), "q_descale is given"),
    ]:
        with pytest.raises(flashcore.Unsupported, match=message):
            call()
    with pytest.raises(TypeError, match="dropout"):
        fa2.flash_attn_func(q, q, q, dropout=0.1)
    if device.type == "cpu":
        cache, table = randn(device, 4, 256, 2, 64), torch.zeros(1, 1, dtype=torch.int32)
        for new, length in ((None, 257), (q[:, :1], 256)):
            with pytest.raises(flashcore.InvalidArgument, match=r"has 257 keys .* block_table of shape \(1, 1\) has pages for 256"):
                fa2.flash_attn_with_kvcache(q[:, :1], cache, cache.clone(), new, new, cache_seqlens=length, block_table=table)


def test_install():
    program = """
import flashcore.compat
flashcore.compat.install()
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, __version__
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn_interface import flash_attn_combine, get_scheduler_metadata
import flash_attn_interface, flash_attn
assert flash_attn.flash_attn_func is not flash_attn_interface.flash_attn_func
flashcore.compat.install()
flashcore.compat.uninstall()
try:
    import flash_attn.bert_padding
except ImportError:
    print("done")
import sys, types
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
try:
    flashcore.compat.install()
except RuntimeError as error:
    assert "imported already" in str(error)
    print("refused")
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.stdout.split() == ["done", "refused"], output.stderr


def test_signatures():
    """Names, order and defaults of the pinned revision; bench/third_party/flash_attn_signatures.py writes the file."""
    with open(os.path.join(os.path.dirname(__file__), "flash_attn_signatures.txt")) as file:
        lines = file.read().splitlines()
    assert len(lines) > 20 and differences(lines) == []
    changed = [line.replace("causal=False", "causal=True") for line in lines]
    assert len(differences(changed)) == sum(line != other for line, other in zip(lines, changed)) > 8


def test_signatures_have_no_catch_all():
    for module in (fa2, fa3):
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function):
                kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
                assert inspect.Parameter.VAR_KEYWORD not in kinds, name
