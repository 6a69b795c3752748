"""Signatures of flashcore.compat against lines `module.function(a, b=None)`."""

import ast
import importlib
import inspect

# Functions of flash_attn that are not there, by choice.
ABSENT = {
    "rotary.apply_rotary_emb_torch": "a reference of its own tests",
    "rotary.apply_rotary_emb_qkv_": "training of packed tensors; apply_rotary_emb does it for each",
    "rotary.apply_rotary_emb_kv_": "training of packed tensors; apply_rotary_emb does it for each",
}


def parameters(line):
    """Name and parameters, as pairs of a name and the source of its default."""
    name, _, rest = line.strip().partition("(")
    node = ast.parse(f"def f({rest}: pass").body[0].args
    defaults = [None] * (len(node.args) - len(node.defaults)) + [ast.unparse(default) for default in node.defaults]
    return name, [(argument.arg, default) for argument, default in zip(node.args, defaults)]


def differences(lines):
    """What differs, one line each."""
    result = []
    for line in lines:
        name, expected = parameters(line)
        if name in ABSENT:
            continue
        module, function = name.split(".")
        ours = getattr(importlib.import_module(f"flashcore.compat.{module}"), function, None)
        if ours is None:
            result.append(f"{name} is not there")
            continue
        actual = [
            (key, None if value.default is inspect.Parameter.empty else repr(value.default))
            for key, value in inspect.signature(ours).parameters.items()
        ]
        if actual != expected:
            ours_alone = [pair for pair in actual if pair not in expected]
            theirs_alone = [pair for pair in expected if pair not in actual]
            result.append(f"{name}: ours has {ours_alone}, theirs {theirs_alone}, or the order differs")
    return result
