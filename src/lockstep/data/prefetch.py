"""Reads ahead: a thread takes items from a source before the consumer asks for them.

    source -- next() --> [ at most `depth` items ] -- next() --> consumer
              thread                                             its caller

The thread ends with its iterator: when the iterator is exhausted, closed or garbage-collected, and when either side
fails. The consumer reads the first item itself, so that what a source draws to begin with (a DataLoader's sampler draws
its seed then) is drawn in program order. A source that draws from torch's default generator later is refused: what the
loop draws would come in between.
"""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch

from lockstep.checks import check_number
from lockstep.errors import DataError, UsageError
from lockstep.replicas.barrier import SIGNALS_SEEN_EVERY_S
from lockstep.replicas.rng.function_mode import ReplicaRng

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# How long an iterator that is dropped waits for a source in the middle of an item. The thread ends after that item
# anyway; waiting keeps it from running beside the source's next user.
_END_LIMIT_S = 5.0

DEFAULT_DEPTH = 2
"""The number of batches read ahead by default, of data that may be read ahead."""


class ClosableIterator(Protocol[T_co]):
    """An iterator that ``close()`` ends early."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __next__(self) -> T_co: ...

    def close(self) -> None: ...


def checked_depth(depth: Any) -> int:
    """Returns ``depth``, or raises a ConfigError if it is not a number of batches."""
    check_number("prefetch", depth, least=0, whole=True, optional=False)
    return int(depth)


class ReadAhead(Generic[T]):
    """The items of ``source`` in order, at most ``depth`` of them read before they are asked for; 0: none.

    The source is read by one thread at a time. Its errors are raised to the consumer, with their traceback.
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self._source: Iterator[T] | None = source  # None once the thread reads it, and at the end
        self._depth = depth
        self._queue: _Queue[T] = _Queue(depth)
        self._end: Callable[[], object] = self._queue.close

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            if self._source is None:
                return self._queue.take()
            source, item = self._source, next(self._source)
            if self._depth:
                self._start_thread(source)
            return item
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the thread. No items come after it."""
        self._source = None
        self._end()

    def _start_thread(self, source: Iterator[T]) -> None:
        self._source = None
        # Neither the thread nor the finalizer may hold this object, or it would never be dropped.
        context = contextvars.copy_context()
        arguments = (_fill, source, self._queue)
        # The thread runs in a copy of the consumer's context (test_the_thread_sees_the_consumers_context). It is a
        # daemon, as an iterator that is left at the end of the program must not hold it up
        # (test_an_iterator_left_at_the_end_of_the_program_does_not_hold_it_up).
        thread = threading.Thread(target=context.run, args=arguments, name="lockstep-prefetch", daemon=True)
        self._end = weakref.finalize(self, _end_thread, self._queue, thread)
        thread.start()


class _Queue(Generic[T]):
    """Between the reading thread and the consumer. Its lock is reentrant: a finalizer may close it inside any call."""

    def __init__(self, depth: int) -> None:
        self._depth, self._process = depth, os.getpid()
        self._items: deque[T] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())

    def add(self, item: T) -> None:
        """Adds an item, then waits until there is space for another one or the queue is closed."""
        with self._changed:
            if not self._ended:
                self._items.append(item)
                self._changed.notify_all()
                # The wait comes after adding: the source is asked for an item only when there is a place for it.
                self._changed.wait_for(lambda: self._ended or len(self._items) < self._depth)

    @property
    def is_open(self) -> bool:
        return not self._ended

    def finish(self, error: BaseException | None) -> None:
        """Adds no more items. Those added are still handed out; then ``error`` is raised."""
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def take(self) -> T:
        """Waits for the reading thread, which always finishes. Raises UsageError in a process forked since then."""
        # A fork copies this queue and not the thread that fills it: a wait here would not end.
        if os.getpid() != self._process:
            raise UsageError(
                f"process {os.getpid()} was forked from process {self._process}, which reads this iteration's batches; "
                "begin an iteration in this process"
            )
        with self._changed:
            while not self._items and not self._ended:
                # With a limit, as Python can miss a Ctrl-C that comes just before a wait begins.
                self._changed.wait(SIGNALS_SEEN_EVERY_S)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        raise StopIteration if error is None else error

    def close(self) -> None:
        """Is called by the consumer, which wants nothing more."""
        with self._changed:
            self._ended = True
            self._items.clear()
            self._changed.notify_all()


def _fill(source: Iterator[T], queue: _Queue[T]) -> None:
    error: BaseException | None = None
    generator = torch.Generator()
    untouched = generator.get_state().numpy().tobytes()
    try:
        with ReplicaRng(generator):  # whatever the source draws from torch's default generator, it draws from this one
            for item in source:
                # Between which draws of the loop the source's would come depends on how the two threads run, so a rerun
                # would have other numbers (test_a_source_that_draws_is_refused_and_takes_no_numbers_from_the_loop).
                if generator.get_state().numpy().tobytes() != untouched:
                    raise DataError(
                        "data that is read ahead draws from torch's default generator, which is the loop's; distribute "
                        "it with prefetch=0, load it in processes (num_workers), or give it a torch.Generator"
                    )
                queue.add(item)
                del item  # while the next one is made, this one is the consumer's alone
                if not queue.is_open:
                    return
    except BaseException as raised:  # noqa: BLE001 - not swallowed: the consumer raises it
        error = raised
    finally:
        queue.finish(error)


def _end_thread(queue: _Queue[T], thread: threading.Thread) -> None:
    queue.close()
    # The garbage collector may run this in any thread, including the reading one. Ctrl-C may come before the start.
    if thread is not threading.current_thread() and thread.is_alive():
        try:
            thread.join(_END_LIMIT_S)
        except BaseException:
            # Ctrl-C during the wait: this function runs once, and a thread that is inside torch when the interpreter
            # ends aborts the process.
            thread.join(_END_LIMIT_S)
            raise
