"""flash_attn's functions by their names, and `install()` for code that imports them from flash_attn.

    import flashcore.compat
    flashcore.compat.install()
    from flash_attn import flash_attn_func
"""

from __future__ import annotations

import sys
import types
from importlib import metadata
from importlib.machinery import ModuleSpec
from typing import Any, Iterator, Optional

__all__ = ["install", "uninstall"]

_NAMES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.bert_padding",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn_interface",
    "flash_attn_3",
)


# What importlib.metadata says is installed: name, version, and the modules that it brings.
_DISTRIBUTIONS = (("flash_attn", "2.8.4", "flash_attn"), ("flash_attn_3", "3.0.0", "flash_attn_3\nflash_attn_interface"))


class _Distribution(metadata.Distribution):
    def __init__(self, name: str, version: str, modules: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: flashcore.compat\n",
            "top_level.txt": f"{modules}\n",
        }

    def read_text(self, filename: str) -> "Optional[str]":
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: flashcore.compat.install() writes no files")


class _Finder:
    """Tells importlib.metadata the versions, for libraries that ask for them before they import."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        return None  # modules are in sys.modules

    @staticmethod
    def find_distributions(context: Any = None) -> "Iterator[metadata.Distribution]":
        wanted = getattr(context, "name", None)
        for name, version, modules in _DISTRIBUTIONS:
            if wanted is None or wanted.lower().replace("-", "_").replace(".", "_") == name:
                yield _Distribution(name, version, modules)

    @staticmethod
    def invalidate_caches() -> None:
        pass


def install(force: bool = False) -> None:
    """Puts `flash_attn` (FlashAttention 2) and `flash_attn_interface` (3) into `sys.modules`, and their versions beside them.

    Modules of these names that were imported before are an error unless `force` replaces them. Nothing is written to disk,
    and no other process sees it. Libraries look for `flash_attn` when they are imported: call this before.
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
    extension = _module("flash_attn_3")  # of which diffusers asks whether it is there
    extension.__path__ = []
    for module in (package, interface, padding, layers, turning, third, extension):
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=hasattr(module, "__path__"))
        sys.modules[module.__name__] = module
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def uninstall() -> None:
    """Takes the modules and their versions away again."""
    for name in _NAMES:
        if hasattr(sys.modules.get(name), "__flashcore__"):
            del sys.modules[name]
    if _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)  # type: ignore[arg-type]


def _module(name: str, source: "types.ModuleType | None" = None) -> types.ModuleType:
    module = types.ModuleType(name, source.__doc__ if source else None)
    if source:
        names = [entry for entry in vars(source) if not entry.startswith("__")]
        vars(module).update({entry: getattr(source, entry) for entry in names})
        if hasattr(source, "__version__"):
            module.__version__ = source.__version__  # type: ignore[attr-defined]
    module.__flashcore__ = True  # type: ignore[attr-defined]
    return module
