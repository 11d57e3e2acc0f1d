"""A launcher's connection to the store of an elastic job, which ends and comes back with the network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from lockstep._torch_compat import Store
from lockstep.membership.store import StoreBrokenError, StoreClient, StoreSilentError, read_all

T = TypeVar("T")

CALL_TIMEOUT_S = 5.0
_HANGING_TIMEOUT_S = 3.0


class StoreLostError(RuntimeError):
    """The store cannot be reached now."""


class StoreLink:
    """A connection to a store. No call takes longer than a few seconds, and a broken connection is renewed."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect, self._lock = connect, threading.Lock()
        self._client: StoreClient | None = None
        self._hanging: list[StoreClient] = []

    def read(self, key: str) -> str:
        """The value of a key; empty if it is not there."""
        return self.set_first(key, "")

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """The values of several keys, all of which must be there, by one request."""
        return self.call(lambda store: read_all(store, keys))

    def set_first(self, key: str, value: str) -> str:
        """Sets a key that has no value yet; the value that it has then."""
        return self.call(lambda store: bytes(store.compare_set(key, "", value)).decode())

    def set(self, key: str, value: str) -> None:
        self.call(lambda store: store.set(key, value))

    def call(self, call: Callable[[Store], T]) -> T:
        """Makes a call. Raises StoreLostError if the connection is broken or the store is silent."""
        with self._lock:
            client = self._client = self._client or StoreClient(self._connect)
        try:
            return client.call(call, CALL_TIMEOUT_S)
        except (StoreBrokenError, StoreSilentError) as error:
            with self._lock:
                if self._client is client:
                    self._client = None
            if not client.close():
                self._hanging.append(client)
            raise StoreLostError(str(error)) from None

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()
        # A call that was made while the network was cut returns when the store ends. Where the interpreter ends at that
        # moment, torch's C++ aborts the process ("terminate called without an active exception", exit code -6; seen
        # twice on a busy machine in test_an_elastic_job_goes_on_without_a_host_that_is_cut_off_and_takes_it_in_again).
        for hanging in self._hanging:
            hanging.close(_HANGING_TIMEOUT_S)
        self._hanging.clear()
