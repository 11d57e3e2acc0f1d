"""How the launchers of an elastic job meet, one on each host, again and again.

Each time they meet a round begins, with workers of its own. Every launcher tells the others its state, under a ticket
that is new for each meeting, and the first one decides who is in the round (``elastic_plan``).

launcher: HostState --.                    .--> Plan: how many workers each host starts, and where their store is
                       `-> first: decide() -'
launcher: HostState --'                     `-> or why the job ends

The first host of the list serves the launchers' store and lasts as long as the job; all others may come and go. So it
alone decides, and the launchers need no agreement among equals. Each one counts up a number every second; whose number
stands still is gone. A host whose ticket is not in the round's plan waits for the next round.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum

from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from lockstep._torch_compat import HashStore, Store
from lockstep.checks import check_seconds
from lockstep.cluster.environment import parse_torchrun
from lockstep.cluster.spec import ClusterSpec, parse_address
from lockstep.cluster.variables import JOB_ID_VARIABLE
from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.elastic_plan import HostState, Plan, decide
from lockstep.launch.rendezvous import LOOPBACK, Hosts, LauncherRendezvous
from lockstep.launch.store_link import CALL_TIMEOUT_S, StoreLink, StoreLostError
from lockstep.membership.failure_report import FailureReport
from lockstep.membership.rendezvous import Deadline, join_names
from lockstep.membership.store import (
    OWNER_KEY,
    StoreAddress,
    StoreBrokenError,
    StoreKeys,
    find_store,
    listen,
    read,
    run_key,
    serve_store,
)

_KEY = "lockstep/launch"
_RUN_KEY, _PLAN_KEY, _PRESENT_KEY = f"{_KEY}/run", f"{_KEY}/plan", f"{_KEY}/present"
_POLL_S = 0.1
_BEAT_S = 1.0
# A launcher that is silent for so long has left its round: sooner than workers are lost.
_GONE_AFTER_S = 8.0
# A meeting waits so long for a silent one. Who was only slow comes back as a host that waits for its turn.
_AWAITED_S = 3.0
_GOODBYE_TIMEOUT_S = 3.0


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


class JobEndedError(ClusterError):
    """The launchers have agreed that the job ends."""


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """What a launcher has in the store: its ticket for the next round, and its state. Empty once it has left."""

    ticket: str = ""
    state: HostState | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HostRecord:
        if not text:
            return cls()
        with _readable():
            values = json.loads(text)
            state = values["state"]
            return cls(ticket=values["ticket"], state=HostState(**{**state, "losses": tuple(state["losses"])}))


@contextmanager
def _readable() -> Iterator[None]:
    """Raises ClusterError for a text in the store that no launcher has written: anybody may write there."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(
            f"the launchers' store holds something else than what launchers tell each other ({error}); end the process "
            "that has written it, and start the job again"
        ) from None


def _read_plan(text: str) -> Plan:
    if not text:
        return Plan()
    with _readable():
        values = json.loads(text)
        return Plan(**{**values, "tickets": tuple(values["tickets"]), "sizes": tuple(values["sizes"])})


class Attendance:
    """Which hosts' launchers are there, as the first one hears them. Several threads may look."""

    def __init__(self, link: StoreLink, hosts: int) -> None:
        self._link, self._lock = link, threading.Lock()
        self._beats = [""] * hosts
        self._heard_s = [0.0] * hosts

    def look(self, silent_s: float) -> list[HostRecord]:
        """The records, in the order of the list, of those that were silent for less than ``silent_s`` seconds."""
        hosts = range(len(self._beats))
        texts = self._link.read_all(
            [_host_key("beat", host) for host in hosts] + [_host_key("host", host) for host in hosts]
        )
        beats, records = texts[: len(hosts)], texts[len(hosts) :]
        with self._lock:
            now = time.monotonic()
            for host, beat in enumerate(beats):
                if beat != self._beats[host]:
                    self._beats[host], self._heard_s[host] = beat, now
            present = [host for host in hosts if beats[host] and now - self._heard_s[host] < silent_s]
        return [record for host in present if (record := HostRecord.from_json(records[host])).ticket]


def _host_key(name: str, host: int) -> str:
    return f"{_KEY}/{name}/{host}"


class ElasticMeeting(LauncherRendezvous):
    """One launcher among those of an elastic job. Its maker calls ``shutdown``.

    Attributes:
        elastic: how far the number of workers may change.
        host_state: what this launcher tells the others at the beginning of the next round.
        plan: what was decided for the round.
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
        self._first_name = hosts.name(0) if hosts.hosts else "this host"
        capacity = elastic.maximum
        self.host_state = HostState(index=hosts.index, name=self._name, capacity=capacity, survivors=capacity)
        self.plan, self._ticket = Plan(), ""
        self._states: Sequence[HostState] = ()  # of the round's hosts, which the first one remembers
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
        self._attendance = Attendance(self._link, len(hosts.hosts) or 1)
        self._first_until = time.monotonic() + elastic.rejoin_s
        self._is_over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="lockstep-launcher-beats", daemon=True)
        self._beats.start()

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
            for host in range(len(self._hosts.hosts) or 1):  # ``Attendance`` reads keys that must be there
                self._link.set(_host_key("beat", host), "")
                self._link.set(_host_key("host", host), "")
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

    def _beat(self) -> None:
        """Tells the others once a second that this launcher is there; the first one tells who else is."""
        present, number = "", secrets.randbits(48)  # a launcher that was started anew must not repeat a number
        while True:
            number += 1
            # A lost store, or what a stranger has written there, is told where this launcher meets the others.
            with suppress(StoreLostError, ClusterError):
                self._link.set(_host_key("beat", self._hosts.index), str(number))
                if self._hosts.index == 0:
                    tickets = json.dumps([record.ticket for record in self._attendance.look(_GONE_AFTER_S)])
                    if tickets != present:
                        self._link.set(_PRESENT_KEY, tickets)
                        present = tickets
            if self._is_over.wait(_BEAT_S):
                return

    # ---- the beginning of a round

    @property
    def rank(self) -> int:
        """This launcher's place among those of the round."""
        return self.plan.tickets.index(self._ticket)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other launchers and sets ``plan``.

        Raises JobEndedError if they agree that the job ends, ClusterError if they do not meet.
        """
        self._end_workers_store()
        self._ticket = secrets.token_hex(8)
        self.plan = self._meet()
        # Where a program has failed, its error is said by the launcher whose worker raised it; a loss has no other
        # voice.
        if self.plan.end and self.host_state.losses:
            self._report(self.plan.end)
        if self.plan.ends_job:
            if self._ticket not in self.plan.tickets:
                self._report("the job has ended while this host waited for its turn")
            raise JobEndedError(self.plan.end)
        if self.plan.line:
            self._report(self.plan.line)
        where = RendezvousStoreInfo(self.plan.address, self.plan.port)
        return RendezvousInfo(HashStore(), self.rank, len(self.plan.sizes), where)

    def _meet(self) -> Plan:
        wait = Deadline(self._name, self._hosts.timeout_s, self._report)
        while True:
            try:
                record = HostRecord(ticket=self._ticket, state=self.host_state)
                self._link.set(_host_key("host", self._hosts.index), record.to_json())
                return self._lead(wait) if self._hosts.index == 0 else self._follow(wait)
            except StoreLostError:
                if self._is_refused():
                    raise ClusterError(
                        f"{self._first_name}, which serves the job's store, is lost: it has ended, and with it the "
                        "job; start it again on all hosts"
                    ) from None
                wait.check(
                    f"{self._first_name}, which serves the job's store and does not answer", "look at the network"
                )
                threading.Event().wait(_POLL_S)

    def _is_refused(self) -> bool:
        """Whether nobody listens any more where the store was, though the host answers."""
        if self._hosts.index == 0:
            return False
        try:
            with socket.create_connection(parse_address(self._hosts.hosts[0]), timeout=CALL_TIMEOUT_S):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False

    def _lead(self, wait: Deadline) -> Plan:
        """Decides for all, once those of the last round that are still there have come."""
        began_s = time.monotonic()
        while True:
            records = self._attendance.look(_AWAITED_S)
            late = [record.state.name for record in records if record.state and record.ticket in self.plan.tickets]
            here = [record for record in records if record.ticket not in self.plan.tickets]
            states = [record.state for record in here if record.state is not None]
            missing, advice = f"{join_names(late)} to end the last round", "look at the output there"
            if not late:
                plan = decide(states, self._states, minimum=self.elastic.minimum, max_restarts=self._max_restarts)
                if plan is not None and not self._awaits_first(states):
                    return self._publish(plan, here)
                capacity = sum(state.capacity for state in states)
                missing = f"other hosts: {capacity} of at least {self.elastic.minimum} workers are there"
                advice = "start more hosts"
            try:
                # Until then a host that is late may be one that was lost.
                if not late or time.monotonic() > began_s + _AWAITED_S:
                    wait.check(missing, advice)
            except ClusterError as error:
                return self._publish(Plan(end=str(error)), here)
            threading.Event().wait(_POLL_S)

    def _awaits_first(self, states: Sequence[HostState]) -> bool:
        """Whether the job has not begun and hosts of the list are still to come."""
        return not self._states and len(states) < len(self._hosts.hosts) and time.monotonic() < self._first_until

    def _publish(self, plan: Plan, records: Sequence[HostRecord]) -> Plan:
        tickets = tuple(record.ticket for record in records)
        plan = replace(plan, number=self.plan.number + 1, tickets=tickets)
        if not plan.ends_job:
            with listen(self._address, 0, "the launcher") as listener:
                plan = replace(plan, address=self._address, port=listener.getsockname()[1])
                self._workers_store = serve_store(listener)
        self._link.set(_PLAN_KEY, json.dumps(asdict(plan)))
        self._states = [record.state for record in records if record.state is not None]
        return plan

    def _follow(self, wait: Deadline) -> Plan:
        """Waits for a plan that has this launcher's ticket, or that ends the job."""
        while True:
            plan = _read_plan(self._link.read(_PLAN_KEY))
            if plan.number > self.plan.number and (plan.ends_job or self._ticket in plan.tickets):
                return plan
            wait.check(f"{self._first_name} to take it in", "look at the output there")
            threading.Event().wait(_POLL_S)

    # ---- during a round

    def end_round(self, why: RoundEnd) -> None:
        """Tells the other launchers that all workers are to be ended; the first reason is kept."""
        with suppress(StoreLostError):
            self._link.set_first(self._key("end"), why)

    def round_end(self) -> RoundEnd | None:
        """Why all workers are to be ended; None while they go on, or as long as the store does not answer."""
        try:
            text = self._link.read(self._key("end"))
        except StoreLostError:
            return None
        with _readable():
            return RoundEnd(text) if text else None

    def report_done(self) -> None:
        """Tells the other launchers that all workers of this one have ended normally."""
        with suppress(StoreLostError):
            self._link.set(self._key(f"done/{self.rank}"), "done")

    def all_done(self) -> bool:
        """Whether the workers of all hosts have ended normally. A host that is gone since does not count."""
        try:
            missing = [
                ticket
                for rank, ticket in enumerate(self.plan.tickets)
                if ticket != self._ticket and not self._link.read(self._key(f"done/{rank}"))
            ]
            return not missing or not set(missing) & set(self._present())
        except StoreLostError:
            return self._is_refused()  # the first host has seen that all are done

    def _present(self) -> list[str]:
        """The tickets of all hosts that are there, as the first one has told."""
        with _readable():
            return list(json.loads(self._link.read(_PRESENT_KEY) or "[]"))

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
                "TORCHELASTIC_RESTART_COUNT": str(self.plan.number),
                JOB_ID_VARIABLE: os.environ.get(JOB_ID_VARIABLE, ""),
            }
        )
        assert spec is not None  # as RANK is set
        return spec

    def num_nodes_waiting(self) -> int:
        """How many launchers wait to be taken in."""
        try:
            return len(set(self._present()) - set(self.plan.tickets))
        except StoreLostError:
            return 0

    def shutdown(self) -> bool:
        """Leaves the job. The first launcher, with which the store ends, lets the others leave before."""
        self._is_over.set()
        self._beats.join(CALL_TIMEOUT_S + _BEAT_S)
        # What a stranger has written into the store must not hide why the job ends.
        with suppress(StoreLostError, ClusterError):
            self._link.set(_host_key("host", self._hosts.index), "")
            if self._server is not None:
                self._let_others_leave()
        self._end_workers_store()
        self._link.close()
        self._server = None
        return True

    def _let_others_leave(self) -> None:
        if not self.plan.ends_job:  # for hosts that wait for their turn
            self._publish(Plan(finished=True), ())
        until = time.monotonic() + _GOODBYE_TIMEOUT_S
        while self._attendance.look(_AWAITED_S) and time.monotonic() < until:
            threading.Event().wait(_POLL_S)

    def _end_workers_store(self) -> None:
        self._workers_link.close()
        self._workers_store = None

    def _key(self, name: str) -> str:
        return f"{_KEY}/round/{self.plan.number}/{name}"
