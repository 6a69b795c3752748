"""Plans: a problem on a device, ready to be run, and the cache of them.

A call finds its plan by one lookup of a tuple in a dict. The structs of a call are kept with the plan and used again:
a call writes the addresses into them and nothing else.
"""

from __future__ import annotations

import os
import threading
from ctypes import addressof, byref, c_uint64, c_void_p
from struct import Struct
from typing import Any, Callable, Dict, Hashable, Optional, Sequence, Tuple

from . import _library as lib

_run_host = lib.LIBRARY.flashcore_plan_run_host
_launch = lib.LIBRARY.flashcore_plan_launch_tensors


class Plan:
    """A plan of the library with the words of its structs, for tensors in the host's memory or on the GPU.

    `operands` are the names of the addresses that `run` takes, in order.
    """

    __slots__ = (
        "handle", "device", "ordinal", "operands", "workspace_bytes", "is_used", "is_captured", "problem",
        "_call", "_destroy", "_words", "_template", "_split", "_places", "_free", "_is_host", "_pack",
        "out_shape",
    )  # fmt: skip

    def __init__(
        self,
        handle: int,
        device: int,
        ordinal: int,
        functions: "Tuple[Callable, Callable, Callable]",
        operands: "Sequence[Tuple[str, int, int]]",
        constants: "Sequence[Tuple[int, int]]",
        sizes: "Tuple[int, int]",
        workspace_bytes: int = 0,
        problem: Any = None,
        is_host: bool = True,
    ) -> None:
        """`operands` are (name, word of the address, bytes); host structs have the bytes in the word after the address."""
        run_host, launch, self._destroy = functions
        self.handle, self.device, self.ordinal = handle, device, ordinal
        self._call = run_host if is_host else launch
        self._is_host = is_host
        self.operands = tuple(name for name, _, _ in operands)
        self._places = tuple(word for _, word, _ in operands)
        self.workspace_bytes = workspace_bytes
        self.is_used, self.is_captured = False, False
        self.problem = problem
        self.out_shape: Any = None
        # Addresses side by side, as in a launch without further operands, are written by one call.
        is_dense = self._places == tuple(range(1, len(operands) + 1))
        self._pack = Struct(f"={len(operands)}Q").pack_into if is_dense else None
        count = sum(sizes)
        self._split = sizes[0]
        template = [0] * count
        template[0] = 8 * sizes[0]
        if sizes[1]:
            template[sizes[0]] = 8 * sizes[1]
        for word, value in constants:
            template[word] = value
        if is_host:
            for _, word, size in operands:
                template[word + 1] = size
        self._words = c_uint64 * count
        self._template = tuple(template)
        self._free: list = []

    def run(self, addresses: "Sequence[int]", stream: int = 0) -> None:
        """Runs the plan on the host's memory, or launches it on a stream of the GPU."""
        self.is_used = True
        try:
            entry = self._free.pop()
        except IndexError:
            words = self._words(*self._template)
            first = addressof(words)
            entry = (words, first, first + 8 * self._split)
        words, first, second = entry
        if self._pack is not None:
            self._pack(words, 8, *addresses)
        else:
            for place, address in zip(self._places, addresses):
                words[place] = address
        if self._is_host:
            status = self._call(self.handle, first, second)
        else:
            status = self._call(self.handle, stream, first)
        if status:
            lib.fail(status)
        self._free.append(entry)

    def describe(self) -> str:
        """Problem, device and kernel."""
        return lib.describe(self.handle)

    def destroy(self) -> None:
        """Destroys the plan; no launch of it may be under way."""
        handle, self.handle = self.handle, 0
        if handle:
            self._destroy(handle)


class PlanCache:
    """Plans by key, at most `capacity`: of those, the ones that no call used since the last eviction go first.

    A hit is one dict lookup without a lock (`find`). Plans that a CUDA graph has captured stay forever.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.plans: "Dict[Hashable, Plan]" = {}
        self.find = self.plans.get
        self.capacity = capacity
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
        for ordinal in {plan.ordinal for plan in evicted if plan.device == lib.CUDA}:
            _wait_for_gpu(ordinal)
        for plan in evicted:
            # Another thread may be about to run it: its last reference destroys it.
            _Retired.add(plan)

    def clear(self) -> None:
        """Forgets all plans."""
        with self._lock:
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


def _wait_for_gpu(ordinal: int) -> None:
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


def create(problem: lib.Problem, device: int, ordinal: int, config: "Optional[str]" = None) -> int:
    """A plan of the library for a problem."""
    handle = c_void_p()
    name = config.encode() if config else None
    lib.check(
        lib.LIBRARY.flashcore_plan_create_with_config(byref(problem), device, ordinal, name, byref(handle))
    )
    return handle.value or 0


ATTENTION = (_run_host, _launch, lib.LIBRARY.flashcore_plan_destroy)
APPEND = (
    lib.LIBRARY.flashcore_append_run_host,
    lib.LIBRARY.flashcore_append_launch,
    lib.LIBRARY.flashcore_append_destroy,
)
MERGE = (
    lib.LIBRARY.flashcore_merge_run_host,
    lib.LIBRARY.flashcore_merge_launch,
    lib.LIBRARY.flashcore_merge_destroy,
)
