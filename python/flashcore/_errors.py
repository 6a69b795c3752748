"""Exceptions: one class for each status of the library, with the library's own message."""

from __future__ import annotations

from typing import Type

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
]


class FlashcoreError(RuntimeError):
    """Failure of a call; the message says what was wrong, the value, and what is allowed."""

    status: int = -1


class InvalidArgument(FlashcoreError, ValueError):
    """An argument is wrong; nothing was computed."""

    status = 1


class Unsupported(FlashcoreError, NotImplementedError):
    """The arguments are right, and the device has no kernel for them."""

    status = 2


class NoDevice(FlashcoreError):
    """No driver, no GPU, no GPU of this number, or one that was opened before a fork."""

    status = 3


class CudaError(FlashcoreError):
    """The driver or the GPU failed."""

    status = 4


class OutOfMemory(FlashcoreError, MemoryError):
    """Not enough memory on the GPU."""

    status = 5


class SelfCheckFailed(FlashcoreError):
    """The kernel, as this driver compiles it, gave a wrong result on a small problem and is not used."""

    status = 6


class InternalError(FlashcoreError):
    """A bug of flashcore."""

    status = 8


class NoBackward(FlashcoreError, NotImplementedError):
    """Gradients were asked of an operator that computes the forward pass only."""


_BY_STATUS: "dict[int, Type[FlashcoreError]]" = {
    error.status: error
    for error in (InvalidArgument, Unsupported, NoDevice, CudaError, OutOfMemory, SelfCheckFailed, InternalError)
}


def of_status(status: int, message: str) -> FlashcoreError:
    """The exception of a status."""
    return _BY_STATUS.get(status, InternalError)(message)
