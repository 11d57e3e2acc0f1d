"""Runs trials: fresh processes for each, the contenders in turn, so that a drift of the machine is shared by all.

round 1: A B C    round 2: A B C    ...    one sample each time, compared with the others of its round
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from statistics import fmean, median

from benchmarks.step_timer import StepRecord
from benchmarks.trial import Conditions, Contender, Trial, Workload
from lockstep.errors import ConfigError, ReplicaError

_ROUND_MARGIN = 1.25
_log = logging.getLogger("benchmarks")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Megabytes (2**20 bytes) of one process, or added up over several."""

    peak_mb: float  # the most that was resident at any time (VmHWM); of several processes the sum of their peaks
    pss_mb: float  # resident now; a page that n processes share counts 1/n in each


def memory_of(pids: Sequence[int]) -> Memory:
    """The memory of running processes together."""
    peak_mb = sum(_size_mb(Path(f"/proc/{pid}/status"), "VmHWM") for pid in pids)
    return Memory(peak_mb=peak_mb, pss_mb=sum(_size_mb(Path(f"/proc/{pid}/smaps_rollup"), "Pss") for pid in pids))


def _size_mb(path: Path, name: str) -> float:
    """From a line such as ``Pss:    2208 kB``."""
    (kilobytes,) = (line.split()[1] for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(kilobytes) / 1024


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
    first_step_cpu_s: float  # CPU time of all processes together until then, of a launcher too where one was named
    loss: float  # of the last step, averaged over the processes
    trained: int  # parameters that the optimizer changes
    memory: Memory  # of all processes together, during the last step
    sent_mb: float = 0.0  # MB (10**6 bytes) that left a host in a timed step, on average; 0 if not counted
    extra: tuple[Mapping[str, float], ...] = ()  # further numbers of a suite, of each process
    notes: tuple[str, ...] = ()  # lines from the contender's processes, each once


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A contender that did not run, or not to its end, and why; its samples do not count."""

    workload: str
    contender: str
    reason: str
    failed: bool = False  # whether it is one of ours or a baseline and failed, so that the command does too


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The samples of the contenders that ran in all their rounds, and who did not."""

    samples: tuple[Sample, ...]
    absences: tuple[Absence, ...]


def run_rounds(
    trials: Sequence[Trial],
    *,
    rounds: int,
    until_s: float | None = None,
    after_each: Callable[[Rounds], object] = lambda _: None,
) -> Rounds:
    """Runs every trial once a round, in turn, and logs each.

    A contender that fails takes no further part, and none of its samples counts.

    Args:
        trials: in the order of a round.
        rounds: at most so many.
        until_s: ``time.monotonic()`` at which all must be done. What finds no time in the first round is absent;
            another round begins only if the last one would fit, with a margin.
        after_each: called after each trial with what there is until then.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds} was given, expected at least 1")
    samples: list[Sample] = []
    absences: list[Absence] = []
    present = list(trials)
    for index in range(rounds):
        began_s = time.monotonic()
        for trial in list(present):
            outcome = _outcome(trial, index, until_s)
            if isinstance(outcome, Sample):
                samples.append(outcome)
            elif index and _is_over(until_s):
                break
            else:
                absences.append(outcome)
                present.remove(trial)
            _log_outcome(outcome)
            after_each(_complete(samples, absences))
        ended_s = time.monotonic()
        if until_s is not None and ended_s + _ROUND_MARGIN * (ended_s - began_s) > until_s:
            break
    return _complete(samples, absences)


def _complete(samples: Sequence[Sample], absences: Sequence[Absence]) -> Rounds:
    """Without the samples of contenders that failed later."""
    away = {(absence.workload, absence.contender) for absence in absences}
    complete = tuple(sample for sample in samples if (sample.workload, sample.contender) not in away)
    return Rounds(samples=complete, absences=tuple(absences))


def _outcome(trial: Trial, index: int, until_s: float | None) -> Sample | Absence:
    contender, workload = trial.contender, trial.workload.name
    if until_s is not None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            reason = "no time was left for it; give more time, or name it with --only"
            return Absence(workload=workload, contender=contender.name, reason=reason)
        trial = replace(trial, contender=replace(contender, limit_s=min(contender.limit_s, left_s)))
    try:
        return run_trial(trial, index)
    except ReplicaError as error:
        failed = contender.role != "peer" and not _is_over(until_s)
        return Absence(workload=workload, contender=contender.name, reason=str(error), failed=failed)


def _is_over(until_s: float | None) -> bool:
    return until_s is not None and time.monotonic() >= until_s


def _log_outcome(outcome: Sample | Absence) -> None:
    who = f"{outcome.workload:16s} {outcome.contender:27s}"
    if isinstance(outcome, Absence):
        _log.warning("%s not run: %s", who, outcome.reason)
        return
    times = f"{median(outcome.step_ms):8.1f} ms a step, first step after {outcome.first_step_s:5.2f} s"
    peak_mb, loss = outcome.memory.peak_mb, outcome.loss
    _log.info("round %d  %s %s, peak %5.0f MB, loss %.4f", outcome.round + 1, who, times, peak_mb, loss)


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
        first_step_cpu_s=sum(record.first_step_cpu_s for record in records),
        loss=fmean(record.loss for record in records),
        trained=records[0].trained,
        memory=memory,
        sent_mb=fmean(record.sent_bytes for record in records) / trial.steps / 1e6,  # each counts its whole host's
        extra=tuple(record.extra for record in records),
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
