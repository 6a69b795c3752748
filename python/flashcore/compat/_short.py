"""The short way of flash_attn's functions: builtins that take their arguments as they come.

What `_common` checks depends on sizes, strides, types and numbers alone, all of which are in the key of a launch. So a call
of a kind that was seen, for which nothing had to be copied, padded or split, is one launch with the tensors that were given.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ..torch import _kvcache, _ops, forward, is_fast, kvcache_forward, varlen_forward
from ..torch._fast import FLOAT, operation
from . import _common


class Recorder:
    """Stands for a function of `flashcore.torch` in one call, and keeps the launch if it gets the tensors that were given.

    `places` has, for each argument of the function, its place among those that were given.
    """

    def __init__(self, function: Any, miss: Any, places: "Dict[int, int]", given: "Tuple[Any, ...]") -> None:
        self.function, self.miss, self.places, self.given = function, miss, places, given
        self.out: "Optional[torch.Tensor]" = None
        self.launch: Any = None

    def __call__(self, *arguments: Any) -> "Tuple[torch.Tensor, torch.Tensor]":
        for place, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor) and not self._is_given(place, argument):
                return self.function(*arguments)
        result, self.launch = self.miss(*arguments)
        self.out = result[0]
        return result

    def _is_given(self, place: int, argument: torch.Tensor) -> bool:
        at = self.places.get(place, len(self.given))
        return at < len(self.given) and self.given[at] is argument

    def launch_for(self, out: torch.Tensor, counts: "Tuple[int, int]", return_lse: bool) -> Any:
        """The launch by places among the given arguments, if `out` is what it wrote.

        `counts` are the numbers of arguments of the function and of those that can be given.
        """
        if self.launch is None or out is not self.out:
            return None
        function, plan, structs, words, pairs, outputs, _, owner = self.launch
        # An LSE without elements is not returned.
        kept = [index for index, output in enumerate(outputs) if return_lse or output != ((0,), FLOAT)]
        sources = {**self.places, **{counts[0] + index: counts[1] + place for place, index in enumerate(kept)}}
        places: "List[int]" = []
        for word, source in zip(pairs[::2], pairs[1::2]):
            places += [word, sources[source]]
        return function, plan, structs, words, tuple(places), tuple(outputs[index] for index in kept), return_lse, owner


def _short(python: Any, function: Any, miss: Any, names: "Dict[str, str]", **options: Any) -> "Tuple[Any, Callable[..., Any]]":
    """A builtin and a Python function for the arguments of `python` ahead of `attend`: output, and LSE if it is wanted.

    `miss` is that of `function`; `names` has its arguments that are called otherwise.
    """
    parameters = list(inspect.signature(python).parameters.values())
    parameters = parameters[: [parameter.name for parameter in parameters].index("attend")]
    at = {parameter.name: place for place, parameter in enumerate(parameters)}
    wanted = at["return_lse"]
    theirs = list(inspect.signature(miss).parameters)
    places = {place: at[names.get(name, name)] for place, name in enumerate(theirs) if names.get(name, name) in at}
    counts = (len(theirs), len(parameters))

    def call(*arguments: Any) -> Any:
        out, lse = python(*arguments, **options)
        return (out, lse) if arguments[wanted] else out

    def missed(*arguments: Any) -> Any:
        recorder = Recorder(function, miss, places, arguments)
        out, lse = python(*arguments, attend=recorder, **options)
        launch = recorder.launch_for(out, counts, arguments[wanted])
        return ((out, lse) if arguments[wanted] else out), launch

    missed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return (operation(missed, call) if is_fast() else call), call


_CACHE_NAMES = {
    "rotary_cos": "cos", "rotary_sin": "sin", "rotary_interleaved": "interleaved", "kv_batch_idx": "cache_batch_idx",
    "leftpad_k": "cache_leftpad", "alibi_slopes": "slopes",
}  # fmt: skip
dense, dense_python = _short(_common.dense, forward, _ops.miss_forward, {"alibi_slopes": "slopes"})
packed, packed_python = _short(_common.packed, varlen_forward, _ops.miss_varlen_forward, {"alibi_slopes": "slopes"})


def cached_as(table_name: str) -> "Tuple[Any, Callable[..., Any]]":
    """The two functions for a KV cache; `table_name` is what the caller calls page_table."""
    return _short(_common.cached, kvcache_forward, _kvcache.miss_kvcache_forward, _CACHE_NAMES, table_name=table_name)
