"""The persistent threads of a strategy's replicas, one each, never started per step.

Each thread keeps its share of the cores: torch has a number of intra-op threads per thread, but sets it anew from the
process's value at a thread's first parallel operation, so that operation is made to happen first.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lockstep.errors import ConfigError, ReplicaError, UsageError
from lockstep.replicas.barrier import ReplicaStopped

_SET_NAME = 15  # PR_SET_NAME in <linux/prctl.h>
START_LIMIT_S = 60.0
END_LIMIT_S = 10.0
_RAISED_WITHIN = 1_000  # turns of an empty loop; CPython raises a pending exception at the first jump back

Job = Callable[[], None]


def name_track(name: str) -> None:
    """Names the calling thread for profilers and debuggers; Linux keeps the first 15 letters."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode("ascii"), 0, 0, 0)


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


def run_in_merge_call() -> UsageError:
    """The error of a run that is begun within another one."""
    return UsageError(
        "a run of all replicas was asked for in a merge_call, which is part of a run that waits for it; do it in the "
        "replicas, before or after the merge_call"
    )


class ReplicaThreads:
    """Threads that wait for jobs. They end with ``close``, with this object, or with the interpreter.

    ``cores`` has each thread's number of intra-op threads. ``first`` is the number of the first replica among those of
    all workers, for the threads' names in a profile.
    """

    def __init__(self, cores: Sequence[int], *, first: int = 0) -> None:
        self._process = os.getpid()
        self._inboxes: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in cores]
        self._threads: list[threading.Thread] = []
        # Not __del__: the interpreter calls a finalizer at its end too, while the threads can still be joined.
        self._finalizer = weakref.finalize(self, _end, self._inboxes, self._threads)
        # torch.set_num_threads in a new thread also sets the value with which later threads begin.
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
    def ids(self) -> tuple[int | None, ...]:
        """The number that the system gave each thread, by which a profiler knows it."""
        return tuple(thread.native_id for thread in self._threads)

    def check_caller(self) -> None:
        """Raises a UsageError where the calling thread would wait for its jobs forever."""
        if os.getpid() != self._process:  # a fork copies no threads
            raise UsageError(
                f"process {os.getpid()} was forked from process {self._process}, which made this strategy and has its "
                "replica threads; make a strategy in this process, or start it with the method 'spawn'"
            )
        if not self._finalizer.alive:
            raise UsageError("the strategy has been closed and its threads have ended; make a new one")
        # It would wait for a thread that waits for it.
        if threading.current_thread() in self._threads:
            raise run_in_merge_call()

    def submit(self, replica: int, job: Job) -> None:
        """Hands the replica's thread a job; jobs run one after another. A job must not raise."""
        self._inboxes[replica].put(job)

    def interrupt(self, replica: int, exception: type[BaseException]) -> None:
        """Raises ``exception`` in the replica's thread at its next line of Python code."""
        self._set_pending(replica, ctypes.py_object(exception))

    def forget_interrupt(self, replica: int) -> None:
        """Cancels an interrupt that has not been raised yet, or it would be raised in the middle of the next job."""
        self._set_pending(replica, ctypes.py_object())
        _clear_interrupt_request()

    def _set_pending(self, replica: int, exception: ctypes.py_object[type[BaseException]]) -> None:
        # The only way to stop Python code in another thread: "while True: pass" asks for no event or flag.
        ident = self._threads[replica].ident
        if ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), exception)

    def close(self) -> None:
        """Ends the threads and waits for them, at most ``END_LIMIT_S`` seconds each. Idempotent."""
        self._finalizer()


def _clear_interrupt_request() -> None:
    """Raises an interrupt in this thread, so that the interpreter no longer expects the one that was cancelled.

    CPython 3.11 and 3.12 go on expecting it, in all threads, until another has been raised. In 3.11 a thread that is
    profiled or traced then hangs at its next function call.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_RequestCleared)
        )
        for _ in range(_RAISED_WITHIN):
            pass
    except _RequestCleared:
        pass


class _RequestCleared(BaseException): ...


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
