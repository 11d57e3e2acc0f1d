"""How a worker comes into its job: it serves the store or looks for it, makes sure whose it is, answers the roll call.

Until the roll call is complete a store that goes away is looked for again: its chief may have been started anew.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from lockstep.cluster.spec import ClusterSpec
from lockstep.membership.board import Place, place_of, read, run_key
from lockstep.membership.card import Card, terms_of
from lockstep.membership.deadline import Deadline
from lockstep.membership.line import Line, StoreBrokenError, StoreSilentError
from lockstep.membership.opening import NOT_OPENED, SILENT_S, claim_store, open_run
from lockstep.membership.roll_call import RollCall
from lockstep.membership.store import PortTakenError, Route, bind_to, find_route, serve

_FIRST_TURN_S, _TURN_S = 0.02, 0.25
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
                turn_s = min(1.2 * turn_s, _TURN_S)
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
                self._pause.wait(_TURN_S)
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
