"""Tiny random models of transformers: attn_implementation="flashcore" against eager, on the CPU and a GPU."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import flashcore  # noqa: E402
import flashcore.transformers  # noqa: E402

flashcore.transformers.register()

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")),
]
SIZES = dict(
    vocab_size=131, hidden_size=128, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, num_key_value_heads=2)


def qwen3():
    return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32)


def mistral():
    return transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=40)


def gemma2():
    config = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=32, sliding_window=40, attn_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM, config


def gemma3():
    config = transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=32, sliding_window=40)
    return transformers.Gemma3ForCausalLM, config


def gpt_oss():
    config = transformers.GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=32, sliding_window=40, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return transformers.GptOssForCausalLM, config


def bert():
    from transformers.models.bert import modeling_bert

    if hasattr(modeling_bert, "BERT_SELF_ATTENTION_CLASSES"):
        pytest.skip(f"the BERT of transformers {transformers.__version__} has no attention interface")
    return transformers.BertForMaskedLM, transformers.BertConfig(**SIZES)


DECODERS = [llama, qwen3, mistral, gemma2, gemma3, gpt_oss]


def pair(make, device, dtype=torch.float32):
    """The same weights with eager attention and with ours: sharp attention whose output decides the next token."""
    torch.manual_seed(5)
    kind, config = make()
    config._attn_implementation = "eager"
    eager = kind(config).eval()
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.normal_(0.0 if "gemma" in config.model_type else 1.0, 0.1)
            elif "embed" in name.lower():
                parameter.normal_(0, 0.5)
            elif parameter.dim() == 1 or name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 1.6 * parameter.shape[-1] ** -0.5)
    config = copy.deepcopy(config)
    config._attn_implementation = "flashcore"
    ours = kind(config).eval()
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "flashcore"
    return eager.to(device, dtype), ours.to(device, dtype)


def setting(device):
    """Element type and tolerance: GPUs have kernels for 16 bits."""
    return (torch.float32, 2e-3) if device == "cpu" else (torch.float16, 6e-2)


def compare(actual, expected, is_there, tolerance):
    assert not actual[is_there].isnan().any()
    scale = expected[is_there].float().abs().max().clamp(min=1)
    error = (actual[is_there].float() - expected[is_there].float()).abs().max() / scale
    assert error < tolerance, f"logits differ by {error:.2e}"


def padding(kind, batch, length):
    mask = torch.ones(batch, length, dtype=torch.long)
    if kind == "right":
        mask[1, length - 60 :] = 0
    elif kind == "left":
        mask[1, :60] = 0
    elif kind == "both":
        mask[0, :7], mask[1, length - 60 :] = 0, 0
    elif kind == "holes":
        mask[1, 30:50] = 0
    return mask


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["none", "right", "left", "both", "holes"])
@pytest.mark.parametrize("make", [*DECODERS, bert], ids=lambda make: make.__name__)
@torch.no_grad()
def test_forward(make, kind, device):
    dtype, tolerance = setting(device)
    eager, ours = pair(make, device, dtype)
    ids = torch.randint(0, 131, (2, 210), device=device)
    mask = padding(kind, 2, 210).to(device)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"input_ids": ids, "attention_mask": mask}
    if make is not bert:
        given["position_ids"] = position
    compare(ours(**given).logits, eager(**given).logits, mask.bool(), tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
@torch.no_grad()
def test_generate(make, kind, cache, device):
    eager, ours = pair(make, device, setting(device)[0])
    ids = torch.randint(0, 131, (2, 70), device=device)
    options = dict(
        attention_mask=padding(kind, 2, 70).to(device), max_new_tokens=12, min_new_tokens=12, do_sample=False,
        cache_implementation=None if cache == "dynamic" else "static", pad_token_id=0, disable_compile=True,
    )  # fmt: skip
    expected = eager.generate(ids, **options)
    actual = ours.generate(ids, **options)
    assert torch.equal(actual, expected)
    assert len(expected[:, 70:].unique()) > 12, "the model repeats itself, whatever attention says"


@pytest.mark.parametrize("make", [llama, mistral], ids=lambda make: make.__name__)
@torch.no_grad()
def test_continuous_batching(make):
    """Requests of other lengths that share batches and a cache of pages."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("transformers has no continuous batching")
    eager, ours = pair(make, "cpu")
    prompts = [torch.randint(1, 131, (length,)).tolist() for length in (37, 80, 5)]
    config = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=-1)
    options = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=128)
    results = ours.generate_batch(prompts, generation_config=config, continuous_batching_config=options, warmup=False)
    assert ours.config._attn_implementation == "flashcore"
    for prompt, name in zip(prompts, sorted(results)):
        expected = eager.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=-1)
        assert results[name].generated_tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_chunks_of_a_prompt(device):
    """A cache that is continued by several rows at once."""
    dtype, tolerance = setting(device)
    eager, ours = pair(mistral, device, dtype)
    ids = torch.randint(0, 131, (2, 150), device=device)
    logits = []
    for model in (eager, ours):
        cache = transformers.DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in ids.split(50, 1)]
        logits.append(torch.cat(parts, 1))
    compare(logits[1], logits[0], torch.ones(2, 150, dtype=torch.bool, device=device), tolerance)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_packed_positions(device):
    """Sequences that position_ids pack into one row do not see each other."""
    dtype, tolerance = setting(device)
    eager, ours = pair(llama, device, dtype)
    ids = torch.randint(0, 131, (1, 150), device=device)
    position = torch.cat([torch.arange(90), torch.arange(60)])[None].to(device)
    expected = torch.cat([eager(part).logits for part in ids.split([90, 60], 1)], 1)
    everything = torch.ones(1, 150, dtype=torch.bool, device=device)
    compare(ours(ids, position_ids=position, use_cache=False).logits, expected, everything, tolerance)
    cu = torch.tensor([0, 90, 150], dtype=torch.int32, device=device)
    lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=90, max_length_k=90)
    compare(ours(ids, position_ids=position, use_cache=False, **lengths).logits, expected, everything, tolerance)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_compiled(device):
    dtype, tolerance = setting(device)
    eager, ours = pair(llama, device, dtype)
    compiled = torch.compile(lambda ids: ours(ids, use_cache=False).logits, fullgraph=True, backend="aot_eager")
    ids = torch.randint(0, 131, (2, 150), device=device)
    compare(compiled(ids), eager(ids).logits, torch.ones(2, 150, dtype=torch.bool, device=device), tolerance)


def test_padding_is_a_range():
    """The mask of padding is one or two numbers for each batch, and eager's mask for everything else."""
    from transformers.masking_utils import causal_mask_function, eager_mask

    masks = {}
    for kind in ("none", "right", "left", "holes"):
        given = (2, 210, 210, 0, 0, causal_mask_function, padding(kind, 2, 210).bool())
        masks[kind] = flashcore.transformers.attention_mask(*given)
        assert masks[kind].causal and masks[kind].shape == (2, 1, 210, 210)
        assert masks[kind].stride() == (0, 0, 0, 0), "it has memory of its own"
        assert torch.equal(masks[kind] + torch.zeros(1), eager_mask(*given))
        assert torch.equal(torch.cat([masks[kind], masks[kind]])[2:], eager_mask(*given))
    assert masks["none"].used is None and masks["none"].leftpad is None and masks["none"].bias is None
    assert masks["right"].used.tolist() == [210, 150] and masks["right"].is_top_left
    assert masks["left"].leftpad.tolist() == [0, 60] and masks["left"].used.tolist() == [210, 210]
    assert masks["holes"].bias.shape == (2, 1, 210, 210)


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operator returns and was not given."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.bytes.append(x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("kind", ["none", "right", "left"])
@pytest.mark.parametrize("make", [llama, mistral, gpt_oss, bert], ids=lambda make: make.__name__)
@torch.no_grad()
def test_padding_copies_nothing(make, kind, monkeypatch):
    """Attention of a padded batch allocates its output and a few lengths, and kernels read the model's own tensors.

    Rows without a key, of padding, also need the mean of the values of each head.
    """
    _, ours = pair(make, "cpu")
    seen, calls = [], []
    inner, launch = flashcore.transformers.attention_forward, flashcore.transformers.forward

    def counted(module, query, key, value, *args, **options):
        with Allocations() as allocations:
            result = inner(module, query, key, value, *args, **options)
        mean = 0 if kind == "none" else value[:, :, 0].numel() * 4
        seen.append((allocations.bytes, result[0].numel() * 4, mean))
        assert calls.pop() == [x.data_ptr() for x in (query, key, value)]
        return result

    def launched(q, k, v, *args, **options):
        calls.append([x.data_ptr() for x in (q, k, v)])
        return launch(q, k, v, *args, **options)

    monkeypatch.setattr(flashcore.transformers, "forward", launched)
    transformers.AttentionInterface.register("flashcore", counted)
    try:
        ours(torch.randint(0, 131, (2, 210)), attention_mask=padding(kind, 2, 210))
    finally:
        transformers.AttentionInterface.register("flashcore", inner)
    assert len(seen) == 3
    for allocated, output, mean in seen:
        assert output in allocated
        allocated.remove(output)
        assert sum(allocated) <= 64 + mean, allocated


def test_copies_are_counted():
    """Columns that are not adjacent must be copied: the count of `test_padding_copies_nothing` sees it."""
    q = torch.randn(1, 2, 40, 64)
    with Allocations() as allocations:
        flashcore.transformers.attention_forward(torch.nn.Module(), q, torch.randn(1, 2, 64, 40).mT, q, None)
    assert sorted(allocations.bytes)[-3:] == [q.numel() * 4] * 3  # randn, the copy, the output


def test_dropout_is_refused():
    _, ours = pair(llama, "cpu")
    ours.config.attention_dropout = 0.1
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(flashcore.Unsupported, match="dropout is 0.1"):
        ours.train()(torch.zeros(1, 8, dtype=torch.long))
