"""Plans: a problem on a device, ready to be run, and the cache of them.

A call finds its plan by one lookup of a tuple in a dict. The structs of a call are kept with the plan and used again:
a call writes the addresses into them and nothing else.
"""

from __future__ import annotations

import os
import threading
from ctypes import addressof, byref, c_uint64, c_void_p, cast
from struct import Struct
from typing import Any, Callable, Dict, Hashable, NamedTuple, Optional, Sequence, Tuple

from . import _library as lib

class Functions(NamedTuple):
    """Functions of the library for one kind of plan."""

    run_host: Any
    launch: Any
    destroy: Any
    workspace_bytes: Any = None


def _functions(kind: str, has_workspace: bool) -> Functions:
    names = ["run_host", "launch_tensors" if kind == "plan" else "launch", "destroy"]
    if has_workspace:
        names.append("workspace_bytes")
    return Functions(*(getattr(lib.LIBRARY, f"flashcore_{kind}_{name}") for name in names))


ATTENTION, CONTINUE, KVCACHE = (_functions(kind, True) for kind in ("plan", "continue", "kvcache"))
APPEND, MERGE = _functions("append", False), _functions("merge", False)


class Plan:
    """A plan of the library with the words of its structs, for tensors in the host's memory or on the GPU.

    `operands` are the names of the addresses that `run` takes, in order.
    """

    __slots__ = (
        "handle", "device", "ordinal", "operands", "workspace_bytes", "is_used", "is_captured", "problem",
        "_call", "_destroy", "_words", "_template", "_structs", "_places", "_free", "_is_host", "_pack",
        "out_shape",
    )  # fmt: skip

    def __init__(
        self,
        handle: int,
        place: "Tuple[int, int]",
        functions: Functions,
        structs: "Tuple[lib.Words, Tuple[int, ...]]",
        operands: "Sequence[Tuple[str, Optional[int]]]",
        constants: "Dict[str, int]",
        problem: Any = None,
        is_host: bool = True,
    ) -> None:
        """`structs` are those of `lib.joined`, `operands` (name, bytes): host structs have the bytes after an address."""
        self.handle, (self.device, self.ordinal) = handle, place
        self._destroy = functions.destroy
        self._call = functions.run_host if is_host else functions.launch
        self._is_host = is_host
        words, sizes = structs
        entries = list(operands)
        self.workspace_bytes = 0
        if functions.workspace_bytes is not None and not is_host:
            self.workspace_bytes = functions.workspace_bytes(handle)
            if self.workspace_bytes:
                entries.append(("workspace", self.workspace_bytes))
        self.operands = tuple(name for name, _ in entries)
        self._places = tuple(words[name] for name in self.operands)
        self.is_used, self.is_captured = False, False
        self.problem = problem
        self.out_shape: Any = None
        # Addresses side by side, as in a launch without further operands, are written by one call.
        is_dense = self._places == tuple(range(1, len(entries) + 1))
        self._pack = Struct(f"={len(entries)}Q").pack_into if is_dense else None
        template = [0] * sum(sizes)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        for start, size in zip(starts, sizes):
            template[start] = 8 * size
        for name, value in constants.items():
            template[words[name]] = value
        if is_host:
            for name, size_of in entries:
                if size_of is not None:
                    template[words[name] + 1] = size_of
        self._structs = tuple(starts)
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
            first = addressof(words)
            entry = (words, tuple(first + 8 * start for start in self._structs))
        words, structs = entry
        if self._pack is not None:
            self._pack(words, 8, *addresses)
        else:
            for place, address in zip(self._places, addresses):
                words[place] = address
        if self._is_host:
            status = self._call(self.handle, *structs)
        else:
            status = self._call(self.handle, stream, *structs)
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
            cast(self._call, c_void_p).value, self.handle, self._structs if self._is_host else (-1, *self._structs),
            bytes(self._words(*self._template)), tuple(places), tuple(outputs), returns_tuple, self,
        )  # fmt: skip

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


def create(problem: lib.Problem, device: int, ordinal: int, config: "Optional[str]" = None) -> int:
    """A plan of the library for a problem."""
    handle = c_void_p()
    name = config.encode() if config else None
    lib.check(
        lib.LIBRARY.flashcore_plan_create_with_config(byref(problem), device, ordinal, name, byref(handle))
    )
    return handle.value or 0


def create_continuation(problem: lib.Problem, place: "Tuple[int, int]") -> int:
    """A plan of the library that continues from an output and an LSE."""
    handle = c_void_p()
    lib.check(lib.LIBRARY.flashcore_continue_create(byref(problem), *place, byref(handle)))
    return handle.value or 0
