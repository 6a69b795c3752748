"""`doctor`: what is there, and why not."""

from __future__ import annotations

import platform
import sys
from typing import Any, Dict

from . import _library as lib
from ._errors import FlashcoreError


def doctor(file: Any = None) -> "Dict[str, str]":
    """Says what is there (version, library, CPU, driver, GPU, torch, transformers), and why what is missing is missing.

    Prints it, to standard output unless `file` is given, and returns it as a dict.
    """
    from ._attention import prepare

    found = {"flashcore": lib.version(), "library": lib.path(), "python": f"{platform.python_version()} on {platform.machine()}"}
    for name, device in (("cpu", "cpu"), ("cuda", "cuda:0")):
        try:
            found[name] = prepare((1, 1, 64, 64), dtype="float16", device=device).replace("\n", "; ")
        except FlashcoreError as error:
            found[name] = f"no: {error}"
    for module in ("numpy", "ml_dtypes", "torch", "transformers"):
        found[module] = _version(module)
    for name, text in found.items():
        print(f"{name:13} {text}", file=file or sys.stdout)
    return found


def _version(module: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return "no: it is not installed (and not needed)"
