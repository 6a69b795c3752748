#!/usr/bin/env python3
"""Models of transformers with random weights: attn_implementation="flashcore" beside eager and sdpa, one table.

    python bench/third_party/transformers_models.py [--device cuda] [--size large] [--models llama,bert]

Of each model: the difference of logits to eager (root of the mean square, relative to that of the logits), ours and sdpa's,
without padding and with padding left and right; the error of ours, sdpa's and eager's to eager in float64 with the same
weights, the worst of the three; greedy generation of --tokens tokens with dynamic and static caches, with a padded batch
and by continuous batching, equal to eager's or from which token on it is not; the time of a forward pass and of the
generation, interleaved with sdpa's in this process (least of --repeat).
Weights are such that attention decides which token comes next: the last column counts different tokens.
On the CPU types are float32 and bfloat16; on a GPU float16 and bfloat16, where generation need not be equal and sdpa's is
printed beside ours. A row ends with ! and the exit status is 1 if the error to float64 is more than --factor times the
worse of sdpa's and eager's, or if float32 generation differs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import os
import sys
import time
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if os.environ.get("FLASHCORE_SITE") != "1":
    sys.path.insert(0, os.path.join(ROOT, "python"))
    os.environ.setdefault("FLASHCORE_LIBRARY", os.path.join(ROOT, "target", "release", "libflashcore.so"))

import torch  # noqa: E402
import transformers  # noqa: E402

import flashcore  # noqa: E402
import flashcore.transformers  # noqa: E402

# hidden size, layers, heads, KV heads, head dim, vocabulary, prompt
SIZES = {"small": (256, 4, 4, 2, 64, 509, 300), "large": (4096, 8, 32, 8, 128, 32000, 4096)}

def models(size):
    hidden, layers, heads, kv_heads, dim, vocabulary, prompt = SIZES[size]
    common = dict(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=4 * prompt, tie_word_embeddings=False,
    )  # fmt: skip
    decoder = dict(common, num_key_value_heads=kv_heads, head_dim=dim)
    window = prompt // 5
    types = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    t = transformers
    return {
        "llama": (t.LlamaForCausalLM, t.LlamaConfig(**decoder)),
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config(**decoder)),
        "mistral": (t.MistralForCausalLM, t.MistralConfig(**decoder, sliding_window=window)),
        "gemma2": (
            t.Gemma2ForCausalLM,
            t.Gemma2Config(**decoder, sliding_window=window, attn_logit_softcapping=5.0, query_pre_attn_scalar=dim),
        ),
        "gemma3": (t.Gemma3ForCausalLM, t.Gemma3TextConfig(**decoder, sliding_window=window, query_pre_attn_scalar=dim)),
        "gpt-oss": (
            t.GptOssForCausalLM,
            t.GptOssConfig(**decoder, sliding_window=window, num_local_experts=4, num_experts_per_tok=2, layer_types=types),
        ),
        "bert": (t.BertForMaskedLM, t.BertConfig(**common)),
    }


@torch.no_grad()
def randomize(model):
    """Weights that make attention sharp and its output larger than the residual stream."""
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() and name.endswith("weight"):
            parameter.normal_(0.0 if "gemma" in model.config.model_type else 1.0, 0.1)
        elif "embed" in name.lower():
            parameter.normal_(0, 0.5)
        elif parameter.dim() == 1 or name.endswith("bias") or "sinks" in name:
            parameter.normal_(0, 0.3)
        else:
            parameter.normal_(0, 1.6 * parameter.shape[-1] ** -0.5)


def make(kind, config, implementation, dtype, device):
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    torch.manual_seed(3)
    model = kind(config).eval()
    randomize(model)
    return model.to(device, dtype)


def padded(batch, length, side):
    mask = torch.ones(batch, length, dtype=torch.long)
    if side == "right":
        mask[1, length - length // 3 :] = 0
    elif side == "left":
        mask[1, : length // 3] = 0
    return mask


def difference(logits, expected, is_there):
    """Root of the mean square of the difference, relative to that of what is expected."""
    logits, expected = logits[is_there].double(), expected[is_there].double()
    return ((logits - expected).square().mean() / expected.square().mean()).sqrt().item()


def best(functions, repeat, device):
    """The least time of each, one after another in turn."""
    times = [float("inf")] * len(functions)
    for _ in range(repeat):
        for index, function in enumerate(functions):
            if function is None:
                continue
            start = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            times[index] = min(times[index], time.perf_counter() - start)
    return times


def first_difference(tokens, expected):
    """'=' or the first token, of those generated, that differs."""
    differs = (tokens != expected).nonzero()
    return "=" if len(differs) == 0 else str(int(differs[:, -1].min()))


def continuous(model, prompts, tokens):
    config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=-1)
    options = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=512)
    options.auto_switch_to_flash = False
    results = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=options, warmup=False
    )
    failed = [result.error for result in results.values() if result.error]
    if failed:
        raise RuntimeError(failed[0])
    return torch.tensor([results[name].generated_tokens for name in sorted(results)])


def has_sdpa(kind, name):
    # sdpa has no softcap.
    return getattr(kind, "_supports_sdpa", False) and name != "gemma2"


@torch.no_grad()
def measure(name, kind, config, dtype, options):
    device, prompt = options.device, SIZES[options.size][-1]
    names = ["eager", "flashcore"] + (["sdpa"] if has_sdpa(kind, name) else [])
    made = {one: make(kind, config, one, dtype, device) for one in names}
    assert all(model.config._attn_implementation == one for one, model in made.items())
    torch.manual_seed(7)
    ids = torch.randint(1, config.vocab_size, (2, prompt), device=device)
    exact = make(kind, config, "eager", dtype, device).double()
    exact.config._experts_implementation = "eager"  # matrix products of groups have no float64
    differences, errors = [], {one: 0.0 for one in names}
    for side in ("none", "left", "right"):
        mask = padded(2, prompt, side).to(device)
        given = dict(input_ids=ids, attention_mask=mask)
        if name != "bert":
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = {one: model(**given).logits for one, model in made.items()}
        truth = exact(**given).logits
        for one in names:
            errors[one] = max(errors[one], difference(logits[one], truth, mask.bool()))
        to_eager = [difference(logits[one], logits["eager"], mask.bool()) for one in names[1:]]
        differences.append("/".join(f"{value:.1e}" for value in to_eager))
    del exact
    error = errors.pop("flashcore")
    is_good = error <= options.factor * max(errors.values())
    differences.append("/".join(f"{value:.1e}" for value in (error, *reversed(errors.values()))))
    ours, sdpa = made["flashcore"], made.get("sdpa")
    forward = best([lambda: ours(ids), sdpa and (lambda: sdpa(ids))], options.repeat, device)
    row = [name, str(dtype).replace("torch.", ""), *differences, *(f"{1e3 * t:.1f}" if t < 1e9 else "-" for t in forward)]
    if name == "bert":
        return [*row, "", "", "", "", "", "", ""], is_good

    def generate(model, cache="dynamic", side="none"):
        return model.generate(
            ids, attention_mask=padded(2, prompt, side).to(device), max_new_tokens=options.tokens,
            min_new_tokens=options.tokens, do_sample=False, pad_token_id=0, disable_compile=True,
            cache_implementation=None if cache == "dynamic" else "static",
        )[:, prompt:]  # fmt: skip

    kinds = [("dynamic", "none"), ("static", "none"), ("dynamic", "left")]
    equal = []
    for cache, side in kinds:
        expected = generate(made["eager"], cache, side)
        found = first_difference(generate(made["flashcore"], cache, side), expected)
        is_good &= found == "=" or dtype != torch.float32
        if dtype != torch.float32 and "sdpa" in made:
            found += "/" + first_difference(generate(made["sdpa"], cache, side), expected)
        equal.append(found)
        if (cache, side) == kinds[0]:
            distinct = len(expected.unique())
    try:
        lengths = (prompt, prompt // 3, 5)
        prompts = [ids[index % 2, :length].tolist() for index, length in enumerate(lengths)]
        wanted = [
            made["eager"].generate(
                torch.tensor([one], device=device), max_new_tokens=options.tokens, min_new_tokens=options.tokens,
                do_sample=False, pad_token_id=0,
            )[:, len(one) :]
            for one in prompts
        ]  # fmt: skip
        batch = continuous(made["flashcore"], prompts, options.tokens)
        found = first_difference(batch, torch.cat(wanted).cpu())
        is_good &= found == "=" or dtype != torch.float32
    except Exception as error:  # what transformers has, and for which models, changes from version to version
        found = f"{type(error).__name__}"
        print(f"{name}: continuous batching: {error}", file=sys.stderr)
    equal.append(found)
    times = best([lambda: generate(ours), sdpa and (lambda: generate(sdpa))], max(1, options.repeat // 3), device)
    return [*row, *equal, *(f"{t:.2f}" if t < 1e9 else "-" for t in times), f"{distinct}"], is_good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=sorted(SIZES), default=None, help="small on the CPU, large on a GPU")
    parser.add_argument("--models", default="all")
    parser.add_argument("--dtypes", default="all")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--factor", type=float, default=1.1)
    options = parser.parse_args()
    options.size = options.size or ("small" if options.device == "cpu" else "large")
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    flashcore.transformers.register()
    types = [torch.float32, torch.bfloat16] if options.device == "cpu" else [torch.float16, torch.bfloat16]
    if options.dtypes != "all":
        types = [getattr(torch, name) for name in options.dtypes.split(",")]
    wanted = None if options.models == "all" else options.models.split(",")
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, flashcore {flashcore.__version__}, "
        f"{options.device}, {options.size}, {torch.get_num_threads()} threads; differences of logits to eager: ours/sdpa"
    )
    head = ["model", "type", "no padding", "left", "right", "error: ours/sdpa/eager", "fwd ms", "sdpa", "dynamic", "static", "padded", "batching"]
    head += [f"{options.tokens} tok s", "sdpa", "tokens"]
    widths = [8, 9, 15, 15, 15, 23, 8, 8, 8, 8, 8, 9, 9, 7, 6]
    print("  ".join(text.ljust(width) for text, width in zip(head, widths)))
    status = 0
    for name, (kind, config) in models(options.size).items():
        if wanted and name not in wanted:
            continue
        for dtype in types:
            row, is_good = measure(name, kind, config, dtype, options)
            status |= not is_good
            print("  ".join(text.ljust(width) for text, width in zip(row, widths)) + ("" if is_good else "  !"), flush=True)
            gc.collect()
    sys.exit(status)


if __name__ == "__main__":
    main()
