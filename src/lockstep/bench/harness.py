"""Runs trials: fresh processes for each, the contenders in turn, so that a machine that drifts is unfair to nobody.

round 1: A B C    round 2: A B C    ...    one sample each time, compared with the others of its round
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from lockstep.bench.laps import LapRecord, Laps
from lockstep.bench.memory import Memory, memory_of
from lockstep.bench.trial import Seat, Trial
from lockstep.errors import ConfigError, ReplicaError

TRIAL_LIMIT_S = 300.0
_END_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one trial gave.

    Args:
        workload: its name.
        contender: its name.
        round: 0 for the first.
        step_ms: each timed step.
        cpu_ms: CPU time of a timed step, of all threads of all processes, on average.
        exchange_ms: the part of each that was exchange and update; empty where it is not told apart.
        first_step_s: from process start to the end of the first step, of the slowest process.
        loss: of the last step, averaged over the processes.
        memory: of all processes together, during the last step.
    """

    workload: str
    contender: str
    round: int
    step_ms: tuple[float, ...]
    cpu_ms: float
    exchange_ms: tuple[float, ...]
    first_step_s: float
    loss: float
    memory: Memory


def run_rounds(trials: Sequence[Trial], *, rounds: int, progress: Callable[[Sample, int, int], None]) -> list[Sample]:
    """Runs every trial once a round, in turn; checks, which are not counted, in the first round only.

    Args:
        trials: what to run.
        rounds: how often, at least once.
        progress: called with each sample as it comes, how many there are by then, and how many there will be.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds} was given, expected at least 1; raise it")
    plan = plan_rounds(trials, rounds)
    samples: list[Sample] = []
    for index, trial in plan:
        samples.append(run_trial(trial, index))
        progress(samples[-1], len(samples), len(plan))
    return samples


def plan_rounds(trials: Sequence[Trial], rounds: int) -> list[tuple[int, Trial]]:
    """Which trial runs when: pairs of a round and a trial, in order."""
    return [(index, trial) for index in range(rounds) for trial in trials if trial.contender.counted or index == 0]


def run_trial(trial: Trial, index: int = 0) -> Sample:
    """Starts the trial's processes, waits for their last step, looks at their memory, and lets them end.

    Args:
        trial: what to run.
        index: of the round.

    Raises:
        ReplicaError: a process ended before its last step, or took longer than ``TRIAL_LIMIT_S``.
    """
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-"))
        team = _Team(trial, Path(folder))
        cleanup.callback(team.end)
        records = team.records()
        return _sample(trial, index, records, memory_of(team.pids))


class _Team:
    """The processes of one trial."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._trial = trial
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        started_s = time.monotonic()
        for rank in range(trial.contender.processes):
            near, far = context.Pipe()
            seat = Seat(rank=rank, started_s=started_s, store=str(folder / "store"))
            process = context.Process(target=occupy, args=(trial, seat, far), daemon=True)
            process.start()
            far.close()
            self._processes.append(process)
            self._connections.append(near)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def records(self) -> list[LapRecord]:
        """One record of each process; they stay in their last step until ``end``."""
        waiting = dict(zip(self._connections, range(len(self._connections)), strict=True))
        records: dict[int, LapRecord] = {}
        limit = time.monotonic() + TRIAL_LIMIT_S
        while waiting:
            ready = wait(list(waiting), max(0.0, limit - time.monotonic()))
            if not ready:
                raise ReplicaError(
                    f"{self._name} was not done after {TRIAL_LIMIT_S:.0f} s; give it fewer --steps or a faster machine"
                )
            for connection in self._connections:
                if connection in ready:
                    records[waiting.pop(connection)] = self._receive(connection)
        return [records[rank] for rank in sorted(records)]

    def end(self) -> None:
        """Lets the processes go on to their end, and ends those that do not."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_END_LIMIT_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def _receive(self, connection: Connection) -> LapRecord:
        try:
            record: LapRecord = connection.recv()
        except EOFError:
            for process in self._processes:
                process.kill()
            raise ReplicaError(
                f"{self._name} ended before its last step; its own message is above; run it alone with --only"
            ) from None
        return record

    @property
    def _name(self) -> str:
        return f"contender {self._trial.contender.name!r} on workload {self._trial.workload.name!r}"


def occupy(trial: Trial, seat: Seat, connection: Connection) -> None:
    """The life of one process of a trial: train, report inside the last step, wait there until all were measured."""

    def report(record: LapRecord) -> None:
        connection.send(record)
        connection.poll(TRIAL_LIMIT_S)  # the other end says nothing; it closes when the memory has been read

    laps = Laps(warm_up=trial.warm_up, steps=trial.steps, started_s=seat.started_s, report=report)
    trial.contender.body(trial, seat, laps)


def _sample(trial: Trial, index: int, records: Sequence[LapRecord], memory: Memory) -> Sample:
    """One sample of a trial. The steps of several processes are in unison, so rank 0's clock is everybody's."""
    first = records[0]
    return Sample(
        workload=trial.workload.name,
        contender=trial.contender.name,
        round=index,
        step_ms=tuple(1000 * seconds for seconds in first.step_s),
        cpu_ms=1000 * sum(record.cpu_s for record in records) / trial.steps,
        exchange_ms=tuple(1000 * seconds for seconds in first.exchange_s),
        first_step_s=max(record.first_step_s for record in records),
        loss=sum(record.loss for record in records) / len(records),
        memory=memory,
    )
