"""How a worker comes into its job: it serves the store or looks for it, makes sure whose it is, answers the roll call.

Until the roll call is complete a store that goes away is looked for again: its chief may have been started anew.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep.membership.heartbeat import Peers, Status, read_status
from lockstep.membership.rendezvous import SILENT_S, Card, Deadline, RollCall, terms_of, there_already, this_process
from lockstep.membership.store import (
    OWNER_KEY,
    REFUSED_KEY,
    Line,
    Place,
    PortTakenError,
    Route,
    StoreBrokenError,
    StoreSilentError,
    bind_to,
    find_route,
    place_of,
    read,
    run_key,
    serve,
)

NOT_OPENED = "its store is there, but worker 0 has not opened the job yet"
_TURN_S = 0.2
_LONGEST_NOTE = 300


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The newest run: its name, worker 0's status and card, and why it ended; all empty before the first one."""

    name: str
    status: Status
    card: str
    ending: str


def claim_store(store: Store, spec: ClusterSpec) -> None:
    """Makes sure that the store is this job's. A process of another job leaves no more than a note that it was here.

    Raises:
        ClusterError: it is another job's.
        StoreBrokenError: it is nobody's yet.
    """
    mine = json.dumps({"job_id": spec.job_id, "workers": spec.workers})
    found = store.compare_set(OWNER_KEY, "", mine if spec.index == 0 else "").decode()
    if not found:
        raise StoreBrokenError(NOT_OPENED)
    owner = json.loads(found)
    if owner["job_id"] != spec.job_id:
        own = _describe(spec.job_id, spec.workers)
        store.set(REFUSED_KEY, f"{this_process()}, of {own}")
        raise ClusterError(
            f"{spec.name(spec.index)} is of {own}, but the store at {spec.workers[0]} is that of {_describe(**owner)}. "
            "Give all workers of a job the same cluster and job id, and every job a port of its own"
        )


def open_run(line: Line, spec: ClusterSpec, deadline: Deadline, silent_s: float) -> str:
    """Opens a run, for worker 0: the first, or the next one where a launcher's store has seen one come to its end.

    A worker 0 of an earlier run that was killed has not said that it ended; ``silent_s`` seconds without a sign of
    life are enough.

    Raises:
        ClusterError: another process is worker 0 of a run that goes on.
    """
    peers, pause = Peers(1, -1, time.monotonic()), threading.Event()
    while True:
        run = line.call(lambda store: _newest_run(store, spec), deadline.left_s)
        peers.hear([run.status], time.monotonic())
        is_over = not run.name or run.ending or run.status.ended
        if is_over or peers.silence(0, time.monotonic())[0] > silent_s:
            return line.call(_following(run.name, spec), deadline.left_s)
        if peers.signs_of_life(0) > 1:
            raise there_already(spec, run.card)
        deadline.wait_for("an earlier run of this job to end", "end its processes")
        pause.wait(_TURN_S)


def _newest_run(store: Store, spec: ClusterSpec) -> _Run:
    name = read(store, run_key(spec))
    place = place_of(spec, name or "0")
    return _Run(
        name=name,
        status=read_status(read(store, place.beat(0))),
        card=read(store, place.seat(0)),
        ending=read(store, place.ending),
    )


def _following(run: str, spec: ClusterSpec) -> Callable[[Store], str]:
    following = str(int(run or "0") + 1)
    return lambda store: store.compare_set(run_key(spec), run, following).decode()


def _describe(job_id: str, workers: Sequence[str]) -> str:
    return f"job {job_id!r} with the workers {', '.join(workers)}"[:_LONGEST_NOTE]


_FIRST_TURN_S, _LONGEST_TURN_S = 0.02, 0.25
_PORT_IS_FREED_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Entered:
    """A worker that is in its job.

    Args:
        cards: what every worker said of itself, in worker order.
        place: where this run of the job lies in the store.
        route: the way to the store.
        line: the connection to it.
        server: the store itself, on the chief that serves it; it lives as long as this object is held.
    """

    cards: tuple[Card, ...]
    place: Place
    route: Route
    line: Line
    server: Store | None


def enter(spec: ClusterSpec, *, timeout_s: float, lost_after_s: float, info: Mapping[str, int]) -> Entered:
    """Waits until all workers of the job are there.

    Raises:
        ClusterError: the store cannot be served or reached, or the roll call came to nothing.
    """
    return _Entry(spec, timeout_s, lost_after_s, info).come_in()


class _Entry:
    def __init__(self, spec: ClusterSpec, timeout_s: float, lost_after_s: float, info: Mapping[str, int]) -> None:
        self._spec = spec
        self._deadline = Deadline(spec.name(spec.index), timeout_s)
        self._port_is_freed_by = time.monotonic() + min(_PORT_IS_FREED_S, timeout_s)
        self._lost_after_s = lost_after_s
        self._info = info
        self._token = secrets.token_hex(8)
        self._pause = threading.Event()
        self._server: Store | None = None

    def come_in(self) -> Entered:
        try:
            host, port = self._serve() if self._serves else self._spec.chief_address
            turn_s = _FIRST_TURN_S
            while True:
                try:
                    return self._try(find_route(host, port))
                except (StoreBrokenError, StoreSilentError) as error:
                    self._deadline.wait_for(
                        f"{self._spec.name(0)}, where the job's store is ({error})",
                        "start it, or correct its address, its port or a firewall",
                    )
                self._pause.wait(turn_s)
                turn_s = min(1.2 * turn_s, _LONGEST_TURN_S)
        finally:
            self._server = None  # else the store is served for as long as somebody keeps the error with its frames

    @property
    def _serves(self) -> bool:
        return self._spec.index == 0 and not self._spec.store_is_served

    def _serve(self) -> tuple[str, int]:
        host, port = self._spec.chief_address if self._spec.workers[0] else ("127.0.0.1", 0)
        while True:
            try:
                listener = bind_to(host, port, self._spec.name(0))
            except PortTakenError:  # perhaps by an earlier run, which lets the others read how it ended
                if time.monotonic() > self._port_is_freed_by:
                    raise
                self._pause.wait(_LONGEST_TURN_S)
            else:
                bound_host, bound_port = listener.getsockname()[:2]
                self._server = serve(listener)
                return bound_host, bound_port

    def _try(self, route: Route) -> Entered:
        line = Line(route.connect)
        try:
            line.call(lambda store: claim_store(store, self._spec), self._deadline.left_s)
            run = self._open_run(line) if self._spec.index == 0 else self._find_run(line)
            place = place_of(self._spec, run)
            call = RollCall(self._spec, self._card(route), line, place, run, self._deadline)
            return Entered(cards=self._answer(call), place=place, route=route, line=line, server=self._server)
        except BaseException:
            line.close()
            raise

    def _answer(self, call: RollCall) -> tuple[Card, ...]:
        try:
            return call.answer()
        except (StoreBrokenError, StoreSilentError):
            raise
        except BaseException as error:
            call.give_up(error)
            raise

    def _open_run(self, line: Line) -> str:
        return open_run(line, self._spec, self._deadline, max(SILENT_S, self._lost_after_s / 4))

    def _find_run(self, line: Line) -> str:
        run = line.call(lambda store: read(store, run_key(self._spec)), self._deadline.left_s)
        if not run:
            raise StoreBrokenError(NOT_OPENED)
        return run

    def _card(self, route: Route) -> Card:
        return Card(
            index=self._spec.index,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=route.host if self._serves else self._own_address(route),
            token=self._token,
            info=dict(self._info),
            terms=terms_of(self._spec, self._lost_after_s),
        )

    def _own_address(self, route: Route) -> str:
        host = self._spec.host(self._spec.index)
        if not host:
            return route.own_host
        with bind_to(host, 0, self._spec.name(self._spec.index)) as bound:
            return str(bound.getsockname()[0])
