"""The persistent threads of a strategy's replicas, one each, never started per step.

``with torch.no_grad(): strategy.run(step)`` must work although the step runs in other threads. So ``CallerState``
carries the grad mode, inference mode, autocast and default device into them, and the runner context variables. Modes of
the caller are refused. torch's profiler sees them if it is told to profile all threads.
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

from lockstep import _torch_compat as compat
from lockstep.collectives.replica_barrier import ReplicaStopped
from lockstep.errors import ReplicaError, UsageError
from lockstep.replicas.device.host_syncs import BesideCompiledCode, recording_host_syncs

_SET_NAME = 15  # PR_SET_NAME in <linux/prctl.h>


@dataclass(frozen=True)
class CallerState:
    """A snapshot of the calling thread's state, but for its context variables."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    device: torch.device | None
    profiled: bool

    @classmethod
    def capture(cls) -> CallerState:
        """The state now. Raises a UsageError under a mode of the caller, which is not made for threads."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        modes: list[Any] = compat.function_modes() if compat.num_function_modes() else []
        devices = [each for each in modes if isinstance(each, compat.DeviceContext)]
        operators: list[Any] = compat.dispatch_modes() if compat.num_dispatch_modes() else []
        foreign = [type(each).__name__ for each in (*modes, *operators) if each not in devices and _is_foreign(each)]
        if compat.saved_tensors_hooks(False) is not None:
            foreign.append("saved_tensors_hooks")
        if foreign:
            raise UsageError(
                f"{' and '.join(foreign)} around strategy.run cannot see the replicas, which run in threads of their "
                "own; enter it inside the function that strategy.run runs"
            )
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
            device=devices[0].device if devices else None,
            profiled=compat.is_profiled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block with the grad mode, inference mode and autocast."""
        if self.profiled and not compat.is_profiled():
            warnings.warn(
                "torch.profiler sees nothing of the replicas, which are other threads; profile with "
                "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)",
                stacklevel=2,
            )
        with ExitStack() as stack:
            stack.enter_context(_no_shared_casts())
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            # torch has one backward thread per GPU, where replicas would wait for each other in a collective's pass.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(recording_host_syncs())
            yield

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


def _is_foreign(mode: object) -> bool:
    """Whether a mode is not of this package, whose modes know of replicas."""
    return not (type(mode).__module__.startswith("lockstep.") or isinstance(mode, BesideCompiledCode))


@contextmanager
def _no_shared_casts() -> Iterator[None]:
    """A block in which autocast caches no casts, unless it is asked to.

    torch has one cache for all threads, and any thread that leaves autocast clears it, so timing would decide whether a
    tensor is cast twice: four replicas with reentrant checkpointing gave other numbers in every run.
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


class ReplicaThreads:
    """Threads that wait for jobs. They end with ``close``, with this object, or with the interpreter.

    Args:
        cores: each thread's number of intra-op threads.
        first: the number of the first replica among those of all workers, for the threads' names in a profile.
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
                thread.start()
                self._threads.append(thread)
                if not ready.wait(START_LIMIT_S):
                    raise ReplicaError(f"the thread of replica {replica} did not start within {START_LIMIT_S:g} s")
        finally:
            torch.set_num_threads(process_wide)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def has_current(self) -> bool:
        return threading.current_thread() in self._threads

    def check_process(self) -> None:
        """Raises a UsageError if another process made the threads, which a fork does not copy."""
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
    """Raises an interrupt in this thread, so that CPython 3.11 and 3.12 no longer expect the one that was cancelled.

    In 3.11 a thread that is profiled or traced would hang at its next function call.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_Settled))
        for _ in range(_SETTLES_WITHIN):
            pass
    except _Settled:
        pass


class _Settled(BaseException): ...


def _work(inbox: queue.SimpleQueue[Job | None], cores: int, ready: threading.Event, number: int) -> None:
    if sys.platform.startswith("linux"):  # names the thread's track in a profile
        ctypes.CDLL(None).prctl(_SET_NAME, f"replica {number}".encode("ascii"), 0, 0, 0)
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
