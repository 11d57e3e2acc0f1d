"""One connection to a job's store, in a thread of its own: a store that never answers cannot hang who asks.

A call of torch's store client blocks in C++, without a limit that it keeps where the server is stopped or cut off, and
holds the client's lock meanwhile. So every call is made by this thread, and the caller waits as long as it cares to.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from lockstep.errors import LockstepError

T = TypeVar("T")
_Calls = queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]

_END_LIMIT_S = 1.0


class StoreBrokenError(Exception):
    """The connection to the store has ended, or could not be made: its server is gone, or something between."""


class StoreSilentError(Exception):
    """The store did not answer within the time given."""


class Line:
    """A store client and the one thread that uses it.

    Args:
        connect: makes the client; called in the thread, before the first call.
        name: the thread's name.
    """

    def __init__(self, connect: Callable[[], Store], name: str = "lockstep-store") -> None:
        self._calls: _Calls = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the interpreter from ending.
        self._thread = threading.Thread(target=_work, args=(connect, self._calls), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[Store], T]) -> Future[T]:
        """Has ``call`` made after those before it; ``StoreBrokenError`` in its future means a lost connection."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def call(self, call: Callable[[Store], T], limit_s: float) -> T:
        """Has ``call`` made and waits for what it returns.

        Raises:
            StoreBrokenError: the connection has ended.
            StoreSilentError: no answer within ``limit_s`` seconds; it may come yet, and what was asked be done.
        """
        try:
            return self.submit(call).result(max(0.0, limit_s))
        except TimeoutError:
            raise StoreSilentError(f"no answer within {limit_s:.3g} s") from None

    def close(self) -> None:
        """Ends the thread. One that hangs in a call is left alone, and ends with the interpreter. Idempotent."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_END_LIMIT_S)


def _work(connect: Callable[[], Store], calls: _Calls) -> None:
    store: Store | None = None
    while True:
        item = calls.get()
        if item is None:
            return
        call, future = item
        try:
            if store is None:
                store = connect()
            future.set_result(call(store))
        except (LockstepError, StoreBrokenError) as error:
            future.set_exception(error)
        except RuntimeError as error:  # torch's DistError, and what its C++ raises beside
            future.set_exception(StoreBrokenError(str(error).partition("\n")[0]))
        del item, call, future
