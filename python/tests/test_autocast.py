"""Autocast, as torch's own attention honours it: float tensors become its type, float64 and FP8 stay."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashcore  # noqa: E402
import flashcore.torch as ft  # noqa: E402
from flashcore.compat import flash_attn as fa2  # noqa: E402
from flashcore.compat import flash_attn_interface as fa3  # noqa: E402

ops = torch.ops.flashcore
ROWS = 8
ENDS = torch.tensor([0, 3, ROWS], dtype=torch.int32)
USED = torch.tensor([4], dtype=torch.int32)
SLOPES, SINKS, BIAS = torch.rand(2, 2), torch.randn(2), torch.randn(1, 2, ROWS, ROWS)

# Functions of q, k, v [1, row, head, column].
FUNCTIONS = {
    "attention": lambda q, k, v: flashcore.attention(q, k, v, layout="bshd", causal=True),
    "attention, operands": lambda q, k, v: flashcore.attention(q, k, v, layout="bshd", sinks=SINKS, bias=BIAS, alibi_slopes=SLOPES[0]),
    "forward": lambda q, k, v: ft.forward(q, k, v)[0],
    "varlen_forward": lambda q, k, v: ft.varlen_forward(q[0], k[0], v[0], ENDS, ENDS, ROWS, ROWS)[0],
    "ops.forward": lambda q, k, v: ops.forward(q, k, v)[0],
    "ops.forward by names": lambda q, k, v: ops.forward.default(v=v, q=q, k=k, causal=True)[0],
    "ops.varlen_forward": lambda q, k, v: ops.varlen_forward(q[0], k[0], v[0], ENDS, ENDS, ROWS, ROWS)[0],
    "fa2 func": lambda q, k, v: fa2.flash_attn_func(q, k, v),
    "fa2 func, slopes of each": lambda q, k, v: fa2.flash_attn_func(
        *(x.expand(2, -1, -1, -1) for x in (q, k, v)), alibi_slopes=SLOPES
    ),
    "fa2 varlen, slopes of each": lambda q, k, v: fa2.flash_attn_varlen_func(
        q[0], k[0], v[0], ENDS, ENDS, ROWS, ROWS, alibi_slopes=SLOPES
    ),
    "fa3 func": lambda q, k, v: fa3.flash_attn_func(q, k, v),
    "fa3 chunks": lambda q, k, v: fa3.flash_attn_func(q, k, v, attention_chunk=4),
}


def tensors(*dtypes):
    torch.manual_seed(4)
    return [torch.randn(1, ROWS, 2, 64).to(dtype) for dtype in dtypes]


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float_tensors_become_its_type(name, dtype):
    function = FUNCTIONS[name]
    for given in ([torch.float32] * 3, [torch.bfloat16, torch.float32, torch.float16]):
        q, k, v = tensors(*given)
        expected = function(*(x.to(dtype) for x in (q, k, v)))
        for _ in range(2):
            with torch.autocast("cpu", dtype=dtype):
                found = function(q, k, v)
            assert found.dtype == dtype and torch.equal(found, expected)
            sdpa = torch.nn.functional.scaled_dot_product_attention
            with torch.autocast("cpu", dtype=dtype):
                assert sdpa(*(x.float().transpose(1, 2) for x in (q, k, v))).dtype == dtype
    # Off, on for another device, and off inside: as without.
    q, k, v = tensors(*[torch.float32] * 3)
    expected = function(q, k, v)
    assert expected.dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype), torch.autocast("cpu", enabled=False):
        assert torch.equal(function(q, k, v), expected)
    with torch.amp.autocast("cuda", dtype=dtype, enabled=torch.cuda.is_available()):
        assert torch.equal(function(q, k, v), expected)


def test_double_and_codes_stay():
    q, k, v = tensors(*[torch.float64] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fa2.flash_attn_func(q, k, v), fa2.flash_attn_func(q, k, v)) and ft.forward(q, k, v)[0].dtype == torch.float64
        with pytest.raises(flashcore.InvalidArgument, match="k is bfloat16 and q is float64; convert one of them"):
            ft.forward(q, k.float(), v)
    q, k, v = tensors(torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fn)
    expected = flashcore.attention(q.bfloat16(), k, v, layout="bshd")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flashcore.attention(q, k, v, layout="bshd"), expected)


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_cache_is_written_in_its_own_type(cache):
    """Caches stay; the query and new rows become their type, or that of autocast where the cache is FP8."""
    is_float8 = cache == torch.float8_e4m3fn
    inside = torch.bfloat16 if is_float8 else cache
    q, k, v = tensors(torch.float32, torch.bfloat16, torch.float32)
    caches = [x.to(cache) for x in tensors(torch.float32, torch.float32)]
    twins = [x.clone() for x in caches]
    expected = fa3.flash_attn_with_kvcache(*(x.to(inside) for x in (q[:, :1],)), *twins, *(x[:, :1].to(inside) for x in (k, v)), cache_seqlens=USED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fa3.flash_attn_with_kvcache(q[:, :1], *caches, k[:, :1], v[:, :1], cache_seqlens=USED)
    assert found.dtype == inside and torch.equal(found, expected)
    assert all(torch.equal(x.float(), twin.float()) for x, twin in zip(caches, twins))


def test_what_writes_into_given_tensors_is_left_alone():
    q, k, v = tensors(*[torch.float32] * 3)
    out = torch.empty_like(q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ops.forward_out(q, k, v, out=out)
        assert torch.equal(out, flashcore.attention(q, k, v, layout="bshd", out=torch.empty_like(q)))
    assert torch.equal(out, ops.forward(q, k, v)[0])


def test_gradients_are_refused_as_without():
    q, k, v = tensors(*[torch.float32] * 3)
    q.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa2.flash_attn_func(q, k, v)
        with pytest.raises(flashcore.NoBackward):
            out.sum().backward()


def test_graphs():
    q, k, v = tensors(*[torch.float32] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = fa2.flash_attn_func(q, k, v)
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            compiled = torch.compile(lambda q, k, v: fa2.flash_attn_func(q, k, v), fullgraph=True, backend=backend)
            found = compiled(q, k, v)
            assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
