"""flash_attn's functions by their names, and `install()` for code that imports them from flash_attn.

    import flashcore.compat
    flashcore.compat.install()
    from flash_attn import flash_attn_func
"""

from __future__ import annotations

import sys
import types

__all__ = ["install", "uninstall"]

_NAMES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.bert_padding",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn_interface",
)


def install(force: bool = False) -> None:
    """Puts `flash_attn` (FlashAttention 2) and `flash_attn_interface` (3) into `sys.modules`.

    Modules of these names that were imported before are an error unless `force` replaces them. Nothing is written to disk,
    and no other process sees it.
    """
    others = [name for name in _NAMES if name in sys.modules and not hasattr(sys.modules[name], "__flashcore__")]
    if others and not force:
        raise RuntimeError(
            f"{', '.join(others)} is imported already; call flashcore.compat.install() before, or with force=True"
        )
    from . import bert_padding, flash_attn, flash_attn_interface, rotary

    package = _module("flash_attn", flash_attn)
    interface = _module("flash_attn.flash_attn_interface", flash_attn)
    padding = _module("flash_attn.bert_padding", bert_padding)
    layers = _module("flash_attn.layers")
    turning = _module("flash_attn.layers.rotary", rotary)
    package.__path__ = layers.__path__ = []  # packages without files of their own
    package.flash_attn_interface, package.bert_padding, package.layers = interface, padding, layers  # type: ignore[attr-defined]
    layers.rotary = turning  # type: ignore[attr-defined]
    third = _module("flash_attn_interface", flash_attn_interface)
    for module in (package, interface, padding, layers, turning, third):
        sys.modules[module.__name__] = module


def uninstall() -> None:
    """Takes the modules away again."""
    for name in _NAMES:
        if hasattr(sys.modules.get(name), "__flashcore__"):
            del sys.modules[name]


def _module(name: str, source: "types.ModuleType | None" = None) -> types.ModuleType:
    module = types.ModuleType(name, source.__doc__ if source else None)
    if source:
        names = [entry for entry in vars(source) if not entry.startswith("__")]
        vars(module).update({entry: getattr(source, entry) for entry in names})
        if hasattr(source, "__version__"):
            module.__version__ = source.__version__  # type: ignore[attr-defined]
    module.__flashcore__ = True  # type: ignore[attr-defined]
    return module
