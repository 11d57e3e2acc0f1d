"""Runs trials: fresh processes for each, the contenders in turn, so that a drift of the machine is shared by all.

round 1: A B C    round 2: A B C    ...    one sample each time, compared with the others of its round
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from secrets import token_hex
from statistics import fmean, median

from benchmarks.step_timer import StepRecord
from benchmarks.trial import Conditions, Contender, Trial, Workload
from lockstep.errors import ConfigError, ReplicaError

_log = logging.getLogger("benchmarks")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Megabytes (2**20 bytes) of one process, or added up over several."""

    peak_mb: float  # the most that was resident at any time (VmHWM); of several processes the sum of their peaks
    rss_mb: float  # resident now; pages that processes share are counted in each
    pss_mb: float  # resident now; a page that n processes share counts 1/n in each


def memory_of(pids: Sequence[int]) -> Memory:
    """The memory of running processes together."""
    parts = [_process_memory(pid) for pid in pids]
    names = [field.name for field in fields(Memory)]
    return Memory(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _process_memory(pid: int) -> Memory:
    now = read_sizes(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    ever = read_sizes(Path(f"/proc/{pid}/status").read_text().splitlines())
    return Memory(peak_mb=ever["VmHWM"], rss_mb=now["Rss"], pss_mb=now["Pss"])


def read_sizes(lines: Iterable[str]) -> dict[str, float]:
    """``{"Rss": 2.1, ...}`` in megabytes from lines such as ``Rss:    2208 kB``; other lines are ignored."""
    columns = (line.split() for line in lines)
    return {column[0].rstrip(":"): int(column[1]) / 1024 for column in columns if column[2:3] == ["kB"]}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The result of one trial."""

    workload: str
    contender: str
    round: int  # from 0
    step_ms: tuple[float, ...]  # each timed step
    cpu_ms: float  # CPU time of a timed step, of all threads of all processes, on average
    exchange_ms: tuple[float, ...]  # exchange and update in each timed step; empty if not measured
    first_step_s: float  # from process start to the end of the first step, of the slowest process
    loss: float  # of the last step, averaged over the processes
    trained: int  # parameters that the optimizer changes
    memory: Memory  # of all processes together, during the last step
    sent_mb: float = 0.0  # MB (10**6 bytes) that left a host in a timed step, on average; 0 if not counted
    device_reserved_mb: float = 0.0  # what torch has taken of a GPU by the last step, in all processes
    device_used_mb: float = 0.0  # what all processes have of that GPU inside the last step
    notes: tuple[str, ...] = ()  # lines from the contender's processes, each once


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A contender that did not run, or not to its end, and why; its samples do not count."""

    workload: str
    contender: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The samples of the contenders that ran in all their rounds, and who did not."""

    samples: tuple[Sample, ...]
    absences: tuple[Absence, ...]


Progress = Callable[[Sample | Absence, int, int], None]
"""Called with each outcome, how many there are by then, and how many there will be."""


def log_progress(outcome: Sample | Absence, done: int, planned: int) -> None:
    """Logs an outcome in one line."""
    who = f"{done:3d}/{planned}  {outcome.workload:12s} {outcome.contender:27s}"
    if isinstance(outcome, Absence):
        _log.warning("%s is left out from here on: %s", who, outcome.reason)
        return
    times = f"{median(outcome.step_ms):8.1f} ms a step, first step after {outcome.first_step_s:5.2f} s"
    peak_mb, loss = outcome.memory.peak_mb, outcome.loss
    _log.info("%s round %d %s, peak %5.0f MB, loss %.4f", who, outcome.round + 1, times, peak_mb, loss)


def run_rounds(trials: Sequence[Trial], *, rounds: int, progress: Progress) -> Rounds:
    """Runs every trial once a round, in turn; checks in the first round only.

    A peer that fails takes no further part: its environment is not ours to mend, and the others' numbers stand.

    Raises:
        ReplicaError: a contender that is no peer failed.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds} was given, expected at least 1; raise it")
    plan = plan_rounds(trials, rounds)
    samples: list[Sample] = []
    absences: dict[tuple[str, str], Absence] = {}
    for done, (index, trial) in enumerate(plan, start=1):
        workload, contender = trial.workload.name, trial.contender
        if (workload, contender.name) in absences:
            continue
        outcome: Sample | Absence
        try:
            outcome = run_trial(trial, index)
            samples.append(outcome)
        except ReplicaError as error:
            if contender.role != "peer":
                raise
            outcome = Absence(workload=workload, contender=contender.name, reason=str(error))
            absences[workload, contender.name] = outcome
        progress(outcome, done, len(plan))
    complete = tuple(sample for sample in samples if (sample.workload, sample.contender) not in absences)
    return Rounds(samples=complete, absences=tuple(absences.values()))


def plan_rounds(trials: Sequence[Trial], rounds: int) -> list[tuple[int, Trial]]:
    """Which trial runs when: pairs of a round and a trial, in order."""
    return [(index, trial) for index in range(rounds) for trial in trials if trial.contender.counted or index == 0]


def run_trial(trial: Trial, index: int = 0) -> Sample:
    """Starts the trial's processes, waits for their last step, reads their memory, and lets them end.

    Raises:
        ReplicaError: a process ended before its last step, or took longer than its limit.
    """
    with ExitStack() as cleanup:
        # Not a TemporaryDirectory: a signal between making one and holding it would leave it there for good. The name
        # is as short: sockets in it have paths of at most 107 bytes.
        folder = Path(tempfile.gettempdir(), f"lockstep-bench-{token_hex(4)}")
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        running = trial.contender.launcher.launch(trial, folder)
        cleanup.callback(running.end)
        records = running.records()
        return _sample(trial, index, records, memory_of(running.pids))


def _sample(trial: Trial, index: int, records: Sequence[StepRecord], memory: Memory) -> Sample:
    """One sample of a trial; a step of several processes is the mean of theirs."""
    return Sample(
        workload=trial.workload.name,
        contender=trial.contender.name,
        round=index,
        step_ms=_mean_ms([record.step_s for record in records]),
        cpu_ms=1000 * sum(record.cpu_s for record in records) / trial.steps,
        exchange_ms=_mean_ms([record.exchange_s for record in records]),
        first_step_s=max(record.first_step_s for record in records),
        loss=fmean(record.loss for record in records),
        trained=records[0].trained,
        memory=memory,
        sent_mb=fmean(record.sent_bytes for record in records) / trial.steps / 1e6,  # each counts its whole host's
        device_reserved_mb=sum(record.device_reserved_mb for record in records),
        device_used_mb=max(record.device_used_mb for record in records),
        notes=tuple(dict.fromkeys(note for record in records for note in record.notes)),
    )


def _mean_ms(processes: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The mean over the processes, step by step."""
    return tuple(1000 * fmean(step) for step in zip(*processes, strict=True))


def trials_of(workload: Workload, contenders: Iterable[Contender], conditions: Conditions) -> list[Trial]:
    """One trial of each contender on all cores, in their order."""
    warm_up, steps, cores = conditions.warm_up, conditions.steps, conditions.machine.cores
    return [
        Trial(workload=workload, contender=contender, warm_up=warm_up, steps=steps, cores=cores)
        for contender in contenders
    ]
