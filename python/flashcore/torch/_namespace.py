"""The namespace of the operators: `torch.ops.flashcore`, or another one where that is taken.

torch has one namespace of a name for a process. A second copy of this package, of another version or at another place,
takes one that its version and its place name, so that each copy calls its own operators; `torch.ops.flashcore` is that of
the copy that came first. `flashcore.torch.NAMESPACE` says which it is.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Iterator, Tuple

import torch

from .. import _library as lib


def _names() -> "Iterator[str]":
    yield "flashcore"
    # By version and place: the same in every process, whatever else is loaded there.
    place = hashlib.sha256(os.path.dirname(os.path.abspath(__file__)).encode()).hexdigest()[:8]
    name = f"flashcore_{re.sub('[^0-9A-Za-z]', '_', lib.version())}_{place}"
    yield name
    for number in range(2, 100):
        yield f"{name}_{number}"


def _library() -> "Tuple[torch.library.Library, str]":
    for name in _names():
        try:
            return torch.library.Library(name, "DEF"), name
        except RuntimeError as error:
            if "Only a single TORCH_LIBRARY" not in str(error):
                raise
            taken = error
    raise ImportError("flashcore was loaded a hundred times in this process; load it once, and hand the module on") from taken


LIB, NAMESPACE = _library()
OPERATORS = getattr(torch.ops, NAMESPACE)
