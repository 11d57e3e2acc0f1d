"""The agent of one host in an elastic job: it goes on with the workers that are left, and takes others in.

    workers run -> one is lost -> all are ended -> the launchers meet (``elastic_meeting``) -> those that are left start
                                                           ^
    workers run -> a while later, or a host waits -> all save and end -> all start

Workers are never mixed between rounds: those of the last one have ended before the launchers meet, and the store that
they were given is gone.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep._torch_compat import Store
from lockstep.launch.agent import Agent, Limits, WorkerSetup
from lockstep.launch.elastic_meeting import ElasticMeeting, JobEndedError, RoundEnd
from lockstep.launch.failures import WorkerFailure
from lockstep.launch.side_effects import handle_sigterm_once
from lockstep.launch.store_link import StoreLostError
from lockstep.membership.failure_report import FailureReport

_POLL_S = 0.05
_LOOK_EVERY_S = 0.25
_SETTLE_S = 0.25  # what kills one worker may kill others at the same moment
# Signals that a process brings upon itself: the program has failed.
_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}


@dataclass(frozen=True, kw_only=True)
class Casualties:
    """What became of the workers of a host in a round that ended early."""

    losses: Mapping[int, str] = field(default_factory=dict)  # local rank of each lost worker -> how it was lost
    has_failed: bool = False  # whether the program has failed


def find_casualties(
    failures: Mapping[int, WorkerFailure],
    running: Mapping[int, bool],
    report: FailureReport | None,
    *,
    first_worker: int,
) -> Casualties:
    """Tells lost workers and failures of the program from workers that only lost others. Pure.

    A signal that the launcher did not send makes a worker lost, and so does the report of the others, though the worker
    may still be there; a stopped one is lost without it.

    Args:
        failures: the workers that have ended with an error, by local rank.
        running: local rank of those that have not ended -> whether they are stopped.
        report: why the workers ended, as they told each other.
        first_worker: the rank of this host's first worker.
    """
    losses, has_failed = {}, False
    named = _named_lost(report)
    for local, failure in failures.items():
        code = failure.exit_code or 0
        if first_worker + local == named and report is not None:
            losses[local] = report.reason.partition(" (last status")[0]
        elif failure.record is None and code < 0 and -code not in _FAULTS:
            losses[local] = f"worker {failure.worker} {failure.what}"
        elif report is None or report.worker == failure.worker:
            has_failed = True
    for local, is_stopped in running.items():
        worker = first_worker + local
        if worker == named and report is not None:
            losses[local] = report.reason.partition(" (last status")[0]
        elif is_stopped:
            losses[local] = f"worker {worker} was stopped"
    return Casualties(losses=losses, has_failed=has_failed)


def _named_lost(report: FailureReport | None) -> int | None:
    """The worker that the others call lost; None if none is, or one has reported its own failure."""
    return None if report is None or report.worker == report.reporter else report.worker


class ElasticAgent(Agent):
    """The agent of one host in an elastic job."""

    def __init__(self, spec: WorkerSpec, setup: WorkerSetup, *, limits: Limits, meeting: ElasticMeeting) -> None:
        super().__init__(spec, setup, limits=limits)
        self._meeting, self._elastic = meeting, meeting.elastic
        self._slots = list(range(setup.workers))  # those of the workers that run, by local rank
        self._lost_slots: set[int] = set()
        self._began_s = 0.0
        self._saves_on_sigterm = False  # some time some worker handled the signal

    def _on_worker_end(self, running: list[int]) -> None:
        """Leaves stopped workers as they are: they count as lost."""

    def _invoke_run(self, role: str = "worker") -> RunResult:
        # torch's own loop (``SimpleElasticAgent._invoke_run``) restarts the workers of a host after any failure, so it
        # is replaced here; ranks, starting and stopping remain torch's.
        group = self._worker_group
        try:
            while True:
                try:
                    self._initialize_workers(group)
                except JobEndedError as ended:
                    return self._end(ended)
                end = self._watch()
                if end is None:
                    return self._success()
                self._end_round(end)
        except SignalException as error:
            first = self._meeting.host_state.index == 0
            if error.sigval == signal.SIGTERM:
                self._meeting.end_round(RoundEnd.STOP if first else RoundEnd.REJOIN)
            raise

    def _end(self, ended: JobEndedError) -> RunResult:
        """The result on this host when the launchers have agreed that the job ends."""
        if self._meeting.plan.finished:
            return self._success()
        if not (self._meeting.host_state.failure or self._meeting.host_state.losses):
            raise ended
        return RunResult(state=WorkerState.FAILED)

    def _success(self) -> RunResult:
        # As torch's agent does for a program: it expects a value of every worker.
        values = {int(worker.global_rank): None for worker in self._worker_group.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    # ---- the beginning of a round

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Gives the workers of this host their ranks, after those of the hosts before it."""
        plan = self._meeting.plan
        size, total, first = plan.sizes[group_rank], sum(plan.sizes), sum(plan.sizes[:group_rank])
        if size == self._elastic.maximum:
            self._lost_slots.clear()
        self._slots = [slot for slot in range(self._elastic.maximum) if slot not in self._lost_slots]
        # The workers that are left keep their cores and GPUs; only their ranks close up.
        self._setup.slots = self._slots
        spec.local_world_size = size
        # torch's agent tells the workers that they were restarted so often; each round's number is its own.
        self._remaining_restarts = spec.max_restarts - self._meeting.plan.number
        return [
            Worker(
                local_rank=local,
                global_rank=first + local,
                role_rank=first + local,
                world_size=total,
                role_world_size=total,
            )
            for local in range(size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self._began_s = time.monotonic()
        if worker_group.workers:
            return super()._start_workers(worker_group)
        # Nothing is started where no worker is left, and the exit codes of the last round must not be read again.
        self._pcontext = None
        handle_sigterm_once(self._ignored_signals)
        return {}

    # ---- during a round

    def _watch(self) -> RoundEnd | None:
        """Waits until the round is over. Returns why it is, or None if all workers have ended normally."""
        look_s, is_reported = 0.0, False
        while True:
            threading.Event().wait(_POLL_S)
            codes = self.exit_codes.values()
            if any(codes) or self.waits_after_failure():
                return RoundEnd.LOSS
            # Exits are looked for every 0.05 s, and the launchers' store only every 0.25 s, so that it is not kept busy
            # by waiting.
            if time.monotonic() < look_s:
                continue
            look_s = time.monotonic() + _LOOK_EVERY_S
            if (end := self._meeting.round_end()) is not None:
                return end
            with suppress(StoreLostError):
                if _named_lost(self._meeting.failure_report()) is not None:
                    return RoundEnd.LOSS  # the others will end too, but that takes them a while
            running = any(code is None for code in codes)
            if (running or not codes) and self._should_rejoin():
                return RoundEnd.REJOIN
            if not running and not is_reported:
                self._meeting.report_done()
                is_reported = True
            if not running and self._meeting.all_done():
                return None

    def _should_rejoin(self) -> bool:
        """Whether it is time to start lost workers again, or to take in hosts that wait.

        Programs that save on SIGTERM do it only at times, as ``BackupAndRestore`` does during ``fit``. Outside these
        they are left alone: they would lose what they have done.
        """
        handles = [_handles_sigterm(pid) for pid in self._pids().values()]
        self._saves_on_sigterm = self._saves_on_sigterm or any(handles)
        if time.monotonic() < self._began_s + self._elastic.rejoin_s:
            return False
        if not self._lost_slots and not self._meeting.num_nodes_waiting():
            return False
        return all(handles) or not self._saves_on_sigterm

    def _pids(self) -> dict[int, int]:
        return dict(self._pcontext.pids()) if self._pcontext is not None and self._worker_group.workers else {}

    # ---- the end of a round

    def _end_round(self, end: RoundEnd) -> None:
        """Ends the workers, and sets the state that the other launchers are told at the next meeting."""
        state, casualties = self._meeting.host_state, Casualties()
        back = 0
        self._meeting.end_round(end)
        if end == RoundEnd.LOSS:
            casualties = self._find_casualties()
            self._shutdown(signal.SIGKILL)
            self._lost_slots |= {self._slots[local] for local in casualties.losses}
        else:
            self._shutdown(signal.SIGTERM)
            back = len(self._lost_slots)
            self._lost_slots.clear()
        if end == RoundEnd.STOP:
            raise SignalException("the first host was told to end", sigval=signal.SIGTERM)
        first = self.first_failure() if casualties.has_failed else None
        self._meeting.host_state = replace(
            state,
            survivors=state.capacity - len(self._lost_slots),
            losses=tuple(casualties.losses.values()),
            back=back,
            failure=f"worker {first.worker} of {self.num_workers} {first.what}" if first is not None else "",
            finished=end == RoundEnd.REJOIN and not any(self.exit_codes.values()),
            restarts=self._meeting.plan.restarts,
        )

    def _find_casualties(self) -> Casualties:
        threading.Event().wait(_SETTLE_S)
        codes = self.exit_codes
        if self._exits is not None:
            self._ended_ns = self._exits.ended_ns
        failures = {
            failure.worker - self._first_worker: failure for failure in self.failures() if failure.exit_code != 0
        }
        running = {local: _is_stopped(self._pids()[local]) for local, code in codes.items() if code is None}
        try:
            report = self._meeting.failure_report()
        except StoreLostError:
            return Casualties()  # this host was cut off, so its workers ended because they lost others
        return find_casualties(failures, running, report, first_worker=self._first_worker)

    @property
    def _first_worker(self) -> int:
        workers = self._worker_group.workers
        return int(workers[0].global_rank) if workers else 0


def _status(pid: int) -> dict[str, str]:
    """What the kernel says of a process, by name; empty if it has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _handles_sigterm(pid: int) -> bool:
    # SigCgt is a bit mask of the signals with a handler (proc(5)); ``signal.getsignal`` can be asked by the process
    # itself only.
    caught = int(_status(pid).get("SigCgt", "0"), 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def _is_stopped(pid: int) -> bool:
    return _status(pid).get("State", "").startswith("T ")
