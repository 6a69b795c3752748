"""Architectures of transformers that ask more of an attention function than Llama: equal to eager, or refused by name.

`bench/third_party/transformers_sweep.py` does the same for all of them; this is a sample of what once went wrong.
"""

import os
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# scripts/check-python.sh runs a copy of this folder.
DOCS = os.environ.get("FLASHCORE_DOCS") or os.path.join(os.path.dirname(__file__), "..", "..", "docs")
BENCH = os.path.join(DOCS, "..", "bench", "third_party")
if not os.path.exists(BENCH):
    pytest.skip("bench/third_party is not there", allow_module_level=True)
sys.path.insert(0, BENCH)

import flashcore  # noqa: E402
import flashcore.transformers  # noqa: E402

import transformers_sweep as sweep  # noqa: E402  isort: skip  (it looks for flashcore in the tree)

flashcore.transformers.register()


@pytest.fixture(autouse=True)
def registered():
    # Two pools of threads on a loaded machine wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    flashcore.transformers.register()


def make(name, kind, implementation, **options):
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = sweep.shrink(sweep.default_config(name))
    for option, value in options.items():
        setattr(config, option, value)
    return sweep.build(sweep.classes_of(name)[kind], config, implementation, 0.8)


# Layers that compute attention themselves, or choose among classes by the name of an implementation.
OWN = [
    ("mpnet", "encoder"), ("rembert", "encoder"), ("megatron-bert", "encoder"), ("roformer", "encoder"),
    ("big_bird", "encoder"), ("squeezebert", "encoder"), ("convbert", "encoder"), ("nystromformer", "encoder"),
    ("ibert", "encoder"), ("tapas", "encoder"), ("visual_bert", "base"), ("xglm", "decoder"), ("bloom", "decoder"),
    ("gpt_neox_japanese", "decoder"), ("led", "seq2seq"), ("mvp", "seq2seq"), ("trocr", "decoder"), ("gptj", "decoder"),
    ("gpt_neo", "decoder"), ("falcon", "decoder"), ("mpt", "decoder"), ("longformer", "encoder"), ("sam", "base"),
    ("data2vec-vision", "base"), ("deepseek_ocr2", "text of several"),
]  # fmt: skip


@pytest.mark.parametrize("name,kind", OWN, ids=[name for name, _ in OWN])
def test_own_attention_is_refused(name, kind):
    with pytest.raises(flashcore.Unsupported, match=r"^\w+ cannot have attn_implementation='flashcore': its attention layers"):
        make(name, kind, "flashcore")
    # Nothing else knows of it.
    make(name, kind, "eager")


def test_an_unknown_argument_is_refused(monkeypatch):
    """A model of another library, or of a later version, whose attention is more than flashcore's."""

    class Slanted(transformers.LlamaForCausalLM):
        pass

    def slanted_eager_attention_forward(module, query, key, value, attention_mask, scaling, slopes, **kwargs):
        raise AssertionError

    monkeypatch.setattr(sys.modules[__name__], "slanted", slanted_eager_attention_forward, raising=False)
    config = sweep.shrink(sweep.default_config("llama"))
    with pytest.raises(flashcore.Unsupported, match="^Slanted cannot have .* takes slopes, which flashcore does not know"):
        sweep.build(Slanted, config, "flashcore", 0.8)


# What each row is about, the architecture, and the ways to call it.
EQUAL = [
    ("position bias beside left padding", "t5", "seq2seq", "left right holes"),
    ("the window of the mask, not of the layer", "qwen2_moe", "decoder", "none left"),
    ("the window of the mask, not of the layer", "phimoe", "decoder", "none right"),
    ("masks that layers compute with", "doge", "decoder", "none left"),
    ("masks that layers compute with", "deepseek_v4", "decoder", "none"),
    ("no is_causal, bidirectional", "splinter", "base", "none right"),
    ("no is_causal, packed", "clap_text_model", "part", "packed"),
    ("is_causal, and a bidirectional mask", "bridgetower", "base", "none right"),
    ("a bidirectional window", "t5gemma", "seq2seq", "none right"),
    ("sinks of each row", "inkling2", "text of several", "none left chunks"),
    ("causal without is_causal", "nllb-moe", "seq2seq", "none"),
    ("causal without is_causal", "pegasus_x", "seq2seq", "none"),
    ("causal without is_causal", "bigbird_pegasus", "seq2seq", "none"),
    ("chunks of attention", "llama4_text", "decoder", "none left"),
    ("a refusal of FlashAttention by its name", "hrm_text", "decoder", "none left"),
    ("rows without a key, and states", "recurrent_gemma", "decoder", "left"),
    ("rows without a key, and convolutions", "inkling_text", "decoder", "chunks-left"),
    ("pages of continuous batching, head dim 40", "qwen3", "decoder", "batching"),
    ("keys that an indexer chose", "glm_moe_dsa", "decoder", "none"),
    ("keys that an indexer chose", "hy_v4", "decoder", "none"),
]


@pytest.mark.parametrize("about,name,kind,ways", EQUAL, ids=[f"{row[1]}" for row in EQUAL])
def test_equal_to_eager(about, name, kind, ways):
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    ways = tuple(way.replace("-", " ") for way in ways.split())
    row = sweep.sweep(name, kind, ways)
    assert row.get("ways") == dict.fromkeys(ways, "ok"), (about, row)


@torch.no_grad()
def test_position_bias_in_generation():
    """T5 with a padded encoder, whose bias has a column for every key of the padding too."""
    eager, ours = (make("t5", "seq2seq", name) for name in ("eager", "flashcore"))
    torch.manual_seed(1)
    given = {"input_ids": torch.randint(20, 120, (2, 210)), "attention_mask": sweep.padding("left", 2, 210, 130)}
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, decoder_start_token_id=5)
    assert torch.equal(ours.generate(**given, **options), eager.generate(**given, **options))


LENGTHS = dict(max_length_q=120, max_length_k=120)


def packed_options(*names):
    cu = torch.tensor([0, 90, 210], dtype=torch.int32)
    return {**LENGTHS, **dict.fromkeys(names, cu)}


@torch.no_grad()
def test_packed_sequences_are_not_ignored():
    both = packed_options("cu_seq_lens_q", "cu_seq_lens_k")
    ids = torch.randint(20, 120, (1, 210))
    with pytest.raises(flashcore.Unsupported, match="T5Attention cannot have flashcore attention: .*position_bias"):
        make("t5", "seq2seq", "flashcore").encoder(ids, **both)
    ours = make("llama", "decoder", "flashcore")
    with pytest.raises(flashcore.InvalidArgument, match="LlamaAttention .*cu_seq_lens_k is not given"):
        ours(ids, **packed_options("cu_seq_lens_q"))
    with pytest.raises(flashcore.InvalidArgument, match="LlamaAttention .*cu_seq_lens_q is not given"):
        ours(ids, **packed_options("cu_seq_lens_k"))
    triangle = torch.ones(210, 210, dtype=torch.bool).tril()[None, None]
    padding = torch.ones(1, 210, dtype=torch.long)
    padding[0, 200:] = 0
    for mask in (triangle, padding):
        with pytest.raises(flashcore.Unsupported, match="LlamaAttention .*attention_mask too"):
            ours(ids, attention_mask=mask, **both)


@torch.no_grad()
def test_a_module_without_is_causal():
    """It attends every key, in packed sequences and beside a mask of two dimensions."""
    q, k, v = torch.randn(3, 1, 4, 210, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    parts = [slice(0, 90), slice(90, 210)]
    expected = torch.cat([attend(q[:, :, rows], k[:, :, rows], v[:, :, rows]) for rows in parts], 2).transpose(1, 2)
    options = packed_options("cu_seq_lens_q", "cu_seq_lens_k")
    found, _ = flashcore.transformers.attention_forward(torch.nn.Module(), q, k, v, None, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    mask = torch.ones(1, 210, dtype=torch.long)
    mask[0, 190:] = 0
    found, _ = flashcore.transformers.attention_forward(torch.nn.Module(), q, k, v, mask)
    expected = attend(q, k[:, :, :190], v[:, :, :190]).transpose(1, 2)
    torch.testing.assert_close(found[:, :190], expected[:, :190], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 1, 1, 2), (2, 1, 2, 1), (2, 1, 2, 2), (2, 1, 1, 1)], ids=str)
def test_masks_of_users(shape):
    """Their type says what they are, and no shape makes one ours."""
    ours = make("bert", "encoder", "flashcore")
    eager = make("bert", "encoder", "eager")
    ids = torch.randint(20, 120, (2, 2))
    allowed = torch.ones(shape, dtype=torch.bool)
    if shape[-1] > 1:
        # A row without keys is no row of attention.
        allowed[1].view(-1)[-1] = False
    added = torch.zeros(shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = eager(ids, attention_mask=added).logits
    for mask in (allowed, added):
        torch.testing.assert_close(ours(ids, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(flashcore.InvalidArgument, match="BertSelfAttention .*attention_mask is torch.int32"):
        ours(ids, attention_mask=allowed.int())


@torch.no_grad()
def test_a_row_of_minus_infinity():
    """Eager attention divides by zero, and the result says so."""
    eager, ours = (make("bert", "encoder", name) for name in ("eager", "flashcore"))
    ids = torch.randint(20, 120, (2, 50))
    added = torch.zeros(2, 1, 50, 50)
    added[1, :, 7] = -float("inf")
    expected, found = (model(ids, attention_mask=added).logits for model in (eager, ours))
    assert bool(expected[1].isnan().all()) and not expected[0].isnan().any()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


@torch.no_grad()
def test_rows_without_a_key():
    """The mean of all values, as the least number makes all scores equal."""
    eager, ours = (make("llama", "decoder", name) for name in ("eager", "flashcore"))
    window = dict(layer_types=["sliding_attention"] * 4, sliding_window=16)
    narrow = [make("qwen2", "decoder", name, **window) for name in ("eager", "flashcore")]
    ids = torch.randint(20, 120, (2, 210))
    for pair, sides in (((eager, ours), ("left", "holes")), (narrow, ("right", "left"))):
        for side in sides:
            mask = sweep.padding(side, 2, 210, 130)
            if side == "holes":
                mask[0, :3] = 0
            expected, found = (model(ids, attention_mask=mask, use_cache=False).logits for model in pair)
            assert sweep.error_of(found, expected, None) < 1e-3


@torch.no_grad()
def test_continuous_batching_is_refused():
    """The layers of StableLM do not hand the cache to attention."""
    ours = make("stablelm", "decoder", "flashcore")
    with pytest.raises(RuntimeError, match="StableLmForCausalLM cannot have generate_batch with attn_implementation"):
        sweep.models.continuous(ours, [[21, 22, 23], [24, 25]], 4)


@torch.no_grad()
def test_bidirectional_config():
    """A decoder that its config makes bidirectional."""
    eager, ours = (make("llama", "decoder", name, is_causal=False) for name in ("eager", "flashcore"))
    ids = torch.randint(20, 120, (2, 210))
    for side in ("none", "right"):
        mask = sweep.padding(side, 2, 210, 130)
        expected, found = (model(ids, attention_mask=mask, use_cache=False).logits for model in (eager, ours))
        assert sweep.error_of(found, expected, mask.bool()) < 1e-4


@torch.no_grad()
def test_eager_and_sdpa_stay():
    """Other implementations have their masks and their errors."""
    ids = torch.randint(20, 120, (2, 90))
    eager = make("llama", "decoder", "eager")
    sdpa = make("llama", "decoder", "sdpa")
    mask = sweep.padding("left", 2, 90, 50)
    torch.testing.assert_close(
        sdpa(ids, attention_mask=mask).logits[mask.bool()], eager(ids, attention_mask=mask).logits[mask.bool()],
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        make("xglm", "decoder", "sdpa")


@torch.no_grad()
def test_a_static_cache_compiled():
    """The mask is an argument of the compiled graph, which is one graph for all tokens."""
    eager, ours = (make("llama", "decoder", name) for name in ("eager", "flashcore"))
    ours._valid_auto_compile_criteria = lambda *given: True
    ids, mask = torch.randint(20, 120, (2, 70)), sweep.padding("left", 2, 70, 40)
    options = dict(
        attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, cache_implementation="static",
        pad_token_id=0, eos_token_id=-1,
    )  # fmt: skip
    expected = eager.generate(ids, disable_compile=True, **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=False)
    assert torch.equal(ours.generate(ids, compile_config=config, **options), expected)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
