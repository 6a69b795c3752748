"""Derivatives of every function and operator, forward and reverse, by torch.func and without: refused by name, never zeros."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.autograd import forward_ad  # noqa: E402

import flashcore  # noqa: E402
import flashcore.torch as ft  # noqa: E402
from flashcore.compat import flash_attn as fa2  # noqa: E402
from flashcore.compat import flash_attn_interface as fa3  # noqa: E402

ops = torch.ops.flashcore
ROWS = 5
ENDS = torch.tensor([0, 2, ROWS], dtype=torch.int32)
USED = torch.tensor([3], dtype=torch.int32)
K = torch.randn(1, 8, 2, 64)
CODES = K.to(torch.float8_e4m3fn)
SLOPES = torch.rand(2, 2)


def written(function, *outputs):
    """A call that writes into tensors, with the first of them as its result."""
    function(*outputs)
    return outputs[0]


# Functions of a query [1, row, head, column].
FUNCTIONS = {
    "attention": lambda q: flashcore.attention(q, K, K, layout="bshd"),
    "attention, out": lambda q: flashcore.attention(q, K, K, layout="bshd", out=torch.empty(1, ROWS, 2, 64)),
    "forward": lambda q: ft.forward(q, K, K)[0],
    "varlen_forward": lambda q: ft.varlen_forward(q[0], K[0], K[0], ENDS, ENDS, ROWS, ROWS)[0],
    "kvcache_forward": lambda q: ft.kvcache_forward(q, K, K, cache_seqlens=USED)[0],
    "append and attend": lambda q: ft.kvcache_forward(q, K.clone(), K.clone(), q, q, USED)[0],
    "float8": lambda q: flashcore.attention(q, CODES, CODES, layout="bshd"),
    "ops.forward": lambda q: ops.forward(q, K, K)[0],
    "ops.forward.default": lambda q: ops.forward.default(K, q, q)[0],
    "ops.forward, values": lambda q: ops.forward(K, K[:, :ROWS], q)[0],
    "ops.forward, bias": lambda q: ops.forward(K, K[:, :ROWS], K[:, :ROWS], bias=q[..., 0, 0])[0],
    "ops.forward_out": lambda q: written(lambda out: ops.forward_out(q, K, K, out=out), torch.empty(1, ROWS, 2, 64)),
    "ops.varlen_forward": lambda q: ops.varlen_forward(q[0], K[0], K[0], ENDS, ENDS, ROWS, ROWS)[0],
    "ops.varlen_forward_out": lambda q: written(
        lambda out: ops.varlen_forward_out(q[0], K[0], K[0], ENDS, ENDS, ROWS, ROWS, out=out), torch.empty(ROWS, 2, 64)
    ),
    "ops.kvcache_forward": lambda q: ops.kvcache_forward(q, K, K, cache_seqlens=USED)[0],
    "ops.float8_forward": lambda q: ops.float8_forward(q, CODES, CODES)[0],
    "ops.float8_kvcache_forward": lambda q: ops.float8_kvcache_forward(q, CODES.clone(), CODES.clone(), q, q, USED)[0],
    "ops.continue_forward": lambda q: written(
        lambda out, lse: ops.continue_forward(q, K, K, out, lse), torch.zeros(1, ROWS, 2, 64), torch.zeros(1, 2, ROWS)
    ),
    "ops.append": lambda q: ops.append(q[0], q[0], K.clone(), K.clone(), torch.arange(ROWS), q[0]),
    "ops.merge": lambda q: ops.merge(torch.stack([q[0], q[0]]), torch.zeros(2, 2, ROWS))[0],
    "ops.merge_out": lambda q: written(
        lambda out: ops.merge_out(torch.stack([q[0], q[0]]), torch.zeros(2, 2, ROWS), out=out), torch.empty(ROWS, 2, 64)
    ),
    "fa2 func": lambda q: fa2.flash_attn_func(q, K, K),
    "fa2 varlen": lambda q: fa2.flash_attn_varlen_func(q[0], K[0], K[0], ENDS, ENDS, ROWS, ROWS),
    "fa2 varlen, slopes of each": lambda q: fa2.flash_attn_varlen_func(
        q[0], K[0], K[0], ENDS, ENDS, ROWS, ROWS, alibi_slopes=SLOPES
    ),
    "fa2 cache": lambda q: fa2.flash_attn_with_kvcache(q, K, K, cache_seqlens=USED),
    "fa3 func": lambda q: fa3.flash_attn_func(q, K, K),
    "fa3 chunks": lambda q: fa3.flash_attn_func(q, K, K, attention_chunk=4),
    "fa3 cache": lambda q: fa3.flash_attn_with_kvcache(q, K, K, cache_seqlens=USED),
}  # fmt: skip


def dual(function, q):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(q, torch.ones_like(q)))).tangent


DERIVATIVES = {
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),))[1],
    "dual": dual,
    "jacfwd": lambda f, q: torch.func.jacfwd(lambda x: f(x * q).sum())(torch.ones(())),
    "grad": lambda f, q: torch.func.grad(lambda x: f(x).sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q)[1](f(q)),
    "jvp of grad": lambda f, q: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (q,), (torch.ones_like(q),)),
    "grad of jvp": lambda f, q: torch.func.grad(lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1].sum())(q),
    "backward": lambda f, q: f(q.clone().requires_grad_()).sum().backward(),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_derivative(name):
    function, q = FUNCTIONS[name], torch.randn(1, ROWS, 2, 64)
    function(q)
    for derivative in DERIVATIVES.values():
        for _ in range(2):
            with pytest.raises(flashcore.NoBackward, match="flashcore computes the (output alone|forward pass only)"):
                derivative(function, q)
    # What is not differentiated is computed, in the same places.
    expected = function(q)
    with forward_ad.dual_level():
        assert torch.equal(function(q), expected)
        # A tangent of another tensor is no matter.
        other = forward_ad.make_dual(torch.ones(()), torch.ones(()))
        assert torch.equal(function(q), expected) and forward_ad.unpack_dual(other * 2).tangent == 2
    _, tangent = torch.func.jvp(lambda x: x * function(q).sum(), (torch.ones(()),), (torch.ones(()),))
    assert tangent == expected.sum()


def test_graphs_and_scripts():
    q = torch.randn(1, ROWS, 2, 64)
    one = torch.ones_like(q)
    with pytest.raises(Exception, match="flashcore computes the output alone") as caught:
        torch.compile(lambda x: torch.func.jvp(FUNCTIONS["fa2 func"], (x,), (one,))[1], backend="aot_eager")(q)
    assert "NoBackward" in repr(caught.value) + str(caught.value)

    scripted = script()
    expected = ops.forward(q, K, K, None, True)[0]
    for _ in range(2):
        assert torch.equal(scripted(q, K), expected)
    for derivative in DERIVATIVES.values():
        with pytest.raises(RuntimeError, match="flashcore computes the (output alone|forward pass only)"):
            derivative(lambda x: scripted(x, K), q)


def script():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        return torch.jit.script(_scripted)


def _scripted(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.ops.flashcore.forward(q, k, k, None, True)[0]


def test_scripts_are_saved(tmp_path):
    import warnings

    q = torch.randn(1, ROWS, 2, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(script(), str(tmp_path / "script.pt"))
        loaded = torch.jit.load(str(tmp_path / "script.pt"))
    assert torch.equal(loaded(q, K), ops.forward(q, K, K, None, True)[0])
    with pytest.raises(RuntimeError, match="v is float64 and q is float32|k is float64 and q is float32"):
        loaded(q, K.double())
