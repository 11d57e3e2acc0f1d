"""How the launchers of an elastic job meet, one on each host, again and again.

Each time they meet a round begins, with workers of its own: torch's dynamic rendezvous says which launchers are in it
and numbers it. It does not know of workers, so the launchers then tell each other theirs, and the first one decides.

launcher: HostState --.                    .--> Plan: how many workers each host starts, and where their store is
                       `-> first: decide() -'
launcher: HostState --'                     `-> or why the job ends

The first host of the list serves the launchers' store and lasts as long as the job; all others may come and go.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from lockstep._torch_compat import HashStore, Store, leave_rendezvous, rendezvous_round, share_no_rendezvous_store
from lockstep.checks import check_seconds
from lockstep.cluster.environment import parse_torchrun
from lockstep.cluster.spec import ClusterSpec, parse_address
from lockstep.cluster.variables import JOB_ID_VARIABLE
from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.rendezvous import LOOPBACK, Hosts, LauncherRendezvous
from lockstep.membership.failure_report import FailureReport
from lockstep.membership.rendezvous import Deadline
from lockstep.membership.store import (
    OWNER_KEY,
    StoreAddress,
    StoreBrokenError,
    StoreClient,
    StoreKeys,
    StoreSilentError,
    find_store,
    listen,
    read,
    run_key,
    serve_store,
)

T = TypeVar("T")

_RUN_KEY = "lockstep/launch/run"
_CALL_TIMEOUT_S = 5.0
_POLL_S = 0.1
_COLLECT_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 3.0
# A launcher without a sign of life for so many seconds is out of the round: sooner than workers are lost.
_KEEP_ALIVE_S, _KEEP_ALIVES = 1, 8
# After a loss the others wait so long for one that has not come; torch looks once a second.
_LAST_CALL = timedelta(seconds=3)
_AGAIN = "again"
_STATE_CLASSES = {
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState"),
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
}


class RoundEnd(StrEnum):
    """Why all workers of a round are ended."""

    LOSS = "loss"  # a worker was lost or has failed
    REJOIN = "rejoin"  # others are to join: workers may save first
    STOP = "stop"  # the first host was told to end


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How far the number of workers of a job may change."""

    minimum: int  # workers on all hosts together, below which the job does not go on
    maximum: int  # workers on this host
    rejoin_s: float = 30.0  # seconds after which lost workers are started again, and hosts that wait are taken in

    def __post_init__(self) -> None:
        if self.minimum < 1 or self.maximum < 1:
            raise ConfigError(
                f"workers={self.minimum}:{self.maximum} was given, expected at least 1 each: MIN workers are enough to "
                "go on, and MAX are started on this host"
            )
        check_seconds("rejoin_s", self.rejoin_s)


@dataclass(frozen=True, kw_only=True)
class HostState:
    """What a launcher tells the others at the beginning of a round."""

    index: int  # the host's place in the list
    name: str  # the host in messages
    capacity: int  # workers that it can run
    survivors: int  # how many of them were not lost
    losses: tuple[str, ...] = ()  # who was lost since the last round, and how
    back: int = 0  # how many workers are started again that were lost earlier
    failure: str = ""  # how the program failed here
    finished: bool = False  # its workers have ended, and none with an error
    restarts: int = 0  # how often all workers were restarted after a failure


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the first launcher of a round decides."""

    sizes: tuple[int, ...] = ()  # how many workers each host starts, in the order of the launchers
    line: str = ""  # what has changed, for people; empty at the start of the job
    restarts: int = 0  # how often all workers were restarted after a failure
    end: str = ""  # why the job ends instead
    finished: bool = False  # the job ends because all is done
    address: str = ""  # where the workers' store is
    port: int = 0


def decide(hosts: Sequence[HostState], before: Sequence[HostState], *, minimum: int, max_restarts: int) -> Plan | None:
    """What the hosts of a round do, ``before`` being those of the last one. None: wait for more hosts. Pure.

    A loss comes before a failure: programs that do not use Lockstep fail when they lose each other.
    """
    if before and all(host.finished for host in hosts):
        return Plan(finished=True)
    survivors, capacity = sum(host.survivors for host in hosts), sum(host.capacity for host in hosts)
    if capacity < minimum:
        return None
    changes, restarts = _changes(hosts, before), max(host.restarts for host in hosts)
    stayed = [host for host in hosts if host.index in {host.index for host in before}]
    has_losses = any(host.losses for host in stayed) or len(stayed) < len(before)
    failure = "" if has_losses else next((host.failure for host in stayed if host.failure), "")
    if not failure and survivors >= minimum:
        line = f"{'; '.join(changes)}; {_workers(survivors)} on" if changes else ""
        return Plan(sizes=tuple(host.survivors for host in hosts), line=line, restarts=restarts)
    cause = failure or f"{'; '.join(changes)}; {survivors} left of at least {minimum}"
    if restarts == max_restarts:
        return Plan(end=cause)
    line = f"{cause}; starting all again ({restarts + 1} of {max_restarts})"
    return Plan(sizes=tuple(host.capacity for host in hosts), line=line, restarts=restarts + 1)


def _changes(hosts: Sequence[HostState], before: Sequence[HostState]) -> list[str]:
    """One phrase for each that was lost or came."""
    indices, indices_before = [{host.index for host in states} for states in (hosts, before)]
    changes = [phrase for host in hosts for phrase in host.losses]
    changes += [f"{host.name} is gone" for host in before if host.index not in indices]
    if back := sum(host.back for host in hosts):
        changes.append(f"{back} lost worker{'s are' if back > 1 else ' is'} back")
    if before:
        changes += [f"{host.name} has joined" for host in hosts if host.index not in indices_before]
    return changes


def _workers(number: int) -> str:
    return "1 worker goes" if number == 1 else f"{number} workers go"


class JobEndedError(ClusterError):
    """The launchers have agreed that the job ends."""


class StoreLostError(RuntimeError):
    """The launchers' store cannot be reached now; torch takes a RuntimeError for a failed connection."""


class StoreLink:
    """A connection to the launchers' store. No call takes longer than a few seconds, and a broken one is renewed.

    It is the store of torch's ``C10dRendezvousBackend``, which takes its errors for a failed connection.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect, self._lock = connect, threading.Lock()
        self._client: StoreClient | None = None

    def get(self, key: str) -> bytes:
        """The value of a key, which must be there."""
        return self.compare_set(key, "", "")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key that has the expected value; the value that it has then."""
        return self.call(lambda store: bytes(store.compare_set(key, expected, desired)))

    def read(self, key: str) -> str:
        """The value of a key; empty if it is not there."""
        return self.get(key).decode()

    def set(self, key: str, value: str) -> None:
        self.call(lambda store: store.set(key, value))

    def call(self, call: Callable[[Store], T]) -> T:
        """Makes a call. Raises StoreLostError if the connection is broken or the store is silent."""
        with self._lock:
            client = self._client = self._client or StoreClient(self._connect)
        try:
            return client.call(call, _CALL_TIMEOUT_S)
        except (StoreBrokenError, StoreSilentError) as error:
            with self._lock:
                if self._client is client:
                    self._client = None
            client.close()
            raise StoreLostError(str(error)) from None

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


class _PlainUnpickler(pickle.Unpickler):
    """Reads the state of torch's rendezvous, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        # Whatever torch's state consists of has to be in that list;
        # test_what_a_stranger_writes_into_the_store_is_not_unpickled writes another class.
        if (module, name) not in _STATE_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a rendezvous")
        return super().find_class(module, name)


class CheckedBackend(C10dRendezvousBackend):
    """Torch's state of the rendezvous in the launchers' store. Torch unpickles it, and anybody may write there."""

    def get_state(self) -> tuple[bytes, Any] | None:
        # torch 2.13 calls ``pickle.loads`` on what this returns (``dynamic_rendezvous.py``,
        # ``_BackendRendezvousStateHolder.sync``).
        stored: tuple[bytes, Any] | None = super().get_state()
        if stored is not None:
            _check_state(stored[0])
        return stored

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        stored: tuple[bytes, Any, bool] | None = super().set_state(state, token)
        if stored is not None:
            _check_state(stored[0])
        return stored


def _check_state(state: bytes) -> None:
    """Raises ClusterError if a pickle has more in it than the state of a rendezvous."""
    try:
        _PlainUnpickler(io.BytesIO(state)).load()
    except Exception as error:  # noqa: BLE001 - whatever bytes make an unpickler raise
        raise ClusterError(
            f"the launchers' store holds something else than the state of their rendezvous ({error}); end the process "
            "that has written it, and start the job again"
        ) from None


class ElasticMeeting(LauncherRendezvous):
    """One launcher among those of an elastic job. Its maker calls ``shutdown``.

    Attributes:
        elastic: how far the number of workers may change.
        own: what this launcher tells the others at the beginning of the next round.
        plan: what was decided for the round.
        rank: this launcher's place among those of the round.
        number: of the round; it grows, also for launchers that come later.
    """

    def __init__(
        self,
        hosts: Hosts,
        elastic: Elastic,
        *,
        max_restarts: int,
        report: Callable[[str], None],
    ) -> None:
        self._hosts, self.elastic, self._max_restarts, self._report = hosts, elastic, max_restarts, report
        self._name = hosts.name(hosts.index) if hosts.hosts else "this host"
        capacity = elastic.maximum
        self.host_state = HostState(index=hosts.index, name=self._name, capacity=capacity, survivors=capacity)
        self.plan, self.rank, self.number = Plan(), 0, 0
        self._before: Sequence[HostState] = ()
        self._workers_store: Store | None = None
        self._workers_link = StoreLink(lambda: find_store(self.plan.address, self.plan.port).connect())
        self._server: Store | None = None
        where = self._serve() if hosts.index == 0 else self._find()
        self._address, self._run_id = where.own_host, ""
        self._link = StoreLink(lambda: self._connect(where.host, where.port))
        try:
            self._run_id = self._claim()
        except BaseException:
            self._link.close()
            raise
        self._handler = self._new_handler()
        self._first_until = time.monotonic() + elastic.rejoin_s

    # ---- the launchers' store

    def _serve(self) -> StoreAddress:
        host, port = parse_address(self._hosts.hosts[0]) if self._hosts.hosts else (LOOPBACK, 0)
        with listen(host, port, self._name) as listener:
            host, port = listener.getsockname()[:2]
            self._server = serve_store(listener)
        return StoreAddress(host=host, port=port, own_host=host)

    def _find(self) -> StoreAddress:
        """Waits for the store of the first host."""
        wait = Deadline(self._name, self._hosts.timeout_s, self._report)
        while True:
            try:
                store = find_store(*parse_address(self._hosts.hosts[0]))
            except StoreBrokenError as error:
                wait.check(f"{self._hosts.name(0)}, where the job's store is ({error})", "start it, or correct --hosts")
                threading.Event().wait(_POLL_S)
            else:
                address = self._hosts.hosts[self._hosts.index]
                return StoreAddress(
                    host=store.host, port=store.port, own_host=parse_address(address)[0] if address else store.own_host
                )

    def _connect(self, host: str, port: int) -> Store:
        store = find_store(host, port).connect()
        if self._run_id and read(store, _RUN_KEY) != self._run_id:
            raise ClusterError(f"{self._hosts.name(0)} was started anew meanwhile; start this host again too")
        return store

    def _claim(self) -> str:
        """Makes sure that the store is this job's; returns the id of the run, which its first host has chosen."""
        job = f"{self._hosts.job} with at least {self.elastic.minimum} workers"
        owner = json.dumps({"job_id": job, "workers": self._hosts.hosts})
        if self._hosts.index == 0:
            run_id = f"{datetime.now():%Y%m%d%H%M%S}-{secrets.randbits(48):012x}"
            self._link.set(_RUN_KEY, run_id)
            self._link.set(OWNER_KEY, owner)
            return run_id
        wait = Deadline(self._name, self._hosts.timeout_s, self._report)
        while not (store_owner := self._link.read(OWNER_KEY)):
            wait.check(f"{self._hosts.name(0)} to begin", "look at its output")
            threading.Event().wait(_POLL_S)
        if (owner_id := json.loads(store_owner)["job_id"]) != job:
            raise ClusterError(
                f"{self._name} belongs to the job {job!r}, but the store at {self._hosts.hosts[0]} belongs to "
                f"{owner_id!r}; start all hosts with the same program, arguments and MIN, and give each job its port"
            )
        return self._link.read(_RUN_KEY)

    def _new_handler(self) -> DynamicRendezvousHandler:
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            self._run_id,
            HashStore(),  # in whose place our own is used
            CheckedBackend(self._link, self._run_id),  # type: ignore[arg-type]  # it has what is called
            min_nodes=1,
            max_nodes=max(1, len(self._hosts.hosts)),
            local_addr=f"{self._hosts.index:06d}",  # torch sorts the launchers of a round by it
            timeout=RendezvousTimeout(join=timedelta(seconds=self._hosts.timeout_s), last_call=_LAST_CALL),
            keep_alive_interval=_KEEP_ALIVE_S,
            keep_alive_max_attempt=_KEEP_ALIVES,
        )
        share_no_rendezvous_store(handler)
        return handler

    # ---- the beginning of a round

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other launchers. Raises JobEndedError if they agree that the job ends, ClusterError if they don't.

        Sets ``plan``, ``rank`` and ``number``.
        """
        self._end_workers_store()
        while True:
            info = self._join()
            self.rank, (self.number, _) = info.rank, rendezvous_round(self._handler)
            try:
                plan = self._lead(info.world_size) if info.rank == 0 else self._follow(info.world_size)
            except (StoreLostError, RendezvousError):
                # A store that is gone, or a round that another launcher has left, shows again in ``_join``, which knows
                # the words for it.
                continue  # the next attempt says what is wrong
            if plan is not None:
                break
        self.plan = plan
        # Where a program has failed, its error is said by the launcher whose worker raised it; a loss has no other
        # voice.
        if self.plan.end and self.host_state.losses:
            self._report(self.plan.end)
        if self.plan.end or self.plan.finished:
            raise JobEndedError(self.plan.end)
        if self.plan.line:
            self._report(self.plan.line)
        where = RendezvousStoreInfo(self.plan.address, self.plan.port)
        return RendezvousInfo(HashStore(), info.rank, info.world_size, where)

    def _join(self) -> RendezvousInfo:
        wait = Deadline(self._name, self._hosts.timeout_s, self._report)
        while True:
            try:
                return self._handler.next_rendezvous()
            except (RendezvousClosedError, RendezvousGracefulExitError):
                self.plan = Plan(finished=True)
                self._report("the job has ended while this host waited for its turn")
                raise JobEndedError from None
            except RendezvousConnectionError:
                first = self._hosts.name(0)
                if self._is_refused():
                    raise ClusterError(
                        f"{first}, which serves the job's store, is lost: it has ended, and with it the job; start it "
                        "again on all hosts"
                    ) from None
                wait.check(f"{first}, which serves the job's store and does not answer", "look at the network")
                threading.Event().wait(_POLL_S)

    def _is_refused(self) -> bool:
        """Whether nobody listens any more where the store was, though the host answers."""
        try:
            with socket.create_connection(parse_address(self._hosts.hosts[0]), timeout=_CALL_TIMEOUT_S):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False

    def _lead(self, size: int) -> Plan | None:
        """Decides for all. None: the launchers have to meet again."""
        wait = Deadline(self._name, self._hosts.timeout_s, self._report)
        collect = time.monotonic() + _COLLECT_TIMEOUT_S
        self._link.set(self._key("host/0"), json.dumps(asdict(self.host_state)))
        while True:
            texts = [self._link.read(self._key(f"host/{rank}")) for rank in range(size)]
            states = [_read_state(text) for text in texts if text]
            if len(states) == size:
                plan = decide(states, self._before, minimum=self.elastic.minimum, max_restarts=self._max_restarts)
                if plan is not None and not self._awaits_first(states):
                    return self._publish(plan, states)
                capacity = sum(state.capacity for state in states)
                missing = f"other hosts: {capacity} of at least {self.elastic.minimum} workers are there"
                try:
                    wait.check(missing, "start more hosts")
                except ClusterError as error:
                    return self._publish(Plan(end=str(error)), states)
            elif time.monotonic() > collect:
                return self._meet_again()
            if self._must_meet_again(size):
                return self._meet_again()
            threading.Event().wait(_POLL_S)

    def _awaits_first(self, states: Sequence[HostState]) -> bool:
        """Whether the job has not begun and hosts of the list are still to come."""
        return not self._before and len(states) < len(self._hosts.hosts) and time.monotonic() < self._first_until

    def _publish(self, plan: Plan, states: Sequence[HostState]) -> Plan | None:
        with listen(self._address, 0, "the launcher") as listener:
            port = listener.getsockname()[1]
            self._workers_store = serve_store(listener)
        plan = replace(plan, address=self._address, port=port)
        text = json.dumps(asdict(plan))
        # Another launcher may have asked for a new meeting in the meantime: the first text under the key counts for
        # all.
        if self._link.compare_set(self._key("plan"), "", text).decode() != text:
            return None
        self._before = states
        return plan

    def _follow(self, size: int) -> Plan | None:
        """Tells the first launcher of this host, and waits for what it decides. None: they have to meet again."""
        self._link.set(self._key(f"host/{self.rank}"), json.dumps(asdict(self.host_state)))
        while True:
            if text := self._link.read(self._key("plan")):
                return _read_plan(text)
            if self._must_meet_again(size):
                return self._meet_again()
            threading.Event().wait(_POLL_S)

    def _meet_again(self) -> Plan | None:
        """Has all launchers of the round meet again, unless the plan is there already."""
        return _read_plan(self._link.compare_set(self._key("plan"), "", _AGAIN).decode())

    def _must_meet_again(self, size: int) -> bool:
        """Whether other launchers have come or gone."""
        return self._handler.num_nodes_waiting() > 0 or rendezvous_round(self._handler) != (self.number, size)

    # ---- during a round

    def end_round(self, why: RoundEnd) -> None:
        """Tells the other launchers that all workers are to be ended; the first reason is kept."""
        with suppress(StoreLostError):
            self._link.compare_set(self._key("end"), "", why)

    def round_end(self) -> RoundEnd | None:
        """Why all workers are to be ended; None while they go on, or as long as the store does not answer."""
        try:
            text = self._link.read(self._key("end"))
        except StoreLostError:
            return None
        return RoundEnd(text) if text else None

    def report_done(self) -> None:
        """Tells the other launchers that all workers of this one have ended normally."""
        with suppress(StoreLostError):
            self._link.set(self._key(f"done/{self.rank}"), "done")

    def all_done(self) -> bool:
        """Whether the workers of all hosts have ended normally. A host that is gone since does not count."""
        ranks = [rank for rank in range(len(self.plan.sizes)) if rank != self.rank]
        try:
            missing = sum(not self._link.read(self._key(f"done/{rank}")) for rank in ranks)
            if not missing:
                return True
            self._handler.num_nodes_waiting()
        except (StoreLostError, RendezvousError):
            return self._hosts.index != 0 and self._is_refused()  # the first host has seen that all are done
        number, present = rendezvous_round(self._handler)
        return (
            number == self.number and missing <= len(self.plan.sizes) - present
        )  # whoever is done stays until all are

    def failure_report(self) -> FailureReport | None:
        """Why the round's workers end, as they have told each other; None if they have not.

        Raises StoreLostError if this host is cut off from the first one of the round.
        """
        try:
            spec = self._workers_spec()
            run = self._workers_link.read(run_key(spec))
            text = self._workers_link.read(StoreKeys(spec, run).failure) if run else ""
        except StoreLostError:
            if self.rank == 0:  # it serves that store itself
                return None
            raise
        return FailureReport.from_json(text) if text else None

    def _workers_spec(self) -> ClusterSpec:
        """The cluster that the round's workers find in their environment."""
        spec = parse_torchrun(
            {
                "RANK": "0",
                "WORLD_SIZE": str(max(1, sum(self.plan.sizes))),
                "MASTER_ADDR": self.plan.address,
                "MASTER_PORT": str(self.plan.port),
                "TORCHELASTIC_RUN_ID": self._run_id,
                "TORCHELASTIC_RESTART_COUNT": str(self.number),
                JOB_ID_VARIABLE: os.environ.get(JOB_ID_VARIABLE, ""),
            }
        )
        assert spec is not None  # as RANK is set
        return spec

    def num_nodes_waiting(self) -> int:
        """How many launchers wait to be taken in."""
        try:
            return int(self._handler.num_nodes_waiting())
        except RendezvousError:
            return 0

    def shutdown(self) -> bool:
        """Leaves the job. The first launcher, with which the store ends, lets the others leave before."""
        until = time.monotonic() + _GOODBYE_TIMEOUT_S
        with suppress(RendezvousError):
            leave_rendezvous(self._handler, _GOODBYE_TIMEOUT_S)
            if self._server is not None:
                self._handler.set_closed()
            while self._server is not None and time.monotonic() < until:
                if not self._handler.num_nodes_waiting() and not rendezvous_round(self._handler)[1]:
                    break
                threading.Event().wait(_POLL_S)
        self._end_workers_store()
        self._link.close()
        self._server = None
        return True

    def _end_workers_store(self) -> None:
        self._workers_link.close()
        self._workers_store = None

    def _key(self, name: str) -> str:
        return f"lockstep/launch/round/{self.number}/{name}"


def _read_state(text: str) -> HostState:
    values = json.loads(text)
    return HostState(**{**values, "losses": tuple(values["losses"])})


def _read_plan(text: str) -> Plan | None:
    if text == _AGAIN:
        return None
    values = json.loads(text)
    return Plan(**{**values, "sizes": tuple(values["sizes"])})
