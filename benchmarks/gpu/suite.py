"""Suite ``gpu``: one CUDA GPU, within a budget of seconds: tests that need it, its rates, then rounds of contenders.

|-- tests, at most their part --|-- rates and roofline --|-- round 1 --|-- round 2, if it fits --|-- report --|
"""

from __future__ import annotations

import logging
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.fresh_process import in_fresh_process
from benchmarks.gpu.contenders import Entrant, entrants
from benchmarks.gpu.gpu_tests import run_suite
from benchmarks.gpu.loops import DeviceType, Pace
from benchmarks.gpu.report import GpuConditions, GpuResult, render_gpu, result_of
from benchmarks.gpu.roofline import DeviceFacts, look_at_device, named_device
from benchmarks.gpu.workloads import FULL, TINY, gpu_workloads, precision_of
from benchmarks.harness import Absence, Progress, Rounds, Sample, run_trial
from benchmarks.report import NothingToRunError, Report
from benchmarks.trial import Conditions, Trial, Workload, select_contenders
from benchmarks.trial import Pace as DefaultPace
from lockstep.errors import ConfigError, LockstepError, ReplicaError

TOTAL_S = 600.0
"""Ten minutes, with everything."""
WRITING_S = 15.0
"""Kept for ending processes and writing the table."""
FLOORS_LIMIT_S = 90.0
"""For measuring the device's rates and counting the steps' work."""
TRIAL_LIMIT_S = 150.0
"""For one trial; torch.compile is what takes long."""
_LEAST_S = 60.0
_TESTS_PART = 0.4
_MARGIN = 1.25


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The seconds of a whole run."""

    total_s: float = TOTAL_S  # from its beginning to its end, at least a minute

    def __post_init__(self) -> None:
        if not self.total_s >= _LEAST_S:
            raise ConfigError(f"budget_s={self.total_s:g} was given, expected at least {_LEAST_S:.0f}; raise it")

    @property
    def tests_s(self) -> float:
        """What the tests may take; what they leave goes to the benchmark."""
        return _TESTS_PART * self.total_s

    def left_s(self, spent_s: float) -> float:
        """What is left for measuring after so many seconds; never below 0."""
        return max(0.0, self.total_s - WRITING_S - spent_s)

    def trial_limit_s(self, spent_s: float) -> float:
        """After how long a trial that begins now is given up."""
        return min(TRIAL_LIMIT_S, self.left_s(spent_s))

    def admits(self, expected_s: float, spent_s: float) -> bool:
        """Whether a trial that is expected to take so long may begin now."""
        return expected_s <= self.left_s(spent_s)

    def admits_round(self, taken_s: Sequence[float], spent_s: float) -> bool:
        """Whether another round may begin: whether as much as the last one's trials took fits, and a margin."""
        return _MARGIN * sum(taken_s) <= self.left_s(spent_s)

    def text(self, trials: int, expected_s: float) -> str:
        """What is planned, for the terminal."""
        return (
            f"budget {self.total_s:.0f} s: tests at most {self.tests_s:.0f}, rates and floors at most "
            f"{FLOORS_LIMIT_S:.0f}, writing {WRITING_S:.0f}; the rest for {trials} trials a round, thought to take "
            f"{expected_s:.0f}; more rounds while a whole one fits"
        )

    def refusal(self, expected_s: float, spent_s: float) -> str:
        """Why a trial did not begin."""
        return (
            f"of the {self.total_s:.0f} s for everything {self.left_s(spent_s):.0f} were left, and it is thought to "
            f"take {expected_s:.0f}; run it with a larger --budget-s, or alone with --only"
        )


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A trial to come."""

    workload: Workload  # the work
    entrant: Entrant  # who does it

    @property
    def key(self) -> tuple[str, str]:
        """By which its outcome is found."""
        return self.workload.name, self.entrant.contender.name

    def absence(self, reason: str) -> Absence:
        """That it did not run."""
        return Absence(workload=self.workload.name, contender=self.entrant.contender.name, reason=reason)


def in_turn(entered: Sequence[tuple[Workload, Sequence[Entrant]]]) -> list[Planned]:
    """The order of a round: workload by workload those who are no peers, then likewise the peers. Pure."""
    planned = [Planned(workload=workload, entrant=each) for workload, all_of_it in entered for each in all_of_it]
    return sorted(planned, key=lambda one: one.entrant.contender.role == "peer")


def run_budgeted(
    planned: Sequence[Planned],
    *,
    pace: Pace,
    cores: int,
    rounds: int,
    budget: Budget,
    started_s: float,
    progress: Progress,
    run: Callable[[Trial, int], Sample] = run_trial,
) -> Rounds:
    """Runs the trials of a round in turn, and further rounds while there is time.

    Who fails, or finds no time in the first round, is absent, and takes no further part; the others' numbers stand.

    Args:
        planned: the trials of a round, in order.
        pace: of every trial.
        cores: of the machine.
        rounds: at most.
        budget: of the whole run.
        started_s: ``time.monotonic()`` at its beginning.
        progress: told of each outcome.
        run: runs one trial.
    """
    absences = {one.key: one.absence(one.entrant.absent) for one in planned if one.entrant.absent}
    samples: list[Sample] = []
    taken: list[float] = []
    for index in range(rounds):
        present = [one for one in planned if one.key not in absences]
        if index and not (present and budget.admits_round(taken, time.monotonic() - started_s)):
            break
        taken = []
        for done, one in enumerate(present, start=1):
            began_s = time.monotonic()
            outcome = _outcome(one, index, _trial(one, pace, cores), budget, began_s - started_s, run)
            taken.append(time.monotonic() - began_s)
            if isinstance(outcome, Absence):
                absences[one.key] = outcome
            else:
                samples.append(outcome)
            progress(outcome, done, len(present))
    complete = tuple(sample for sample in samples if (sample.workload, sample.contender) not in absences)
    return Rounds(samples=complete, absences=tuple(absences.values()))


def _trial(one: Planned, pace: Pace, cores: int) -> Trial:
    """For the stopwatch the warm-up is one lap, and so is each timed row of steps."""
    return Trial(workload=one.workload, contender=one.entrant.contender, warm_up=1, steps=pace.laps, cores=cores)


def _outcome(
    one: Planned, index: int, trial: Trial, budget: Budget, spent_s: float, run: Callable[[Trial, int], Sample]
) -> Sample | Absence:
    expected_s = one.entrant.expected_s
    if index == 0 and not budget.admits(expected_s, spent_s):
        return one.absence(budget.refusal(expected_s, spent_s))
    try:
        return run(replace(trial, limit_s=budget.trial_limit_s(spent_s)), index)
    except LockstepError as error:
        return one.absence(str(error))


def per_step(sample: Sample, pace: Pace) -> Sample:
    """A sample whose times are of a step instead of a lap; CPU time too. Pure."""
    return replace(
        sample,
        step_ms=tuple(lap_ms / pace.lap_steps for lap_ms in sample.step_ms),
        cpu_ms=sample.cpu_ms / pace.lap_steps,
    )


NOTHING_TO_RUN = 77
"""The exit code where there is no GPU: neither success nor failure. Automake and Meson take it for a skipped test."""
_LEAST = (2, 11)


def reason_not_to_run() -> str:
    """Why nothing can be run here; empty where it can."""
    version = torch.__version__
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < _LEAST:
        return f"torch {version} is older than {_LEAST[0]}.{_LEAST[1]}, which this package needs"
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"no CUDA GPU here: torch {version} is built without CUDA"
    return f"no CUDA GPU here: torch {version} sees none; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


_log = logging.getLogger("benchmarks")

Entered = list[tuple[Workload, list[Entrant]]]


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """What is measured."""

    device: DeviceType  # "cpu" tries the programs at tiny sizes, and the report says so
    pace: Pace  # of every trial
    rounds: int  # at most
    budget: Budget  # of everything
    workloads: tuple[str, ...] = ()  # "mlm", "mobilenetv2", each in both precisions; empty for all
    only: tuple[str, ...] | None = None  # names of contenders; None for all
    tests: Path | None = None  # folder of the tests; None runs none

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds} was given, expected at least 1; raise it")


def run_gpu(settings: GpuSettings, conditions: Conditions) -> Report:
    """Runs the tests that need a GPU, measures the device's rates, and then the contenders while the budget lasts.

    Raises:
        NothingToRunError: there is no GPU.
    """
    if settings.device == "cuda" and (reason := reason_not_to_run()):
        raise NothingToRunError(f"{reason}; nothing was run, no table was written")
    started_s = time.monotonic()
    entered = enter(settings)
    planned = in_turn(entered)
    plan = settings.budget.text(len(planned), sum(one.entrant.expected_s for one in planned if not one.entrant.absent))
    _log.info("%s", plan)
    tests = None if settings.tests is None else run_suite(settings.tests, limit_s=settings.budget.tests_s)
    sizes = FULL if settings.device == "cuda" else TINY
    facts = _facts(settings.device, partial(look_at_device, settings.device, sizes))
    rounds = run_budgeted(
        planned,
        pace=settings.pace,
        cores=conditions.machine.cores,
        rounds=settings.rounds,
        budget=settings.budget,
        started_s=started_s,
        progress=partial(_log_progress, settings.pace),
    )
    samples = [per_step(sample, settings.pace) for sample in rounds.samples]
    results = [
        result_of(
            workload,
            [one.contender for one in all_of_it],
            samples,
            absences=rounds.absences,
            floor=facts.floor(workload.name, precision_of(workload)),
            used_before_mb=facts.used_mb,
        )
        for workload, all_of_it in entered
    ]
    described = GpuConditions(
        date=conditions.date,
        machine=conditions.machine,
        device=settings.device,
        facts=facts,
        command=conditions.command,
        pace=settings.pace,
        budget=plan,
        spent_s=time.monotonic() - started_s,
        suite=tests,
    )
    return gpu_report(described, results, samples, ok=tests is None or tests.ok)


def _facts(device: DeviceType, look: Callable[[], DeviceFacts]) -> DeviceFacts:
    """The device's rates; where they cannot be measured its name alone, and why: the trials may run all the same."""
    try:
        return in_fresh_process(look, limit_s=FLOORS_LIMIT_S)
    except ReplicaError as error:
        return named_device(device, trouble=str(error))


def enter(settings: GpuSettings) -> Entered:
    """The workloads that are wanted, each with the contenders that are.

    Raises:
        ConfigError: a name is nobody's.
    """
    known = gpu_workloads(FULL if settings.device == "cuda" else TINY)
    wanted = [name for name in known if not settings.workloads or name.partition("-")[0] in settings.workloads]
    if not wanted:
        raise ConfigError(f"--workload {' '.join(settings.workloads)} is not run on a GPU; choose mlm or mobilenetv2")
    entered = [(known[name], list(entrants(known[name], settings.device, settings.pace))) for name in wanted]
    select_contenders([one.contender for _, all_of_it in entered for one in all_of_it], settings.only)
    return [
        (workload, [one for one in all_of_it if not settings.only or one.contender.name in settings.only])
        for workload, all_of_it in entered
    ]


def gpu_report(
    conditions: GpuConditions, results: Sequence[GpuResult], samples: Sequence[Sample], *, ok: bool = True
) -> Report:
    """The report of a run; ``ok`` is whether the tests passed."""
    record = {
        "conditions": asdict(conditions),
        "targets": [
            {"workload": result.workload.name, **asdict(target), "verdict": target.verdict}
            for result in results
            for target in result.targets
        ],
        "floors": {result.workload.name: asdict(result.floor) for result in results if result.floor is not None},
        "absences": [asdict(absence) for result in results for absence in result.absences],
        "samples": [asdict(sample) for sample in samples],
    }
    text = render_gpu(conditions, results)
    return Report(name=f"gpu-{slug(conditions)}", date=conditions.date, text=text, record=record, ok=ok)


def slug(conditions: GpuConditions) -> str:
    """The device's name as part of a file's: ``nvidia-h100-80gb-hbm3``."""
    if conditions.device == "cpu":
        return "programs-tried-on-a-cpu"
    return re.sub(r"[^a-z0-9]+", "-", conditions.facts.name.lower()).strip("-")


def _log_progress(pace: Pace, outcome: Sample | Absence, done: int, planned: int) -> None:
    who = f"{done:3d}/{planned}  {outcome.workload:16s} {outcome.contender:22s}"
    if isinstance(outcome, Absence):
        _log.warning("%s not run: %s", who, outcome.reason)
        return
    _log.info(
        "%s %9.2f ms a step, ready after %5.1f s, torch has taken %6.0f MB, loss %.4f",
        who,
        median(outcome.step_ms) / pace.lap_steps,
        outcome.first_step_s,
        outcome.device_reserved_mb,
        outcome.loss,
    )


PACE = DefaultPace(warm_up=10, steps=10, rounds=3)
_LAPS = 3


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", default=(), help="mlm, mobilenetv2; both by default")
    parser.add_argument("--tests", type=Path, help="folder of tests: first run those that need a GPU, as make gpu does")
    parser.add_argument(
        "--budget-s", type=float, default=TOTAL_S, help=f"seconds for everything (default {TOTAL_S:.0f})"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the programs at tiny sizes, without a GPU"
    )


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures on GPU 0; ``--steps`` are those of a lap, at whose end the device is waited for."""
    settings = GpuSettings(
        device=asked.device,
        pace=Pace(warm_up=conditions.warm_up, lap_steps=conditions.steps, laps=_LAPS),
        rounds=conditions.rounds,
        budget=Budget(total_s=asked.budget_s),
        workloads=tuple(asked.workload),
        only=asked.only,
        tests=None if asked.tests is None else asked.tests.resolve(),
    )
    return run_gpu(settings, conditions)
