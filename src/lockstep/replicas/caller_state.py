"""The state of the thread that calls ``strategy.run``, set again in the threads of its replicas.

``with torch.no_grad(): strategy.run(step)`` must work although the step runs in other threads, and torch keeps such
state per thread. ``CallerState`` carries the grad mode, inference mode, autocast, modes and hooks into them,
``Profile`` the profiler. The runner itself copies the context variables.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lockstep import _torch_compat as compat


@dataclass(frozen=True)
class CallerState:
    """A snapshot of the calling thread's state, but for its context variables and profile.

    The modes, the outermost first, and the hooks are the caller's own objects, and not made for threads: replicas that
    have them run one at a time, each until it meets the others or has ended (``one_at_a_time``).
    """

    grad: bool
    inference: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    functions: tuple[TorchFunctionMode, ...] = ()
    operators: tuple[compat.TorchDispatchMode, ...] = ()
    saved: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    no_saved: str | None = None
    device: torch.device | None = None

    @classmethod
    def capture(cls) -> CallerState:
        """The state now, without function modes of this package, which handle their replicas themselves."""
        functions: list[Any] = compat.function_modes() if compat.num_function_modes() else []
        operators: list[Any] = compat.dispatch_modes() if compat.num_dispatch_modes() else []
        saved, no_saved = compat.saved_tensors_hooks(False), compat.saved_tensors_hooks_disabled()
        has_casts = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        inference = torch.is_inference_mode_enabled()
        if not (functions or operators or saved or no_saved is not None or has_casts or inference):
            return _ordinary(torch.is_grad_enabled())  # nearly every run: no state is made or applied
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        # torch.device and set_default_device are a function mode too; each replica gets one for its own device.
        devices = [mode for mode in functions if isinstance(mode, compat.DeviceContext)]
        return cls(
            grad=torch.is_grad_enabled(),
            inference=inference,
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
            functions=tuple(mode for mode in functions if mode not in devices and not _is_lockstep_mode(mode)),
            operators=tuple(operators),
            saved=saved,
            no_saved=no_saved,
            device=devices[0].device if devices else None,
        )

    @property
    def is_ordinary(self) -> bool:
        """Whether the grad mode is all that ``capture`` has seen: then ``set_switches`` applies the state."""
        return self is _ordinary(self.grad)

    def set_switches(self) -> None:
        """Sets the grad mode, and what holds in every replica. Not undone: the next run of the thread sets it anew."""
        torch.set_grad_enabled(self.grad)
        # torch runs backward passes for a GPU in one thread per device, where replicas that share the device would wait
        # for each other in a collective's backward pass. So they run in the calling thread.
        torch.autograd.set_multithreading_enabled(False)
        # No autocast caches casts, unless it is asked to. torch has one cache for all threads, and any thread that
        # leaves autocast clears it. So the other replicas' timing would decide whether a tensor that is used twice is
        # cast twice, and its gradients added up in float32 or in bfloat16: four replicas with reentrant checkpointing
        # gave other numbers in every run.
        torch.set_autocast_cache_enabled(False)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block with the inference mode and autocast, after ``set_switches``."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            # Last: inference mode turns gradients off, and enable_grad inside no_grad must hold in the replicas.
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield

    @property
    def one_at_a_time(self) -> bool:
        """Whether torch calls code of the caller in the replicas, so that no two of them may run at once."""
        return bool(self.functions or self.operators or self.saved)

    @contextmanager
    def default_device(self, local: torch.device) -> Iterator[None]:
        """A block with the default device, below all modes: the replica's ``local`` device, if it has the same type."""
        if self.device is None:
            yield
            return
        compat.push_function_mode(compat.DeviceContext(local if local.type == self.device.type else self.device))
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


@cache
def _ordinary(grad: bool) -> CallerState:
    return CallerState(grad=grad)


def _is_lockstep_mode(mode: TorchFunctionMode) -> bool:
    return type(mode).__module__.startswith("lockstep.")


class Profile:
    """The profiler state of the thread that made this, for one other thread that works for it while it waits."""

    def __init__(self, library: dict[str, Any]) -> None:
        self._library = library
        # Two parts: torch keeps the profiler's state and the callbacks of record_function apart, both per thread.
        self._callbacks = library["callbacks"]()
        self._pointer = compat.SharedPtr()
        library["current"](ctypes.byref(self._pointer))

    @classmethod
    def of_caller(cls) -> Profile | None:
        """That of the calling thread, which is profiled; None, with a warning, where torch cannot hand it on."""
        library = compat.profiler_functions()
        if library is None:
            warnings.warn(
                f"torch.profiler sees nothing of the replicas with torch {torch.__version__}; profile with "
                "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)",
                stacklevel=2,
            )
            return None
        return cls(library)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """In the other thread: a block that the profile records, on that thread's own track."""
        if compat.is_profiled():  # by a profiler of the replica's own, or one of all threads
            yield
            return
        before = compat.SharedPtr()
        self._library["current"](ctypes.byref(before))
        self._library["set_current"](ctypes.byref(self._pointer))
        self._library["set_callbacks"](self._callbacks)
        try:
            yield
        finally:
            self._library["set_callbacks"](ctypes.byref(compat.NoCallbacks(enabled=True)))
            self._library["set_current"](ctypes.byref(before))
