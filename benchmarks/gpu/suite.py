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

import lockstep as ls
from benchmarks.gpu.contenders import Entrant, entrants
from benchmarks.gpu.gpu_tests import run_suite
from benchmarks.gpu.loops import DeviceType, Pace
from benchmarks.gpu.report import GpuConditions, render_gpu, section_of
from benchmarks.gpu.roofline import DeviceFacts, look_at_device, named_device
from benchmarks.gpu.workloads import FULL, TINY, Sizes, gpu_workloads
from benchmarks.harness import Absence, Progress, Rounds, Sample, run_trial
from benchmarks.report import NothingToRunError, Report, Section, sections_record
from benchmarks.trial import Conditions, Trial, Workload, select_contenders
from benchmarks.trial import Pace as DefaultPace
from lockstep.errors import ConfigError, LockstepError

PACE = DefaultPace(warm_up=10, steps=10, rounds=3)
_LAPS = 3
TOTAL_S = 600.0
"""Ten minutes, with everything."""
WRITING_S = 15.0
"""Kept for ending processes and writing the table."""
ROOFLINE_LIMIT_S = 90.0
"""For measuring the device's rates and counting the steps' work."""
TRIAL_LIMIT_S = 150.0
"""For one trial; torch.compile is what takes long."""
_LEAST_S = 60.0
_TESTS_PART = 0.4
_MARGIN = 1.25
_LEAST_TORCH = (2, 11)
_log = logging.getLogger("benchmarks")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The seconds of a whole run, at least a minute."""

    total_s: float = TOTAL_S

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
            f"budget {self.total_s:.0f} s: tests at most {self.tests_s:.0f}, rates and roofline at most "
            f"{ROOFLINE_LIMIT_S:.0f}, writing {WRITING_S:.0f}; the rest for {trials} trials a round, expected to take "
            f"{expected_s:.0f}; more rounds while a whole one fits"
        )

    def refusal(self, expected_s: float, spent_s: float) -> str:
        """Why a trial did not begin."""
        return (
            f"of the {self.total_s:.0f} s for everything {self.left_s(spent_s):.0f} were left, and it is expected to "
            f"take {expected_s:.0f}; run it with a larger --budget-s, or alone with --only"
        )


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A trial to come."""

    workload: Workload
    entrant: Entrant

    @property
    def key(self) -> tuple[str, str]:
        return self.workload.name, self.entrant.contender.name

    def absence(self, reason: str) -> Absence:
        return Absence(workload=self.workload.name, contender=self.entrant.contender.name, reason=reason)


Entered = Sequence[tuple[Workload, Sequence[Entrant]]]


def in_turn(entered: Entered) -> list[Planned]:
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
    """Runs the trials of a round (``planned``) in turn, and further rounds while there is time, at most ``rounds``.

    Who fails, or finds no time in the first round, is absent, and takes no further part; the others' numbers stand.
    ``started_s`` is ``time.monotonic()`` at the beginning of the whole run.
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
            outcome = _outcome(one, index, pace, cores, budget, began_s - started_s, run)
            taken.append(time.monotonic() - began_s)
            if isinstance(outcome, Absence):
                absences[one.key] = outcome
            else:
                samples.append(outcome)
            progress(outcome, done, len(present))
    complete = tuple(sample for sample in samples if (sample.workload, sample.contender) not in absences)
    return Rounds(samples=complete, absences=tuple(absences.values()))


def _outcome(
    one: Planned,
    index: int,
    pace: Pace,
    cores: int,
    budget: Budget,
    spent_s: float,
    run: Callable[[Trial, int], Sample],
) -> Sample | Absence:
    expected_s = one.entrant.expected_s
    if index == 0 and not budget.admits(expected_s, spent_s):
        return one.absence(budget.refusal(expected_s, spent_s))
    # For the step timer the warm-up is one step, and so is each timed lap.
    trial = Trial(workload=one.workload, contender=one.entrant.contender, warm_up=1, steps=pace.laps, cores=cores)
    try:
        return run(replace(trial, limit_s=budget.trial_limit_s(spent_s)), index)
    except LockstepError as error:
        return one.absence(str(error))


def per_step(sample: Sample, pace: Pace) -> Sample:
    """A sample whose times, CPU time included, are of a step instead of a lap. Pure."""
    step_ms = tuple(lap_ms / pace.lap_steps for lap_ms in sample.step_ms)
    return replace(sample, step_ms=step_ms, cpu_ms=sample.cpu_ms / pace.lap_steps)


def reason_not_to_run() -> str:
    """Why nothing can be run here; empty where it can."""
    version = torch.__version__
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < _LEAST_TORCH:
        return f"torch {version} is older than {_LEAST_TORCH[0]}.{_LEAST_TORCH[1]}, which this package needs"
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"no CUDA GPU here: torch {version} is built without CUDA"
    return f"no CUDA GPU here: torch {version} sees none; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


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
    """Runs the tests that need a GPU, measures the rates of GPU 0, and then the contenders while the budget lasts.

    ``--steps`` are those of a lap, at whose end the device is waited for.

    Raises:
        NothingToRunError: there is no GPU.
    """
    device: DeviceType = asked.device
    pace = Pace(warm_up=conditions.warm_up, lap_steps=conditions.steps, laps=_LAPS)
    budget = Budget(total_s=asked.budget_s)
    if conditions.rounds < 1:
        raise ConfigError(f"rounds={conditions.rounds} was given, expected at least 1; raise it")
    if device == "cuda" and (reason := reason_not_to_run()):
        raise NothingToRunError(f"{reason}; nothing was run, no table was written")
    started_s = time.monotonic()
    entered = enter(device, pace, asked.workload, asked.only)
    planned = in_turn(entered)
    plan = budget.text(len(planned), sum(one.entrant.expected_s for one in planned if not one.entrant.absent))
    _log.info("%s", plan)
    tests = None if asked.tests is None else run_suite(asked.tests.resolve(), limit_s=budget.tests_s)
    facts = device_facts(device, partial(look_at_device, device, _sizes(device)))
    rounds = run_budgeted(
        planned,
        pace=pace,
        cores=conditions.machine.cores,
        rounds=conditions.rounds,
        budget=budget,
        started_s=started_s,
        progress=partial(_log_progress, pace),
    )
    samples = [per_step(sample, pace) for sample in rounds.samples]
    sections = [
        section_of(workload, [one.contender for one in all_of_it], samples, absences=rounds.absences, facts=facts)
        for workload, all_of_it in entered
    ]
    described = GpuConditions(
        date=conditions.date,
        machine=conditions.machine,
        device=device,
        facts=facts,
        command=conditions.command,
        pace=pace,
        budget=plan,
        spent_s=time.monotonic() - started_s,
        suite=tests,
    )
    return gpu_report(described, sections, samples, ok=tests is None or tests.ok)


def device_facts(device: DeviceType, look: Callable[[], DeviceFacts]) -> DeviceFacts:
    """The device's rates; where they cannot be measured its name alone, and why: the trials may run all the same."""
    try:
        return ls.launch(look, workers=1, timeout_s=ROOFLINE_LIMIT_S)
    except LockstepError as error:
        return named_device(device, trouble=str(error))


def _sizes(device: DeviceType) -> Sizes:
    return FULL if device == "cuda" else TINY


def enter(device: DeviceType, pace: Pace, workloads: Sequence[str], only: Sequence[str] | None) -> Entered:
    """The workloads that are wanted ("mlm", "mobilenetv2"; all if empty), each with the contenders that are.

    Raises:
        ConfigError: a name is nobody's.
    """
    known = gpu_workloads(_sizes(device))
    wanted = [name for name in known if not workloads or name.partition("-")[0] in workloads]
    if not wanted:
        raise ConfigError(f"--workload {' '.join(workloads)} is not run on a GPU; choose mlm or mobilenetv2")
    entered = [(known[name], entrants(known[name], device, pace)) for name in wanted]
    chosen = select_contenders([one.contender for _, all_of_it in entered for one in all_of_it], only)
    names = {contender.name for contender in chosen}
    return [(workload, [one for one in all_of_it if one.contender.name in names]) for workload, all_of_it in entered]


def gpu_report(
    conditions: GpuConditions, sections: Sequence[Section], samples: Sequence[Sample], *, ok: bool = True
) -> Report:
    """The report of a run; ``ok`` is whether the tests passed."""
    rooflines = {section.workload: conditions.facts.roofline(section.workload) for section in sections}
    record = {
        "conditions": asdict(conditions),
        **sections_record(sections),
        "rooflines": {name: asdict(roofline) for name, roofline in rooflines.items() if roofline is not None},
        "samples": [asdict(sample) for sample in samples],
    }
    text = render_gpu(conditions, sections)
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
