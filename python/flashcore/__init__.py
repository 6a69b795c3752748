"""flashcore: fused attention (FlashAttention) on NVIDIA GPUs and on the CPU, with nothing to compile.

    import numpy, flashcore
    q = k = v = numpy.random.rand(1, 8, 1024, 64).astype("float32")
    out = flashcore.attention(q, k, v, causal=True)

`flashcore.torch` has operators for PyTorch, `flashcore.compat` the functions of flash_attn by their names, and
`flashcore.transformers.register()` makes `attn_implementation="flashcore"` work.
"""

from ._attention import attention, prepare
from ._doctor import doctor
from ._errors import (
    CudaError,
    FlashcoreError,
    InternalError,
    InvalidArgument,
    NoBackward,
    NoDevice,
    OutOfMemory,
    SelfCheckFailed,
    Unsupported,
)
from ._library import version

__version__ = version()

__all__ = [
    "CudaError",
    "FlashcoreError",
    "InternalError",
    "InvalidArgument",
    "NoBackward",
    "NoDevice",
    "OutOfMemory",
    "SelfCheckFailed",
    "Unsupported",
    "attention",
    "doctor",
    "prepare",
    "version",
]
