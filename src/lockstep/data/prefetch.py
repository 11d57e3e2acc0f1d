"""Reading ahead: a thread takes items from a source before they are asked for.

    source -- next() --> [ at most `depth` items ] -- next() --> consumer
              thread                                             its caller

The thread ends with its iterator: when that is exhausted, closed or garbage-collected, and when either side fails.
The first item is read by the consumer itself, so that what a source draws from torch's default generator to begin with
(a DataLoader's sampler draws its seed then) is drawn in program order; ``source_random`` is about what it draws later.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, Protocol, TypeVar

from lockstep.collectives.rendezvous import SIGNALS_SEEN_EVERY_S
from lockstep.data.source_random import SourceRandom
from lockstep.errors import ConfigError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# How long an iterator that is dropped waits for a source in the middle of an item. The thread ends with that item
# anyway; waiting keeps it from running beside the source's next user.
_END_LIMIT_S = 5.0

PASSED_OVER: Any = object()
"""Stands for an item that the source has given and nobody wants."""


class ClosableIterator(Protocol[T_co]):
    """An iterator that ``close()`` ends early."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __next__(self) -> T_co: ...

    def close(self) -> None: ...


def read_ahead(source: Iterator[T], depth: int, *, begun: Callable[[], object] | None = None) -> ClosableIterator[T]:
    """The items of ``source`` in order, at most ``depth`` of them read before they are asked for.

    Args:
        source: read by one thread at a time; its errors are raised to the consumer, with their traceback. Items that
            are ``PASSED_OVER`` are left out.
        depth: 0 reads nothing ahead and starts no thread.
        begun: called once in the consumer's thread, when the source draws no more from torch's default generator:
            after its first item, or at depth 0 after those passed over.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ConfigError(f"prefetch={depth!r} is no number of batches; give 0 to read none ahead, or 1 and more")
    begun = begun or _nothing
    return _PrefetchIterator(source, depth, begun) if depth else _in_turn(source, begun)


def _nothing() -> None:
    """For an iteration whose beginning nobody waits for."""


def _in_turn(source: Iterator[T], begun: Callable[[], object]) -> Generator[T, None, None]:
    wanted = (item for item in source if item is not PASSED_OVER)
    for item in wanted:
        begun()
        yield item
        break
    else:
        begun()
    yield from wanted


class _PrefetchIterator(Generic[T]):
    def __init__(self, source: Iterator[T], depth: int, begun: Callable[[], object]) -> None:
        self._source: Iterator[T] | None = source
        self._begun = begun
        self._queue: _Queue[T] = _Queue(depth)
        self._random: SourceRandom | None = None
        self._end: Callable[[], object] = self._queue.close

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return self._queue.take() if self._source is None else self._start(self._source)
        except StopIteration:
            self._exhausted()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the thread; no items come after it."""
        self._source = self._random = None
        self._end()

    def _exhausted(self) -> None:
        random = self._random
        self.close()
        if random is not None:
            random.give_back()

    def _start(self, source: Iterator[T]) -> T:
        try:
            first = next(source)
        except StopIteration:
            self._begun()
            raise
        self._source, self._random = None, SourceRandom()
        self._begun()
        # Neither the thread nor the finalizer may hold this object, or it would never be dropped.
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run,
            args=(_read, source, self._queue, self._random),
            name="lockstep-prefetch",
            daemon=True,
        )
        self._end = weakref.finalize(self, _end_thread, self._queue, thread)
        thread.start()
        return self._queue.take() if first is PASSED_OVER else first


class _Queue(Generic[T]):
    """Between the reading thread and the consumer. Its lock is reentrant: a finalizer may close it inside any call."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())

    def put(self, item: T) -> bool:
        """Adds an item, then waits for room for another; False if nobody wants one any more."""
        with self._changed:
            if self._ended:
                return False
            self._items.append(item)
            self._changed.notify_all()
            # Waiting for room after adding: the source is asked for an item only when there is a place for it.
            self._changed.wait_for(lambda: self._ended or len(self._items) < self._depth)
            return not self._ended

    @property
    def wanted(self) -> bool:
        """Whether somebody still wants items."""
        return not self._ended

    def finish(self, error: BaseException | None) -> None:
        """No more items come; those added are still handed out, then the error is raised."""
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def take(self) -> T:
        """The next item; the reading thread, which always finishes, ends the wait."""
        with self._changed:
            while not self._items and not self._ended:
                self._changed.wait(SIGNALS_SEEN_EVERY_S)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        raise StopIteration if error is None else error

    def close(self) -> None:
        """The consumer wants nothing more."""
        with self._changed:
            self._ended = True
            self._items.clear()
            self._changed.notify_all()


def _read(source: Iterator[T], queue: _Queue[T], random: SourceRandom) -> None:
    error: BaseException | None = None
    try:
        with random.mode():
            for item in source:
                wanted = queue.wanted if item is PASSED_OVER else queue.put(item)
                del item  # while the next one is made, this one is the consumer's alone
                if not wanted:
                    return
    except BaseException as raised:  # noqa: BLE001 - not swallowed: the consumer raises it
        error = raised
    finally:
        queue.finish(error)


def _end_thread(queue: _Queue[T], thread: threading.Thread) -> None:
    queue.close()
    # The garbage collector may run this in any thread, the reading one included; Ctrl-C may come before the start.
    if thread is not threading.current_thread() and thread.is_alive():
        try:
            thread.join(_END_LIMIT_S)
        except BaseException:
            # Ctrl-C in the wait: this runs once, and a thread in the middle of torch's work when the interpreter ends
            # aborts the process.
            thread.join(_END_LIMIT_S)
            raise
