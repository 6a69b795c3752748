"""flashcore as torch's flash implementation: its operators on CPU tensors, and the registry."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashcore  # noqa: E402
import flashcore.torch  # noqa: E402
from flashcore.torch import _sdpa  # noqa: E402

operator = torch.ops.aten._scaled_dot_product_flash_attention
sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def active():
    handle = _sdpa.activate("CPU")
    yield handle
    handle.remove()


def inputs(value_dim=64, rows=130, keys=130):
    torch.manual_seed(6)
    q = torch.randn(2, rows, 4, 64).transpose(1, 2)
    return q, torch.randn(2, 2, keys, 64), torch.randn(2, keys, 2, value_dim).transpose(1, 2)


@pytest.mark.parametrize("value_dim", [64, 32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_forward(active, value_dim, causal, scale):
    q, k, v = inputs(value_dim)
    out, lse, _, _, max_q, max_k, _, _, mask = operator(q, k, v, 0.0, causal, False, scale=scale)
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.repeat_interleave(2, 1).double()) * (scale or 64**-0.5)
    if causal:
        scores = scores.masked_fill(torch.ones(130, 130).triu(1).bool(), -float("inf"))
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1).double()
    assert torch.allclose(out.double(), expected, atol=5e-6)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-5) and lse.is_contiguous()
    assert (max_q, max_k, mask.numel()) == (130, 130, 0)


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch has no registry")
def test_results_are_those_that_graphs_expect(active):
    """Shapes, strides and types of torch's own fake."""
    q, k, v = inputs()
    for query, value in ((q, v), (q.contiguous(), v), (q[..., ::2], v), (q, v[..., :32]), (q[:1, :, :1], v[:1, :, :, :32])):
        key = k[: query.shape[0], :, :, : query.shape[-1]]
        actual = operator(query, key, value)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(x) for x in (query, key, value)))
        for index, (ours, theirs) in enumerate(zip(actual, fake)):
            if isinstance(ours, torch.Tensor):
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), index
        assert actual[0].stride() == fake[0].stride()
        expected = sdpa(*(x.double() for x in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))))
        assert torch.allclose(actual[0].double(), expected, atol=5e-6)


def test_a_gradient_is_refused(active):
    q, k, v = inputs()
    q = q.clone().requires_grad_()
    out = operator(q, k, v)[0]
    with pytest.raises(flashcore.NoBackward, match="restore_flash_attention_impl"):
        out.sum().backward()


def test_what_is_not_there(active):
    q, k, v = inputs()
    with pytest.raises(flashcore.Unsupported, match="dropout_p is 0.5"):
        operator(q, k, v, 0.5)
    with pytest.raises(flashcore.Unsupported, match="return_debug_mask is True"):
        operator(q, k, v, 0.0, False, True)
    with pytest.raises(flashcore.InvalidArgument, match="float64"):
        operator(q, k, v.double())


def test_removal():
    handle = _sdpa.activate("CPU")
    handle.remove()
    handle.remove()
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
        operator(*inputs())


def test_registry():
    attention = torch.nn.attention
    if not hasattr(attention, "activate_flash_attention_impl"):
        assert not _sdpa.offer()
        pytest.skip(f"torch {torch.__version__} has no registry")
    assert "flashcore" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None, "nothing is active before somebody asks"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        attention.activate_flash_attention_impl("flashcore")
    is_said = any("nothing changes for CPU tensors" in str(warning.message) for warning in seen)
    assert is_said != torch.cuda.is_available(), "without a GPU nothing changes, which is said"
    try:
        assert attention.current_flash_attention_impl() == "flashcore"
        kernels = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_backward")
        assert "flashcore" in kernels or "_sdpa.py" in kernels, kernels
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
