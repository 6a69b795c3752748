"""Plans: a problem on a device, ready to be run, and the cache of them.

A call finds its plan by one lookup of a tuple in a dict. The tensors of a call are kept with the plan and used again:
a call writes the addresses into them and nothing else.
"""

from __future__ import annotations

import os
import threading
from ctypes import addressof, byref, c_uint64, c_void_p, cast
from typing import Any, Callable, Dict, Hashable, NamedTuple, Optional, Sequence, Tuple

from . import _library as lib

class Operand(NamedTuple):
    """A tensor of a call but its address."""

    name: str
    dtype: int
    size: int  # bytes
    strides: "Tuple[int, ...]" = ()  # of a bias, a scale, or the parts of a merge


class Plan:
    """A plan of the library with the tensors of its calls, in the host's memory or on the GPU.

    `operands` are the names of the addresses that `run` takes, in order.
    """

    __slots__ = (
        "handle", "device", "ordinal", "operands", "workspace_bytes", "is_used", "is_captured", "problem",
        "_call", "_words", "_template", "_places", "_free", "_is_host", "out_shape",
    )  # fmt: skip

    def __init__(
        self,
        handle: int,
        place: "Tuple[int, int]",
        operands: "Sequence[Operand]",
        problem: Any = None,
        is_host: bool = True,
    ) -> None:
        self.handle, (self.device, self.ordinal) = handle, place
        self._call = lib.LIBRARY.flashcore_run if is_host else lib.LIBRARY.flashcore_launch
        self._is_host = is_host
        entries = list(operands)
        self.workspace_bytes = 0 if is_host else lib.LIBRARY.flashcore_plan_workspace_bytes(handle)
        if self.workspace_bytes:
            entries.append(Operand("workspace", 0, self.workspace_bytes))
        self.operands = tuple(operand.name for operand in entries)
        self._places = tuple(lib.TENSOR_WORDS * index + 1 for index in range(len(entries)))
        self.is_used, self.is_captured = False, False
        self.problem = problem
        self.out_shape: Any = None
        template: "list[int]" = []
        for name, dtype, size, strides in entries:
            number = lib.OPERANDS[name] & 0xFFFFFFFF
            template += [dtype << 32 | number, 0, size, *strides, *[0] * (lib.TENSOR_WORDS - 3 - len(strides))]
        self._words = c_uint64 * len(template)
        self._template = tuple(template)
        self._free: list = []

    def run(self, addresses: "Sequence[int]", stream: int = 0) -> None:
        """Runs the plan on the host's memory, or launches it on a stream of the GPU."""
        self.is_used = True
        try:
            entry = self._free.pop()
        except IndexError:
            words = self._words(*self._template)
            entry = (words, (addressof(words), len(self.operands)))
        words, tensors = entry
        for place, address in zip(self._places, addresses):
            words[place] = address
        if self._is_host:
            status = self._call(self.handle, *tensors)
        else:
            status = self._call(self.handle, stream, *tensors)
        if status:
            lib.fail(status)
        self._free.append(entry)

    def launch(
        self, sources: "Dict[str, int]", outputs: "Sequence[Tuple[Any, int]]", returns_tuple: bool
    ) -> "Tuple[Any, ...]":
        """What libflashcore_python needs to launch the plan: see crates/flashcore-python/src/launch.rs.

        `sources` has the place of each operand among arguments and outputs, which are (shape, kind).
        """
        places: "list[int]" = []
        for place, name in zip(self._places, self.operands):
            places += [place, sources[name]]
        return (
            cast(self._call, c_void_p).value, self.handle, not self._is_host,
            bytes(self._words(*self._template)), tuple(places), tuple(outputs), returns_tuple, self,
        )  # fmt: skip

    def describe(self) -> str:
        """Problem, device and kernel."""
        return lib.describe(self.handle)

    def destroy(self) -> None:
        """Destroys the plan; no launch of it may be under way."""
        handle, self.handle = self.handle, 0
        if handle:
            lib.LIBRARY.flashcore_plan_destroy(handle)


class PlanCache:
    """Plans by key, at most `capacity`: of those, the ones that no call used since the last eviction go first.

    A hit is one dict lookup without a lock (`find`). Plans that a CUDA graph has captured stay forever.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.plans: "Dict[Hashable, Plan]" = {}
        self.find = self.plans.get
        self.capacity = capacity
        # Called when plans go: tables beside this one have to forget them.
        self.on_eviction: "list[Callable[[], None]]" = []
        self._lock = threading.RLock()
        # A thread that holds the lock does not exist in a forked child.
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()

    def add(self, key: Hashable, make: "Callable[[], Plan]") -> Plan:
        """The plan of a key, made if there is none."""
        with self._lock:
            plan = self.plans.get(key)
            if plan is None:
                if len(self.plans) >= self.capacity:
                    self._evict()
                plan = self.plans[key] = make()
            return plan

    def _evict(self) -> None:
        """Removes a quarter: one wait for the GPU serves many evictions."""
        wanted = max(self.capacity // 4, 1)
        evicted = []
        for key, plan in list(self.plans.items()):
            if len(evicted) == wanted:
                break
            if plan.is_captured:
                continue
            if plan.is_used:
                plan.is_used = False
                # To the end: others come first the next time.
                self.plans[key] = self.plans.pop(key)
                continue
            evicted.append(self.plans.pop(key))
        if not evicted:
            # All of them were in use: the oldest ones go.
            oldest = [key for key, plan in self.plans.items() if not plan.is_captured][:wanted]
            evicted = [self.plans.pop(key) for key in oldest]
        for forget in self.on_eviction:
            forget()
        for ordinal in {plan.ordinal for plan in evicted if plan.device == lib.CUDA}:
            wait_for_gpu(ordinal)
        for plan in evicted:
            # Another thread may be about to run it: its last reference destroys it.
            _Retired.add(plan)

    def clear(self) -> None:
        """Forgets all plans."""
        with self._lock:
            for forget in self.on_eviction:
                forget()
            for plan in self.plans.values():
                _Retired.add(plan)
            self.plans.clear()


class _Retired:
    """Evicted plans wait for one more eviction before they are destroyed: a thread may have found one just before."""

    waiting: "list[Plan]" = []

    @classmethod
    def add(cls, plan: Plan) -> None:
        cls.waiting.append(plan)
        while len(cls.waiting) > 1024:
            cls.waiting.pop(0).destroy()


def wait_for_gpu(ordinal: int) -> None:
    """Waits until the GPU has finished everything: plans must outlive their launches."""
    try:
        driver = _driver()
        device, context, before = _c_int(), c_void_p(), c_void_p()
        if driver.cuDeviceGet(byref(device), ordinal):
            return
        if driver.cuDevicePrimaryCtxRetain(byref(context), device):
            return
        driver.cuCtxPushCurrent_v2(context)
        driver.cuCtxSynchronize()
        driver.cuCtxPopCurrent_v2(byref(before))
        driver.cuDevicePrimaryCtxRelease_v2(device)
    except (OSError, AttributeError):
        return


def _driver() -> Any:
    from ctypes import CDLL

    return CDLL("libcuda.so.1")


def _c_int() -> Any:
    from ctypes import c_int

    return c_int()


CACHE = PlanCache()


def create(problem: Any, device: int, ordinal: int, config: "Optional[str]" = None) -> int:
    """A plan of the library for a problem of any operation."""
    handle = c_void_p()
    name = config.encode() if config else None
    lib.check(lib.LIBRARY.flashcore_plan_create(byref(problem), device, ordinal, name, byref(handle)))
    return handle.value or 0
