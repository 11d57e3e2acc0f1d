"""The persistent threads of a strategy's replicas, one each, never started per step.

Each thread keeps its share of the cores: torch has a number of intra-op threads per thread, but sets it anew from the
process's value at a thread's first parallel operation, so that operation is made to happen first.

``with torch.no_grad(): strategy.run(step)`` must work although the step runs in other threads. So ``CallerState``
carries the grad mode, inference mode, autocast, modes and hooks into them, ``Profile`` the profiler, and the runner
context variables.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lockstep import _torch_compat as compat
from lockstep.collectives.replica_barrier import ReplicaStopped
from lockstep.errors import ConfigError, ReplicaError, UsageError

_SET_NAME = 15  # PR_SET_NAME in <linux/prctl.h>


class Profile:
    """The profiler state of the thread that made this, for one other thread that works for it while it waits."""

    def __init__(self, library: dict[str, Any]) -> None:
        self._library = library
        self._callbacks = library["callbacks"]()
        self._held = compat.SharedPtr()
        library["current"](ctypes.byref(self._held))

    @classmethod
    def of_caller(cls) -> Profile | None:
        """The calling thread's; None where it is not profiled, or, with a warning, where torch cannot hand it on."""
        if not compat.is_profiled():
            return None
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
    def shown(self) -> Iterator[None]:
        """In the other thread: a block that the profile records, on that thread's own track."""
        if compat.is_profiled():  # by a profiler of the replica's own, or one of all threads
            yield
            return
        before = compat.SharedPtr()
        self._library["current"](ctypes.byref(before))
        self._library["set_current"](ctypes.byref(self._held))
        self._library["set_callbacks"](self._callbacks)
        try:
            yield
        finally:
            self._library["set_callbacks"](ctypes.byref(compat.NoCallbacks(enabled=True)))
            self._library["set_current"](ctypes.byref(before))


def name_track(name: str) -> None:
    """Names the calling thread for profilers and debuggers; Linux keeps the first 15 letters."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode("ascii"), 0, 0, 0)


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
        """The state now, without function modes of this package, which handle their replicas themselves."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        functions: list[Any] = compat.function_modes() if compat.num_function_modes() else []
        operators: list[Any] = compat.dispatch_modes() if compat.num_dispatch_modes() else []
        devices = [each for each in functions if isinstance(each, compat.DeviceContext)]
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
            functions=tuple(each for each in functions if each not in devices and _is_theirs(each)),
            operators=tuple(operators),
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


def _is_theirs(mode: TorchFunctionMode) -> bool:
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


START_LIMIT_S = 60.0
_SETTLES_WITHIN = 1_000
END_LIMIT_S = 10.0

Job = Callable[[], None]


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """A block in which torch computes on so many intra-op threads in this thread, which replicas do not run in."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ReplicaThreads:
    """Threads that wait for jobs. They end with ``close``, with this object, or with the interpreter.

    ``cores`` has each thread's number of intra-op threads. ``first`` is the number of the first replica among those of
    all workers, for the threads' names in a profile.
    """

    def __init__(self, cores: Sequence[int], *, first: int = 0) -> None:
        self._process = os.getpid()
        self._inboxes: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in cores]
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _end, self._inboxes, self._threads)
        process_wide = torch.get_num_threads()
        try:
            for replica, (inbox, share) in enumerate(zip(self._inboxes, cores, strict=True)):
                ready = threading.Event()
                # Daemons, so that a program can end without closing its strategy; the finalizer joins them then.
                thread = threading.Thread(target=_work, args=(inbox, share, ready, first + replica), daemon=True)
                thread.name = f"lockstep-replica-{replica}"
                try:
                    thread.start()
                except RuntimeError as error:
                    self._finalizer()
                    raise ConfigError(
                        f"{len(cores)} replicas of one process need a thread each, and the system started {replica} "
                        f"({error}); give fewer replicas, or more workers"
                    ) from None
                self._threads.append(thread)
                if not ready.wait(START_LIMIT_S):
                    raise ReplicaError(f"the thread of replica {replica} did not start within {START_LIMIT_S:g} s")
        finally:
            torch.set_num_threads(process_wide)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def ids(self) -> tuple[int | None, ...]:
        """The number that the system gave each thread, by which a profiler knows it."""
        return tuple(thread.native_id for thread in self._threads)

    @property
    def has_current(self) -> bool:
        return threading.current_thread() in self._threads

    def check_process(self) -> None:
        """Raises a UsageError if another process made the threads: a fork copies none, and a job would wait forever."""
        if os.getpid() != self._process:
            raise UsageError(
                f"process {os.getpid()} was forked from process {self._process}, which made this strategy and has its "
                "replica threads; make a strategy in this process, or start it with the method 'spawn'"
            )

    def submit(self, replica: int, job: Job) -> None:
        """Hands the replica's thread a job; jobs run one after another. A job must not raise."""
        self._inboxes[replica].put(job)

    def interrupt(self, replica: int, exception: type[BaseException]) -> None:
        """Raises ``exception`` in the replica's thread at its next line of Python code."""
        self._set_pending(replica, ctypes.py_object(exception))

    def forget_interrupt(self, replica: int) -> None:
        """Cancels an interrupt that has not been raised yet, or it would be raised in the middle of the next job."""
        self._set_pending(replica, ctypes.py_object())
        _settle_interrupts()

    def _set_pending(self, replica: int, exception: ctypes.py_object[type[BaseException]]) -> None:
        ident = self._threads[replica].ident
        if ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), exception)

    def close(self) -> None:
        """Ends the threads and waits for them, at most ``END_LIMIT_S`` seconds each. Idempotent."""
        self._finalizer()


def _settle_interrupts() -> None:
    """Raises an interrupt in this thread, so that the interpreter no longer expects the one that was cancelled.

    CPython 3.11 and 3.12 go on expecting it, in all threads, until another has been raised. In 3.11 a thread that is
    profiled or traced then hangs at its next function call.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_Settled))
        for _ in range(_SETTLES_WITHIN):
            pass
    except _Settled:
        pass


class _Settled(BaseException): ...


def _work(inbox: queue.SimpleQueue[Job | None], cores: int, ready: threading.Event, number: int) -> None:
    name_track(f"replica {number}")
    torch.get_num_threads()  # the thread's first parallel operation, which would undo the next line if it came later
    torch.set_num_threads(cores)
    ready.set()
    while True:
        try:
            job = inbox.get()
            if job is None:
                return
            job()
        except ReplicaStopped:  # an interrupt that came when its job had just ended
            continue
        finally:
            job = None  # a job holds the step's arguments; they must not live until the next one


def _end(inboxes: Sequence[queue.SimpleQueue[Job | None]], threads: Sequence[threading.Thread]) -> None:
    for inbox in inboxes:
        inbox.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(END_LIMIT_S)
