#!/usr/bin/env python3
"""Every architecture of the installed transformers, small and random: attn_implementation="flashcore" beside eager.

    python bench/third_party/transformers_sweep.py [--models llama,t5] [--jobs 2] [--record results/transformers/sweep.jsonl]

A line for each architecture has one word for each way to call it:

    ok        the difference to eager is rounding, and flashcore ran
    refused   a flashcore error that names the class of the model or of its layer
    wrong     another result than eager's
    error     another exception, where eager raises none
    -         the way is not for this model: eager raises too, there is no cache or no mask, or no layer calls flashcore

Ways: no padding, right and left padding, holes in the mask, sequences packed by position_ids (beside eager with the same
positions), packed by cu_seq_lens (beside eager of each sequence alone), a cache continued in chunks, the same with left
padding, and, for the decoders named in BATCHING, generate_batch beside eager's generate, token by token.
Everything is float32 on the CPU; batches have sequences of 300 and 187 tokens, windows are 40 and chunks 64 tokens.
A model that gives booleans to eager attention, which adds them to the scores, is set beside sdpa.
What is larger than rounding is set beside eager with weights that differ by 1e-6: a router that chooses another expert
is no mistake of attention.
The exit status is 1 if any way is wrong or an error. Each architecture runs in a process of its own, for --limit seconds
at most.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import inspect
import json
import logging
import math
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings

os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers_models as models  # noqa: E402  (finds flashcore)
import transformers  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

import flashcore  # noqa: E402
import flashcore.transformers  # noqa: E402

LENGTHS = (300, 187)
DOCUMENTS = (90, 130, 80)
# The largest difference that rounding is taken for, of the root of the mean square of the output.
MOST = 1e-2
GAINS = (1.6, 0.8, 0.4)
# Inputs of classes that do not say which is theirs.
MAIN = ("pixel_values", "pixel_values_videos", "hidden_states", "input_features", "input_values")
WAYS = ("none", "right", "left", "holes", "positions", "packed", "chunks", "chunks left", "batching")
BATCHING = (
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text gpt_oss phi phi3 olmo2 cohere2 starcoder2 gpt_neox stablelm smollm3 "
    "granite olmo glm4 exaone4"
).split()
# Head dims of their own for two of them.
HEAD_DIMS = {"qwen3": 40, "llama": 80}

KINDS = [
    ("decoder", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    ("speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    ("encoder", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    ("text of several", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    ("base", "MODEL_MAPPING_NAMES"),
]

# Sizes by name, the first that matches. A number, or a function of the default.
SIZES = [
    (r"(^|_)vocab_size(_|$)|^vocab_size", 131),
    (r"num_(attention|encoder_attention|decoder_attention)_heads$|^(n_head|n_heads|num_heads)$|(encoder|decoder)_attention_heads$", 4),
    (r"^(num_key_value_heads|n_kv_heads|num_kv_heads|multi_query_group_num)$", lambda old: old if old == 1 else 2),
    (r"num_key_value_heads$|num_global_key_value_heads$|swa_num_key_value_heads$", 2),
    (r"^(qk_nope_head_dim|qk_rope_head_dim|v_head_dim|head_dim|d_kv|kv_channels|attention_head_dim|global_head_dim|swa_head_dim|swa_v_head_dim|index_head_dim|d_head|attention_head_size|qk_head_dim)$", 16),
    (r"^(kv_lora_rank|q_lora_rank|o_lora_rank|attention_in_low_rank_dim|index_topk)$", 32),
    (r"^(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|model_dim|encoder_hidden_size|decoder_hidden_size|text_hidden_size|backbone_hidden_size|attention_hidden_size|output_hidden_size|out_hidden_size|vision_output_dim|embedding_size|num_embeddings_dim)$", 64),
    (r"^(hidden_size_per_layer_input|embedding_hidden_size|word_embed_proj_dim|projection_dim|proj_dim)$", 64),
    (r"(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|dim_feedforward|mlp_hidden_size|intermediate_dim|shared_expert_intermediate_size|d_inner_ffn)$", 96),
    (r"^(num_hidden_layers|n_layer|n_layers|num_layers|encoder_layers|decoder_layers|num_encoder_layers|num_decoder_layers|depth|decoder_num_layers|encoder_num_layers|num_decoder_hidden_layers|num_hidden_groups)$", lambda old: min(old, 4)),
    (r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_routed_experts|routed_experts|n_experts)$", 4),
    (r"^(num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_experts_per_token|moe_top_k|experts_per_token|num_selected_experts)$", lambda old: min(old, 2)),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"^(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|max_target_positions|max_source_positions|seq_length)$", 1536),
    (r"(sliding_window|sliding_window_size|attention_window_size|window_size|local_attention)$", 40),
    (r"^attention_chunk_size$", 64),
    (r"^(mamba_d_state|state_size|ssm_state_size|mamba_d_conv_dim)$", 16),
    (r"^(mamba_n_heads|mamba_num_heads)$", 8),
    (r"^(mamba_d_head|mamba_head_dim)$", 16),
    (r"^(linear_num_key_heads|linear_num_value_heads)$", 4),
    (r"^(linear_key_head_dim|linear_value_head_dim)$", 16),
    (r"^frames_per_clip$", 8),
    (r"^(image_size|img_size|crop_size)$", lambda old: [64, 64] if isinstance(old, (list, tuple)) else 64),
    (r"^(num_nextn_predict_layers|num_mtp_layers)$", 0),
]  # fmt: skip

# What defaults leave out: windows that are on, a softcap that bends scores.
OVERRIDES = {"use_sliding_window": True, "max_window_layers": 1, "attn_logit_softcapping": 5.0, "use_cache": True}

# Values for None.
ABSENT = {"sliding_window": 40, "head_dim": 16}

# What a small model of a type needs beside it: sizes without a default, one layer of attention among others.
NEEDS = {
    "bamba": {"attn_layer_indices": [1]},
    "blenderbot": {"decoder_layers": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 131, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron": {"num_key_value_heads": 2},
    "t5gemma2_text": {"dropout_rate": 0.0},
}  # fmt: skip


def wanted(name, old):
    """The small value of an attribute, or None where the default stays."""
    for pattern, size in SIZES:
        if re.search(pattern, name):
            return size(old) if callable(size) else size
    return None


def code_of(kind):
    """The module that has the models of a config."""
    return importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))


def fit_sections(config, small):
    """Sections of rotary pairs for the head dim of a small model, where positions have three numbers."""
    rope = config.to_dict().get("rope_parameters")
    default = re.search(r'get\("mrope_section", \[([\d, ]+)\]\)', inspect.getsource(code_of(type(config)))) if rope else None
    section = (rope or {}).get("mrope_section") or (default and [int(size) for size in default[1].split(",")])
    if section:
        heads = small.get("num_attention_heads") or small["num_heads"]
        head_dim = small.get("head_dim") or small["hidden_size"] // heads
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1)) // 2
        short = [pairs * size // sum(section) for size in section]
        small["rope_parameters"] = {**rope, "mrope_section": [*short[:-1], pairs - sum(short[:-1])]}


def shrink(config, free=None):
    """A config of the same class with small sizes, and token ids that fit the vocabulary."""
    free = free if free is not None else iter(range(1, 20))
    small, layers = {}, None
    given = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, old in given.items():
        if name in OVERRIDES and old is not None:
            small[name] = OVERRIDES[name]
        elif name in ABSENT and old is None:
            small[name] = ABSENT[name]
        elif isinstance(old, transformers.PreTrainedConfig):
            small[name] = shrink(old, free)
        elif isinstance(old, bool):
            continue
        elif isinstance(old, (int, list, tuple)) and not (name.endswith("token_id") or name.endswith("token_index")):
            size = wanted(name, old)
            if size is not None and old is not None and isinstance(old, int) == isinstance(size, int):
                small[name] = min(size, old) if isinstance(size, int) and "vocab" not in name and "position" not in name and old > 0 else size
                if name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"):
                    layers = layers or (old, small[name])
        elif isinstance(old, int) and old >= 0:
            small[name] = next(free)
    if layers:
        old_count, count = layers
        for name, old in given.items():
            if isinstance(old, (list, tuple)) and len(old) == old_count and old_count > count:
                # One layer of each kind, then the first ones.
                kinds = sorted({str(kind): index for index, kind in reversed(list(enumerate(old)))}.values())
                rest = [index for index in range(old_count) if index not in kinds]
                chosen = sorted((kinds + rest)[:count])
                small[name] = [old[index] for index in chosen]
    if "kv_lora_rank" in given and "num_key_value_heads" in small:
        # Latent attention has as many heads of keys.
        small["num_key_value_heads"] = 4
    small.update(NEEDS.get(config.model_type, {}))
    fit_sections(config, small)
    kind = type(config)
    for attempt in range(6):
        try:
            made = kind(**small)
            break
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if not unknown or unknown[1] not in small:
                raise
            del small[unknown[1]]
    made.tie_word_embeddings = getattr(made, "tie_word_embeddings", False)
    return made


@torch.no_grad()
def randomize(model, gain):
    """Weights that make attention sharp, around what each norm starts from."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point() or parameter.dim() == 0:
                continue
            kind = type(module).__name__.lower()
            if "norm" in kind and name == "weight":
                parameter.normal_(float(parameter.mean()), 0.1)
            elif isinstance(module, torch.nn.Embedding) or "embed" in name:
                parameter.normal_(0, 0.5)
            elif parameter.dim() == 1 or name == "bias" or "sink" in name:
                if name in ("A_log", "D", "dt_bias"):
                    continue
                parameter.normal_(0, 0.3)
            elif parameter.dim() > 3:
                parameter.normal_(0, gain * parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(0, gain * parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not buffer.isfinite().all():
            raise RuntimeError(f"{name} is not finite")


def default_config(model_type):
    return transformers.CONFIG_MAPPING[model_type]()


def classes_of(model_type):
    """The classes to build of one type, by what they are: a decoder, an encoder and a pair may have one type."""
    found = {}
    for kind, table in KINDS:
        name = getattr(modeling_auto, table, {}).get(model_type)
        if name and not (found and kind in ("text of several", "base")):
            found.setdefault(name[0] if isinstance(name, (list, tuple)) else name, kind)
    if found:
        return {kind: getattr(transformers, name) for name, kind in found.items() if hasattr(transformers, name)}
    # A part of a model, which no auto class makes: the first class of its file that has this config.
    config = transformers.CONFIG_MAPPING[model_type]
    try:
        code = code_of(config)
    except ImportError:
        return {}
    parts = [
        kind for kind in vars(code).values()
        if inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel) and kind.config_class is config
        and kind.__module__ == code.__name__ and "forward" in vars(kind) and not kind.__name__.endswith("PreTrainedModel")
    ]  # fmt: skip
    parts.sort(key=lambda kind: not kind.__name__.endswith("Model"))
    return {"part": parts[0]} if parts else {}


def build(kind, config, implementation, gain):
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    torch.manual_seed(3)
    model = kind(config).eval().float()
    torch.manual_seed(5)
    randomize(model, gain)
    return model


class Case:
    """One architecture: its inputs, and what its outputs are compared at."""

    def __init__(self, model_type, kind):
        if kind == "none":
            raise RuntimeError("no class of models has this config")
        self.kind, self.model_class = kind, classes_of(model_type)[kind]
        default = default_config(model_type)
        if self.model_class.config_class and not isinstance(default, self.model_class.config_class):
            default = default.get_text_config()
        self.config = shrink(default)
        if kind == "decoder" and hasattr(self.config, "is_decoder"):
            self.config.is_decoder = True
        if model_type in HEAD_DIMS:
            self.config.head_dim = HEAD_DIMS[model_type]
        self.model_type = model_type
        self.parameters = inspect.signature(self.model_class.forward).parameters
        names = (self.model_class.main_input_name, *MAIN)
        self.main = next((name for name in names if name in self.parameters), names[0])
        self.is_text = "input_ids" in self.parameters
        self.is_pair = bool(getattr(self.config, "is_encoder_decoder", False)) and "decoder_input_ids" in self.parameters
        for self.gain in GAINS:
            # Attention as sharp as it can be without making rounding larger.
            self.eager = build(self.model_class, self.config, "eager", self.gain)
            self.noise = noise(self, "none")
            if self.noise < 1e-4:
                break

    def takes(self, name):
        return name in self.parameters or any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def inputs(self):
        torch.manual_seed(7)
        config = self.config
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or 64
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        grid = next((name for name in ("grid_thw", "image_grid_thw") if name in self.parameters), None)
        if grid and not self.is_text:
            # Patches of two images, one after another.
            sizes = [getattr(config, name) for name in ("in_channels", "num_channels", "in_chans") if hasattr(config, name)][:1]
            sizes += [getattr(config, "temporal_patch_size", 1), config.patch_size, config.patch_size]
            patches = torch.tensor([[1, 8, 12], [1, 4, 8]])
            return {self.main: torch.randn(128, math.prod(sizes)), grid: patches}
        pixels = torch.randn(2, getattr(vision, "num_channels", 3), height, width)
        if self.is_text and self.main in ("input_ids", "inputs_embeds"):
            given = {"input_ids": torch.randint(20, 120, (2, LENGTHS[0]))}
            if self.kind == "base" and "pixel_values" in self.parameters and vision is not config:
                # Two towers.
                given["pixel_values"] = pixels
        elif self.main == "pixel_values":
            given = {"pixel_values": pixels}
        elif self.main == "pixel_values_videos":
            given = {self.main: torch.randn(2, getattr(config, "frames_per_clip", 16), 3, config.crop_size if hasattr(config, "crop_size") else 64, config.crop_size if hasattr(config, "crop_size") else 64)}
        elif self.main == "input_values":
            given = {"input_values": torch.randn(2, 16000)}
        elif self.main == "input_features":
            bins = next((getattr(config, name) for name in ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "feature_projection_input_dim") if hasattr(config, name)), 80)
            given = {"input_features": torch.randn(2, bins, 3000) if self.model_type == "whisper" else torch.randn(2, 320, bins)}
        else:
            raise RuntimeError(f"no inputs for {self.main}")
        if self.is_pair:
            given["decoder_input_ids"] = torch.randint(20, 120, (2, 140))
        return given


def padding(way, batch, length, short):
    mask = torch.ones(batch, length, dtype=torch.long)
    if way == "right":
        mask[1, short:] = 0
    elif way == "left":
        mask[1, : length - short] = 0
    elif way == "holes":
        mask[1, 30:50] = 0
        mask[0, 100:103] = 0
    return mask


def output_of(result):
    for name in ("logits", "last_hidden_state", "prediction_logits", "start_logits", "reconstruction"):
        value = getattr(result, name, None)
        if isinstance(value, torch.Tensor):
            return value
    for value in result.values() if hasattr(result, "values") else result:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise RuntimeError("no output to compare")


def call(model, case, way):
    """The output of a model called in one way, and where it counts."""
    given = case.inputs()
    if way == "none":
        out = output_of(model(**given))
        return out, None
    if way == "right" and case.main in ("input_values", "input_features") and "attention_mask" in case.parameters:
        length = given[case.main].shape[1]
        given["attention_mask"] = padding(way, 2, length, length * 3 // 5)
        out = output_of(model(**given))
        there = torch.ones(out.shape[:2], dtype=torch.bool)
        there[1, out.shape[1] // 2 :] = False
        return out, there
    if way in ("right", "left", "holes"):
        if not case.is_text or "attention_mask" not in case.parameters:
            raise NotApplicable
        ids = given["input_ids"]
        mask = padding(way, *ids.shape, LENGTHS[1])
        given["attention_mask"] = mask
        if case.is_pair:
            inner = padding(way, *given["decoder_input_ids"].shape, 90)
            given["decoder_attention_mask"] = inner
            out = output_of(model(**given))
            return out, inner.bool()
        if "position_ids" in case.parameters and case.kind != "encoder":
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        out = output_of(model(**given))
        if out.shape[:2] != mask.shape and way == "left":
            # One row was taken from the sequence, which may be one of padding.
            raise NotApplicable
        return out, mask.bool()
    if way in ("positions", "packed", "documents"):
        if not case.is_text or case.is_pair or "position_ids" not in case.parameters:
            raise NotApplicable
        ids = given["input_ids"][:1]
        given = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in DOCUMENTS])[None]}
        if case.takes("use_cache"):
            given["use_cache"] = False
        if way == "documents":
            number = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
            allowed = number[:, None] == number
            if case.kind == "decoder":
                allowed = allowed.tril()
            least = torch.finfo(torch.float32).min
            given["attention_mask"] = torch.zeros(allowed.shape).masked_fill(~allowed, least)[None, None]
        if way == "packed":
            if not any(p.kind is p.VAR_KEYWORD for p in case.parameters.values()):
                raise NotApplicable
            if model is case.eager:
                parts = ids.split(DOCUMENTS, 1)
                outs = []
                for part in parts:
                    given["position_ids"] = torch.arange(part.shape[1])[None]
                    outs.append(output_of(model(**{**given, "input_ids": part})))
                    if outs[-1].shape[:2] != part.shape:
                        raise NotApplicable  # a vector for each sequence
                return torch.cat(outs, 1), None
            cu = torch.tensor([0, *torch.tensor(DOCUMENTS).cumsum(0)], dtype=torch.int32)
            longest = max(DOCUMENTS)
            given.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=longest, max_length_k=longest)
        return output_of(model(**given)), None
    if way in ("chunks", "chunks left"):
        if not case.is_text or case.is_pair or case.kind == "encoder" or "past_key_values" not in case.parameters:
            raise NotApplicable
        ids = given["input_ids"]
        mask = padding("left" if way == "chunks left" else "none", *ids.shape, LENGTHS[1])
        outs, cache, start = [], None, 0
        for part in ids.split((110, 1, 120, 69), 1):
            end = start + part.shape[1]
            more = {} if way == "chunks" else {"attention_mask": mask[:, :end]}
            if way != "chunks" and "position_ids" in case.parameters:
                more["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
            result = model(input_ids=part, past_key_values=cache, use_cache=True, **more)
            cache, start = getattr(result, "past_key_values", None), end
            if cache is None:
                raise NotApplicable
            outs.append(output_of(result))
        return torch.cat(outs, 1), mask.bool()
    raise AssertionError(way)


class NotApplicable(Exception):
    pass


def error_of(ours, expected, there):
    if ours.shape != expected.shape:
        return float("inf")
    if there is not None and ours.shape[:2] == there.shape:
        ours, expected = ours[there], expected[there]
    if bool((ours.isnan() != expected.isnan()).any()):
        return float("nan")
    ours, expected = ours.nan_to_num(0, 0, 0).double(), expected.nan_to_num(0, 0, 0).double()
    return ((ours - expected).abs().max() / expected.square().mean().sqrt().clamp(min=1e-9)).item()


@torch.no_grad()
def noise(case, way):
    """The difference that weights make which differ by 1e-6."""
    other = copy.deepcopy(case.eager)
    torch.manual_seed(11)
    worst = 0.0
    before, there = call(case.eager, case, way)
    for _ in range(2):
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))
        if way == "packed":
            kept, case.eager = case.eager, other
            after, _ = call(other, case, way)
            case.eager = kept
        else:
            after, _ = call(other, case, way)
        worst = max(worst, error_of(after, before, there))
    return worst


def batching(case, ours):
    """Tokens of generate_batch beside those of eager's generate."""
    tokens = 12
    torch.manual_seed(7)
    prompts = [torch.randint(20, 120, (length,)).tolist() for length in (150, 61, 5)]
    found = models.continuous(ours, prompts, tokens)
    options = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=-1)
    expected = torch.cat([case.eager.generate(torch.tensor([one]), **options)[:, len(one) :] for one in prompts])
    return torch.equal(found, expected), f"{len(expected.unique())} different tokens"


def first_line(error):
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def judge(error):
    """A refusal names the class and its reason; everything else is an error."""
    # generate_batch has the text of an error only.
    is_ours = isinstance(error, flashcore.FlashcoreError) or "with attn_implementation='flashcore'" in str(error)
    is_ours = is_ours and "cannot have" in str(error)
    return "refused" if is_ours else "error"


def refusal_of(model_type, kind):
    """The refusal of a class whose eager model could not be called."""
    try:
        build(classes_of(model_type)[kind], shrink(default_config(model_type)), "flashcore", 1.0)
    except Exception as error:
        return first_line(error) if judge(error) == "refused" else None


@torch.no_grad()
def sweep(model_type, kind, ways):
    """What comes of each way, and the reasons."""
    flashcore.transformers.register()
    reached, booleans = [0], [False]
    inner = flashcore.transformers.attention_forward

    def counted(module, query, key, value, attention_mask=None, *args, **options):
        reached[0] += 1
        booleans[0] |= attention_mask is not None and attention_mask.dtype == torch.bool
        return inner(module, query, key, value, attention_mask, *args, **options)

    transformers.AttentionInterface.register("flashcore", counted)
    try:
        case = Case(model_type, kind)
        call(case.eager, case, "none")
    except Exception as error:
        row = {"class": None, "built": first_line(error), "trace": traceback.format_exc()[-1500:]}
        refusal = refusal_of(model_type, kind)
        if refusal:
            name = classes_of(model_type)[kind].__name__
            row.update({"class": name, "kind": kind, "ways": dict.fromkeys(ways, "refused"), "why": {"none": refusal}})
        return row
    row = {"class": case.model_class.__name__, "kind": case.kind, "ways": {}, "why": {}}
    try:
        ours = build(case.model_class, case.config, "flashcore", case.gain)
    except Exception as error:
        row["ways"] = dict.fromkeys([way for way in WAYS if way in ways], judge(error))
        row["why"] = {"none": first_line(error)}
        return row
    ours.load_state_dict(case.eager.state_dict())
    for way in ways:
        if way == "batching":
            if model_type in BATCHING and kind == "decoder":
                try:
                    equal, why = batching(case, ours)
                    row["ways"][way], row["why"][way] = "ok" if equal else "wrong", why
                except Exception as error:
                    row["ways"][way], row["why"][way] = judge(error), first_line(error)
            continue
        try:
            expected, there = call(case.eager, case, way)
        except NotApplicable:
            continue
        except Exception as error:
            row["why"][way] = f"eager: {first_line(error)}"
            continue
        reached[0], booleans[0] = 0, False
        try:
            result, _ = call(ours, case, way)
        except Exception as error:
            if way == "packed" and judge(error) == "error":
                try:
                    call(copy.copy(case.eager), case, way)
                except Exception as same:
                    row["why"][way] = f"eager: {first_line(same)}"
                    continue
            row["ways"][way], row["why"][way] = judge(error), first_line(error)
            continue
        if not reached[0]:
            row["why"][way] = "no layer calls flashcore"
        error = error_of(result, expected, there)
        limit = 1e-4
        if not error <= limit:
            limit = max(limit, min(30 * noise(case, way), MOST))
        if not error <= limit and way == "packed":
            # A model that does not hand cu_seq_lens to its layers does what eager does. Others mix documents outside of
            # attention, in convolutions or embeddings of neighbours: there, the mask is eager's.
            same, _ = call(case.eager, case, "positions")
            if error_of(result, same, None) <= 1e-4:
                row["why"][way] = "packing is not this model's"
                continue
            error = min(error, error_of(result, call(case.eager, case, "documents")[0], None))
        if not error <= limit and booleans[0]:
            sdpa = build(case.model_class, case.config, "sdpa", case.gain)
            error = error_of(result, call(sdpa, case, way)[0], there)
            row["why"][way] = "eager adds a boolean mask as numbers; beside sdpa"
        if error == 0 and bool(expected.isnan().all()):
            row["why"][way] = "eager: NaN"
            continue
        row["ways"][way] = ("ok" if reached[0] else "-") if error <= limit else "wrong"
        if not error <= 1e-4:
            row["why"][way] = f"{error:.1e} of {limit:.0e}"
    return row


def child(model_type, kind, ways, pipe):
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    torch.set_num_threads(1)
    try:
        pipe.send(sweep(model_type, kind, ways))
    except BaseException as error:
        pipe.send({"class": None, "built": first_line(error), "trace": traceback.format_exc()[-1500:]})


def run(names, ways, jobs, limit):
    """Yields name, row and seconds as processes end."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receiver, sender = context.Pipe(False)
            process = context.Process(target=child, args=(*name, ways, sender), daemon=False)
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic())
        for receiver in multiprocessing.connection.wait(list(running), timeout=0.5) or list(running):
            name, process, start = running[receiver]
            seconds = time.monotonic() - start
            if receiver.poll():
                try:
                    row = receiver.recv()
                except EOFError:
                    process.join()
                    row = {"class": None, "built": f"its process ended with {process.exitcode}", "crashed": True}
            elif seconds > limit:
                process.kill()
                row = {"class": None, "built": f"more than {limit:g} s"}
            else:
                continue
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            del running[receiver]
            receiver.close()
            yield name, row, seconds


def verdict(row):
    """One word for an architecture."""
    if row["class"] is None:
        return "crashed" if row.get("crashed") else "not built"
    found = set(row["ways"].values())
    for word in ("wrong", "error"):
        if word in found:
            return word
    if "ok" in found:
        return "ok"
    return "refused" if "refused" in found else "not applicable"


def totals(verdicts):
    """How many architectures have each verdict."""
    return dict(sorted(collections.Counter(verdicts).items()))


def write(path, versions, rows):
    """Writes a record, or puts rows into one of the same versions: a line for each architecture."""
    found = {}
    if os.path.exists(path):
        with open(path) as file:
            head, *lines = map(json.loads, file)
        if all(head[name] == version for name, version in versions.items()):
            found = {line["architecture"]: line for line in lines}
    for name, row in rows.items():
        found[name] = {"architecture": name, "class": row["class"], "verdict": row["verdict"]}
        for way, word in row.get("ways", {}).items():
            found[name].setdefault(word, []).append(way)
        found[name]["why"] = row.get("why", row.get("built"))
    lines = [found[name] for name in sorted(found)]
    with open(path, "w") as file:
        for line in ({**versions, "totals": totals(line["verdict"] for line in lines)}, *lines):
            file.write(json.dumps(line) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="all", help="model types with commas between, or all")
    parser.add_argument("--ways", default="all", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120, help="seconds for one architecture")
    parser.add_argument("--record", help="a file of JSON lines for the result; rows of the same versions stay")
    parser.add_argument("--trace", action="store_true", help="say where a model could not be built")
    options = parser.parse_args()
    names = sorted(transformers.CONFIG_MAPPING) if options.models == "all" else options.models.split(",")
    cases = [(name, kind) for name in names for kind in classes_of(name) or ["none"]]
    ways = WAYS if options.ways == "all" else options.ways.split(",")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "flashcore": flashcore.__version__}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print("  ".join(["architecture".ljust(28), *(way.ljust(max(9, len(way))) for way in ways), "reasons"]))
    rows, status, begin = {}, 0, time.monotonic()
    for (name, kind), row, seconds in run(cases, ways, options.jobs, options.limit):
        name = name if kind == next(iter(classes_of(name)), "none") else f"{name} ({kind})"
        row["verdict"] = verdict(row)
        status |= row["verdict"] in ("wrong", "error", "crashed")
        trace = row.pop("trace", "")
        rows[name] = row
        progress = f"[{len(rows)}/{len(cases)} {seconds:.1f} s]"
        if row["class"] is None:
            print(f"{name:28}  not built: {row['built']}  {progress}", flush=True)
            if options.trace:
                print(trace)
            continue
        cells = [row["ways"].get(way, "-").ljust(max(9, len(way))) for way in ways]
        reasons = "; ".join(f"{way}: {why}" for way, why in row["why"].items())
        print("  ".join([name.ljust(28), *cells, reasons, progress]), flush=True)
    print(f"{time.monotonic() - begin:.0f} s; " + ", ".join(f"{count} {word}" for word, count in totals(row["verdict"] for row in rows.values()).items()))
    if options.record:
        write(options.record, versions, rows)
    sys.exit(status)


if __name__ == "__main__":
    main()
