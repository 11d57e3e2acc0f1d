"""The store where the launchers of several hosts meet, and how they make sure that they belong together.

The one that serves it writes down what the job is and a random id. Whoever comes compares what the job is before
anything else: a launcher left over from another job, or of another command, leaves with an error and has changed
nothing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.cluster.address import join_address
from lockstep.errors import ClusterError
from lockstep.launch.telling import Tell
from lockstep.membership.line import StoreBrokenError
from lockstep.membership.store import NotHereError, PortTakenError, bind_to, find_route, serve

_PREFIX = "lockstep/launch"
_READ_LIMIT = timedelta(seconds=300)
_ANSWER_LIMIT = timedelta(seconds=10)
_RETRY_S = 0.25
_TELL_S = 5.0


def new_job_id() -> str:
    """An id for one run of a job: when it began, to find its logs by, and what tells it from all others."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True, kw_only=True)
class Hall:
    """A store that has been reached, and whose job is this launcher's.

    Args:
        store: all of it.
        job_id: the random id of this run of the job.
        own_host: this machine's address, as the others reach it.
    """

    store: Store
    job_id: str
    own_host: str

    @classmethod
    def serve(cls, listener: socket.socket, job: str) -> Hall:
        """Serves the store on a listening socket, which it takes over."""
        own_host = listener.getsockname()[0]
        store = serve(listener)
        store.set_timeout(_READ_LIMIT)
        job_id = new_job_id()
        PrefixStore(_PREFIX, store).set("job", json.dumps([job, job_id]))
        return cls(store=store, job_id=job_id, own_host=own_host)

    @classmethod
    def find(cls, host: str, port: int, job: str, *, timeout_s: float, tell: Tell) -> Hall:
        """Reaches the store, waiting for it to be served.

        Raises:
            ClusterError: nobody serves it in time, or it is another job's.
        """
        wait = _Waiting(timeout_s, tell)
        while True:
            try:
                return cls._enter(host, port, job)
            except StoreBrokenError as error:
                wait.on(f"the launcher of the first host ({error})")

    @classmethod
    def serve_or_find(cls, host: str, port: int, job: str, *, timeout_s: float, tell: Tell) -> Hall:
        """Serves the store as soon as the address is this machine's and free; reaches it when another launcher does.

        A machine may come to know its own name or address only after a while, as a Kubernetes pod does.

        Raises:
            ClusterError: nobody serves it in time, this launcher must not, or it is another job's.
        """
        wait = _Waiting(timeout_s, tell)
        while True:
            try:
                return cls.serve(bind_to(host, port, "the launcher"), job)
            except (NotHereError, PortTakenError):
                pass  # another launcher may serve it, elsewhere or here
            try:
                return cls._enter(host, port, job)
            except StoreBrokenError as error:
                wait.on(f"the launcher that serves the rendezvous ({error})")

    @classmethod
    def _enter(cls, host: str, port: int, job: str) -> Hall:
        """Reaches the store if it is served now.

        Raises:
            StoreBrokenError: it is not.
            ClusterError: it is another job's.
        """
        route = find_route(host, port)
        try:
            store = route.connect()
        except RuntimeError as error:  # it has ended just now
            raise StoreBrokenError(str(error).partition("\n")[0]) from None
        job_id = _compare(PrefixStore(_PREFIX, store), job, join_address(host, port))
        store.set_timeout(_READ_LIMIT)
        return cls(store=store, job_id=job_id, own_host=route.own_host)

    def take_seat(self, index: int, address: str) -> None:
        """Says that the launcher of host ``index`` is here.

        Raises:
            ClusterError: another one has said so.
        """
        me = f"process {os.getpid()} on {socket.gethostname()}"
        there = self._seats.compare_set(f"seat/{index}", "", me).decode()
        if there != me:
            raise ClusterError(
                f"host {index} ({address}) of this job is {there} already, and this is {me};"
                " give every launcher an index of its own"
            )

    def wait_for_seats(self, hosts: Sequence[str], *, timeout_s: float, tell: Tell) -> None:
        """Stays until the launchers of all hosts are here.

        Raises:
            ClusterError: they were not in time; those missing are named.
        """
        wait = _Waiting(timeout_s, tell)
        while True:
            missing = [index for index in range(len(hosts)) if not self._seats.check([f"seat/{index}"])]
            if not missing:
                return
            wait.on(", ".join(f"the launcher of host {index} ({hosts[index]})" for index in missing))

    @property
    def _seats(self) -> Store:
        return PrefixStore(f"{_PREFIX}/{self.job_id}", self.store)


def _compare(store: Store, job: str, where: str) -> str:
    """The id of the job whose store this is.

    Raises:
        ClusterError: it is another job's, or no launcher's at all.
    """
    try:
        store.wait(["job"], _ANSWER_LIMIT)
        theirs, job_id = json.loads(store.get("job"))
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            f"what answers at {where} is no launcher of lockstep; end it, or choose another address"
        ) from error
    if theirs != job:
        raise ClusterError(
            f"the launcher at {where} runs {theirs!r}, and this one {job!r}; start the same command on every host, or"
            " choose another port"
        )
    return str(job_id)


class _Waiting:
    """Waits a little at a time, says on whom every few seconds, and gives up in the end."""

    def __init__(self, timeout_s: float, tell: Tell) -> None:
        self._timeout_s, self._tell = timeout_s, tell
        self._since = self._told = time.monotonic()
        self._pause = threading.Event()

    def on(self, whom: str) -> None:
        now = time.monotonic()
        if now - self._since > self._timeout_s:
            raise ClusterError(f"waited {self._timeout_s:g} s for {whom}; start it, or give it longer with --timeout-s")
        if now - self._told > _TELL_S:
            self._told = now
            self._tell(f"waiting for {whom}, {now - self._since:.0f} s so far")
        self._pause.wait(_RETRY_S)
