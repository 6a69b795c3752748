"""flash_attn's functions by their names, against float64, on the CPU and, where there is one, a GPU."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashcore  # noqa: E402
from flashcore.compat import bert_padding  # noqa: E402
from flashcore.compat import flash_attn as fa2  # noqa: E402
from flashcore.compat import flash_attn_interface as fa3  # noqa: E402
from flashcore.compat.rotary import apply_rotary_emb  # noqa: E402
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
        (lambda: fa3.flash_attn_func(q, q, q, attention_chunk=3), "attention_chunk is 3"),
        (lambda: fa3.flash_attn_func(q, q, q, qv=q), "qv is given"),
        (lambda: fa3.flash_attn_func(q, q, q, q_descale=torch.ones(1, 2)), "q_descale is given"),
    ]:
        with pytest.raises(flashcore.Unsupported, match=message):
            call()
    with pytest.raises(TypeError, match="dropout"):
        fa2.flash_attn_func(q, q, q, dropout=0.1)


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


def test_signatures_have_no_catch_all():
    for module in (fa2, fa3):
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function):
                kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
                assert inspect.Parameter.VAR_KEYWORD not in kinds, name
