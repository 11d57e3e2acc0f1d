"""How a worker comes into its job: it serves the store or looks for it, makes sure whose it is, answers the roll call.

Until the job is complete a store that goes away is looked for again: its chief may have been started anew.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.cluster.card import Card, terms_of, this_process
from lockstep.cluster.deadline import Deadline
from lockstep.cluster.line import Line, StoreBrokenError, StoreSilentError
from lockstep.cluster.roll_call import TURN_S, RollCall
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.store import (
    OWNER_KEY,
    REFUSED_KEY,
    PortTakenError,
    Route,
    bind_to,
    find_route,
    job_prefix,
    serve,
)
from lockstep.errors import ClusterError

_PORT_IS_FREED_S = 5.0
_LONGEST_NOTE = 300


@dataclass(frozen=True, kw_only=True)
class Entered:
    """A worker that is in its job.

    Args:
        cards: what every worker said of itself, in worker order.
        route: the way to the store.
        line: the connection to the job's part of it.
        server: the store itself, on the chief that serves it; it lives as long as this object is held.
    """

    cards: tuple[Card, ...]
    route: Route
    line: Line
    server: Store | None


def enter(spec: ClusterSpec, *, timeout_s: float, lost_after_s: float, info: Mapping[str, int]) -> Entered:
    """Waits until all workers of the job are there.

    Raises:
        ClusterError: the store cannot be served or reached, or the roll call came to nothing.
    """
    return _Entry(spec, timeout_s, terms_of(spec, lost_after_s), info).run()


class _Entry:
    def __init__(self, spec: ClusterSpec, timeout_s: float, terms: Mapping[str, str], info: Mapping[str, int]) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._deadline = Deadline(spec.name(spec.index), timeout_s)
        self._terms = terms
        self._info = info
        self._token = secrets.token_hex(8)

    def run(self) -> Entered:
        serves = self._spec.index == 0 and not self._spec.store_is_served
        server, (host, port) = self._serve() if serves else (None, self._spec.chief_address)
        pause = threading.Event()
        while True:
            try:
                return self._come_in(find_route(host, port), server)
            except (StoreBrokenError, StoreSilentError) as error:
                self._deadline.wait_for(
                    f"{self._spec.name(0)}, where the job's store is ({error})",
                    "start it, or correct its address, its port or a firewall",
                )
            pause.wait(TURN_S)

    def _serve(self) -> tuple[Store, tuple[str, int]]:
        host, port = self._spec.chief_address if self._spec.workers[0] else ("127.0.0.1", 0)
        name, give_up = self._spec.name(0), time.monotonic() + min(_PORT_IS_FREED_S, self._timeout_s)
        pause = threading.Event()
        while True:
            try:
                listener = bind_to(host, port, name)
            except PortTakenError as error:
                if time.monotonic() > give_up:
                    raise ClusterError(f"{error}{_describe_occupant(self._spec, host, port)}") from None
                pause.wait(TURN_S)
                continue
            address = listener.getsockname()[:2]
            return serve(listener), address

    def _come_in(self, route: Route, server: Store | None) -> Entered:
        line = Line(lambda: self._open(route, server))
        try:
            line.call(lambda store: None, self._deadline.left_s)
            cards = self._answer(RollCall(self._spec, self._card(route, server), line, self._deadline))
        except BaseException:
            line.close()
            raise
        return Entered(cards=cards, route=route, line=line, server=server)

    def _answer(self, call: RollCall) -> tuple[Card, ...]:
        try:
            return call.answer()
        except (StoreBrokenError, StoreSilentError):
            raise
        except BaseException as error:
            call.give_up(error)
            raise

    def _open(self, route: Route, server: Store | None) -> Store:
        """A client that sees the job's part of the store alone, once it is sure that the store is this job's.

        Until then it writes nothing that could disturb another job.
        """
        store = route.connect()
        mine = json.dumps({"job_id": self._spec.job_id, "workers": self._spec.workers})
        opens = server is not None or (self._spec.store_is_served and self._spec.index == 0)
        found = store.compare_set(OWNER_KEY, "", mine if opens else "").decode()
        if not found:
            raise StoreBrokenError("its store is there, but worker 0 has not opened the job yet")
        owner = json.loads(found)
        if owner["job_id"] != self._spec.job_id:
            store.set(REFUSED_KEY, f"{this_process()}, of {_describe_job(self._spec.job_id, self._spec.workers)}")
            raise ClusterError(
                f"{self._spec.name(self._spec.index)} is of {_describe_job(self._spec.job_id, self._spec.workers)}, "
                f"but the store at {self._spec.workers[0]} is that of {_describe_job(**owner)}. "
                "Give all workers of a job the same cluster and job id, and every job a port of its own"
            )
        return PrefixStore(job_prefix(self._spec), store)

    def _card(self, route: Route, server: Store | None) -> Card:
        return Card(
            index=self._spec.index,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=route.host if server is not None else self._own_address(route),
            token=self._token,
            info=dict(self._info),
            terms=self._terms,
        )

    def _own_address(self, route: Route) -> str:
        host = self._spec.host(self._spec.index)
        if not host:
            return route.own_host
        with bind_to(host, 0, self._spec.name(self._spec.index)) as bound:
            return str(bound.getsockname()[0])


def _describe_occupant(spec: ClusterSpec, host: str, port: int) -> str:
    """Who serves a job's store at an address that is taken; empty where it is no store."""
    return ""


def _describe_job(job_id: str, workers: Sequence[str]) -> str:
    return f"job {job_id!r} with the workers {', '.join(workers)}"[:_LONGEST_NOTE]
