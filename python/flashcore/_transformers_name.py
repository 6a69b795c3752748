"""What transformers does with the name of an attention implementation, and which models cannot have ours."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, Optional, Tuple

from transformers import PreTrainedModel, masking_utils
from transformers.utils import generic

from ._errors import Unsupported

_INSTEAD = 'pass "eager", for a part of a model by its config\'s name: attn_implementation={"": ..., "vision_config": "eager"}'

# What an eager attention function is given that ours knows, by the names of transformers.
_KNOWN = {
    "module", "query", "key", "value", "query_states", "key_states", "value_states", "attention_mask", "dropout",
    "scaling", "sliding_window", "softcap", "is_causal", "position_bias", "s_aux", "sinks", "kwargs",
}  # fmt: skip


def _refusal(model: "type[PreTrainedModel]", name: str) -> "Optional[str]":
    """Why a class of models cannot have our attention, or None."""
    code = vars(sys.modules.get(model.__module__, model))
    for table in code.values():
        # Layers by the name of the implementation, as transformers had them before it had an interface.
        if isinstance(table, dict) and "eager" in table and name not in table and inspect.isclass(table["eager"]):
            return f"its attention layers are {', '.join(sorted(table))}"
    if not getattr(model, "_can_set_attn_implementation", lambda: True)():
        return "its attention layers compute attention themselves and call no attention function"
    for function in code.values():
        if inspect.isfunction(function) and function.__name__.endswith("eager_attention_forward"):
            unknown = set(inspect.signature(function).parameters) - _KNOWN
            if unknown:
                return f"its attention function takes {', '.join(sorted(unknown))}, which flashcore does not know"
    return None


_answered: "set[str]" = set()


def answer_for(name: str) -> None:
    """Answers for our name where transformers takes every name with "flash" in it for a package or a kernel of the hub.

    Models that list the kernels they know would replace our name by one of those, and the functions of flash_attn are
    looked for when a model is made. Other names go on to transformers itself.
    """
    from transformers import modeling_flash_attention_utils as utils

    if name in _answered:
        return
    _answered.add(name)
    if hasattr(PreTrainedModel, "_check_and_adjust_attn_implementation"):
        check = PreTrainedModel._check_and_adjust_attn_implementation

        @functools.wraps(check)
        def check_implementation(self: Any, attn_implementation: "Optional[str]", *args: Any, **options: Any) -> Any:
            if attn_implementation != name:
                return check(self, attn_implementation, *args, **options)
            reason = _refusal(type(self), name)
            if reason:
                raise Unsupported(f"{type(self).__name__} cannot have attn_implementation={name!r}: {reason}; {_INSTEAD}")
            return name

        PreTrainedModel._check_and_adjust_attn_implementation = check_implementation
    if hasattr(masking_utils, "is_flash_attention_requested"):
        # Chunks are a bias.
        is_flash = masking_utils.is_flash_attention_requested

        @functools.wraps(is_flash)
        def is_flash_attention_requested(config: Any = None, *args: Any, **options: Any) -> bool:
            return getattr(config, "_attn_implementation", None) != name and is_flash(config, *args, **options)

        masking_utils.is_flash_attention_requested = is_flash_attention_requested

        # Models ask by the name before they take it, and refuse masks that are a bias here. The library itself was
        # imported before, and goes on to take the name for FlashAttention.
        @functools.wraps(is_flash)
        def is_refused(config: Any = None, requested_attention_implementation: Any = None, **options: Any) -> bool:
            if requested_attention_implementation == name:
                return False
            return is_flash(config, requested_attention_implementation, **options)

        for module in [generic, *(each for path, each in sys.modules.items() if path.startswith("transformers.models."))]:
            if vars(module).get(is_flash.__name__) is is_flash:
                setattr(module, is_flash.__name__, is_refused)
    _check_pages(name)
    if not hasattr(utils, "_lazy_imports"):
        return
    from .compat import flash_attn as functions
    from .compat.bert_padding import pad_input, unpad_input

    original = utils._lazy_imports
    found: "Tuple[Any, ...]" = (functions.flash_attn_func, functions.flash_attn_varlen_func)
    if hasattr(utils, "_flash_with_kvcache_fn"):
        found += (functions.flash_attn_with_kvcache,)
    found += (pad_input, unpad_input)

    def lazy_imports(implementation: "Optional[str]", *args: Any, **options: Any) -> Any:
        return found if implementation == name else original(implementation, *args, **options)

    utils._lazy_imports = lazy_imports




def _check_pages(name: str) -> None:
    """Refuses generate_batch to models whose layers do not hand the pages of continuous batching to attention."""
    try:
        from transformers.generation.continuous_batching.model_runner import ModelRunner
    except ImportError:  # versions without it
        return
    inner = ModelRunner._forward_process_and_sample

    @functools.wraps(inner)
    def forward_process_and_sample(self: Any, model: Any, batch_data: Any, *args: Any) -> None:
        inner(self, model, batch_data, *args)
        if model.config._attn_implementation == name and not getattr(batch_data["cache"], "has_flashcore_layers", False):
            raise Unsupported(
                f"{type(model).__name__} cannot have generate_batch with attn_implementation={name!r}: its layers do not "
                "hand the cache to attention; call generate"
            )

    ModelRunner._forward_process_and_sample = forward_process_and_sample
