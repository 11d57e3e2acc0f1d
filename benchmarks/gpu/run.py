"""One run: the tests that need a GPU, the device's rates, the trials while the budget lasts, and the dated table.

run_suite -> look_at_device -> run_budgeted -> result_of -> render_gpu -> DATE-gpu-NAME.md, .json
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.gpu.apart import apart
from benchmarks.gpu.budget import FLOORS_LIMIT_S, Budget
from benchmarks.gpu.figures import GpuResult, result_of
from benchmarks.gpu.floors import DeviceFacts, look_at_device, named_device
from benchmarks.gpu.markdown import GpuConditions, render_gpu
from benchmarks.gpu.presence import NOTHING_TO_RUN, reason_not_to_run
from benchmarks.gpu.roster import Entrant, entrants
from benchmarks.gpu.rounds import in_turn, per_step, run_budgeted
from benchmarks.gpu.setting import DeviceType, Pace
from benchmarks.gpu.suite import SuiteOutcome, run_suite
from benchmarks.gpu.work import FULL, TINY, gpu_workloads, precision_of
from benchmarks.harness import Absence, Sample
from benchmarks.trial import Workload
from lockstep.atomic_files import atomic_write
from lockstep.errors import ConfigError, ReplicaError
from lockstep.scaling.machine import Machine, this_machine

_log = logging.getLogger("benchmarks")

Entered = list[tuple[Workload, list[Entrant]]]


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """What was asked for.

    Args:
        command: what was typed, for the table.
        date: YYYY-MM-DD.
        output: folder of the table.
        device: "cpu" tries the programs at tiny sizes, and its table says so.
        pace: of every trial.
        rounds: at most.
        budget: of everything.
        workloads: "mlm", "mobilenetv2", each in both precisions; empty for all.
        only: names of contenders; empty for all.
        tests: folder of the tests; None runs none.
    """

    command: str
    date: str
    output: Path
    device: DeviceType
    pace: Pace
    rounds: int
    budget: Budget
    workloads: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    tests: Path | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds} was given, expected at least 1; raise it")


def run_gpu(settings: GpuSettings) -> int:
    """Runs everything, and says how far it is.

    Returns:
        0 where the table was written and every test passed, ``NOTHING_TO_RUN`` where there is no GPU, else 1.
    """
    if settings.device == "cuda" and (reason := reason_not_to_run()):
        _log.error("%s; nothing was run, no table was written", reason)
        return NOTHING_TO_RUN
    started_s = time.monotonic()
    entered = enter(settings)
    planned = in_turn(entered)
    plan = settings.budget.text(len(planned), sum(one.entrant.expected_s for one in planned if not one.entrant.absent))
    _log.info("%s", plan)
    machine = this_machine()
    suite = None if settings.tests is None else run_suite(settings.tests, limit_s=settings.budget.tests_s)
    sizes = FULL if settings.device == "cuda" else TINY
    facts = _facts(settings.device, partial(look_at_device, settings.device, sizes))
    rounds = run_budgeted(
        planned,
        pace=settings.pace,
        cores=machine.cores,
        rounds=settings.rounds,
        budget=settings.budget,
        started_s=started_s,
        progress=partial(_say, settings.pace),
    )
    conditions = _conditions(settings, machine, facts, plan, suite, time.monotonic() - started_s)
    samples = [per_step(sample, settings.pace) for sample in rounds.samples]
    results = _results(entered, samples, rounds.absences, facts)
    _log.info("\n%s", render_gpu(conditions, results))
    path = write_gpu_report(settings.output, conditions, results, samples)
    _log.info("written to %s", path)
    return 0 if suite is None or suite.ok else 1


def _facts(device: DeviceType, look: Callable[[], DeviceFacts]) -> DeviceFacts:
    """The device's rates; where they cannot be measured its name alone, and why: the trials may run all the same."""
    try:
        return apart(look, limit_s=FLOORS_LIMIT_S)
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
    names = dict.fromkeys(one.contender.name for _, all_of_it in entered for one in all_of_it)
    unknown = [name for name in settings.only if name not in names]
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)} names no contender; choose from {', '.join(map(repr, names))}")
    return [
        (workload, [one for one in all_of_it if not settings.only or one.contender.name in settings.only])
        for workload, all_of_it in entered
    ]


def write_gpu_report(
    folder: Path, conditions: GpuConditions, results: Sequence[GpuResult], samples: Sequence[Sample]
) -> Path:
    """Writes ``DATE-gpu-NAME.md`` and ``.json``, each whole or not at all; a run of the same day is replaced.

    Returns:
        The path of the Markdown file.
    """
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
    base = folder / f"{conditions.date}-gpu-{slug(conditions)}"
    atomic_write(base.with_name(f"{base.name}.json"), json.dumps(record, indent=1) + "\n")
    return atomic_write(base.with_name(f"{base.name}.md"), render_gpu(conditions, results))


def slug(conditions: GpuConditions) -> str:
    """The device's name as part of a file's: ``nvidia-h100-80gb-hbm3``."""
    if conditions.device == "cpu":
        return "programs-tried-on-a-cpu"
    return re.sub(r"[^a-z0-9]+", "-", conditions.facts.name.lower()).strip("-")


def _results(
    entered: Entered, samples: Sequence[Sample], absences: Sequence[Absence], facts: DeviceFacts
) -> list[GpuResult]:
    return [
        result_of(
            workload,
            [one.contender for one in all_of_it],
            samples,
            absences=absences,
            floor=facts.floor(workload.name, precision_of(workload)),
            used_before_mb=facts.used_mb,
        )
        for workload, all_of_it in entered
    ]


def _conditions(
    settings: GpuSettings, machine: Machine, facts: DeviceFacts, plan: str, suite: SuiteOutcome | None, spent_s: float
) -> GpuConditions:
    return GpuConditions(
        date=settings.date,
        machine=machine,
        device=settings.device,
        facts=facts,
        command=settings.command,
        pace=settings.pace,
        budget=plan,
        spent_s=spent_s,
        suite=suite,
    )


def _say(pace: Pace, outcome: Sample | Absence, done: int, planned: int) -> None:
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
