"""The caller's thread-local state, carried into the replica threads.

``with torch.no_grad(): strategy.run(step)`` must work although the step runs in other threads. Carried are the grad
mode, inference mode, autocast, context variables, function and dispatch modes, saved-tensor hooks, and the profiler.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lockstep import _torch_compat as compat
from lockstep.replicas.device.host_syncs import recording_host_syncs

_SYMBOLS = {
    "current": ("libc10.so", "_ZN3c1020ThreadLocalDebugInfo7currentEv"),
    "set_current": ("libc10.so", "_ZN3c1020ThreadLocalDebugInfo22_forceCurrentDebugInfoESt10shared_ptrIS0_E"),
    "callbacks": ("libtorch_cpu.so", "_ZN2at24get_record_function_tls_Ev"),
    "set_callbacks": ("libtorch_cpu.so", "_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE"),
}
_SET_NAME = 15  # PR_SET_NAME in <linux/prctl.h>


class _SharedPtr(ctypes.Structure):
    """A ``std::shared_ptr``; torch's functions take it over, and leave an empty one."""

    _fields_ = (("pointer", ctypes.c_void_p), ("counts", ctypes.c_void_p))


class _NoCallbacks(ctypes.Structure):
    """A new thread's ``at::RecordFunctionTLS``: an empty ``std::vector``, and recording allowed."""

    _fields_ = (("vector", ctypes.c_void_p * 3), ("enabled", ctypes.c_bool))


class Profile:
    """The profiler state of the thread that made this, for one other thread that works for it while it waits."""

    def __init__(self, library: dict[str, Any]) -> None:
        self._library = library
        self._callbacks = library["callbacks"]()
        self._held = _SharedPtr()
        library["current"](ctypes.byref(self._held))

    @classmethod
    def of_caller(cls) -> Profile | None:
        """The calling thread's; None where it is not profiled, or, with a warning, where torch cannot hand it on."""
        if not compat.is_profiled():
            return None
        library = _library()
        if library is None:
            warnings.warn(
                f"torch.profiler sees nothing of the replicas with torch {torch.__version__}; profile with "
                "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)",
                stacklevel=2,
            )
            return None
        return cls(library)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """In the other thread: a block that the profile records, on that thread's own track."""
        if compat.is_profiled():  # by a profiler of the replica's own, or one of all threads
            yield
            return
        before = _SharedPtr()
        self._library["current"](ctypes.byref(before))
        self._library["set_current"](ctypes.byref(self._held))
        self._library["set_callbacks"](self._callbacks)
        try:
            yield
        finally:
            self._library["set_callbacks"](ctypes.byref(_NoCallbacks(enabled=True)))
            self._library["set_current"](ctypes.byref(before))


def name_track(name: str) -> None:
    """Names the calling thread for profilers and debuggers; Linux keeps the first 15 letters."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode("ascii"), 0, 0, 0)


@functools.cache
def _library() -> dict[str, Any] | None:
    """Torch's functions for the profiler state of the calling thread; None in a torch without them."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        found = {name: getattr(ctypes.CDLL(str(folder / file)), symbol) for name, (file, symbol) in _SYMBOLS.items()}
    except (OSError, AttributeError):
        return None
    pointer = ctypes.POINTER(_SharedPtr)
    found["current"].argtypes, found["current"].restype = [pointer], None
    found["set_current"].argtypes, found["set_current"].restype = [pointer], None
    found["callbacks"].argtypes, found["callbacks"].restype = [], ctypes.c_void_p
    found["set_callbacks"].argtypes, found["set_callbacks"].restype = [ctypes.c_void_p], None
    return found


@dataclass(frozen=True)
class CallerState:
    """A snapshot of the calling thread's state, but for its context variables and profile.

    The modes, the outermost first, and the hooks are the caller's own objects, and not made for threads: replicas that
    have them run one at a time, each until it meets the others or has ended (``one_at_a_time``).
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    functions: tuple[TorchFunctionMode, ...]
    operators: tuple[compat.TorchDispatchMode, ...]
    saved: tuple[Callable[..., Any], Callable[..., Any]] | None
    no_saved: str | None
    device: torch.device | None

    @classmethod
    def capture(cls) -> CallerState:
        """The state now, without modes of this package, which handle their replicas themselves."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        functions: list[Any] = compat.function_modes() if compat.num_function_modes() else []
        operators: list[Any] = compat.dispatch_modes() if compat.num_dispatch_modes() else []
        devices = [each for each in functions if isinstance(each, compat.DeviceContext)]
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
            functions=tuple(each for each in functions if each not in devices and _is_theirs(each)),
            operators=tuple(filter(_is_theirs, operators)),
            saved=compat.saved_tensors_hooks(False),
            no_saved=compat.saved_tensors_hooks_disabled(),
            device=devices[0].device if devices else None,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block with the grad mode, inference mode and autocast."""
        with ExitStack() as stack:
            stack.enter_context(_no_shared_casts())
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            # torch runs backward passes for a GPU in one thread per device, where replicas that share the device would
            # wait for each other in a collective's backward pass. So they run in the calling thread.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(recording_host_syncs())
            yield

    @property
    def one_at_a_time(self) -> bool:
        """Whether torch calls code of the caller in the replicas, so that no two of them may run at once."""
        return bool(self.functions or self.operators or self.saved)

    @contextmanager
    def default_device(self, own: torch.device) -> Iterator[None]:
        """A block with the default device: the replica's ``own``, if it has that type. It goes below all modes."""
        if self.device is None:
            yield
            return
        compat.push_function_mode(compat.DeviceContext(own if own.type == self.device.type else self.device))
        try:
            yield
        finally:
            compat.pop_function_mode()

    @contextmanager
    def modes_applied(self) -> Iterator[None]:
        """A block with the modes and hooks, above the modes that the calling thread has."""
        with ExitStack() as stack:
            if self.no_saved is not None:
                stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(self.no_saved))
            elif self.saved is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved))
            # Pushed and not entered: entering may do more, and the caller has done it.
            for function_mode in self.functions:
                compat.push_function_mode(function_mode)
                stack.callback(compat.pop_function_mode)
            for mode in self.operators:
                compat.push_dispatch_mode(mode)
                stack.callback(compat.pop_dispatch_mode, compat.dispatch_mode_key(mode))
            yield


def _is_theirs(mode: object) -> bool:
    return not type(mode).__module__.startswith("lockstep.")


@contextmanager
def _no_shared_casts() -> Iterator[None]:
    """A block in which autocast caches no casts, unless it is asked to.

    torch has one cache for all threads, and any thread that leaves autocast clears it. So the other replicas' timing
    would decide whether a tensor that is used twice is cast twice, and its gradients added up in float32 or in
    bfloat16: four replicas with reentrant checkpointing gave other numbers in every run.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
