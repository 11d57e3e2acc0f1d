"""Runs the benchmark of many workers and writes its table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import Absence, Progress, Rounds, Sample, run_rounds
from benchmarks.hosts import Link, why_no_hosts
from benchmarks.lineup import trials_of
from benchmarks.markdown import Conditions
from benchmarks.trial import Contender
from benchmarks.workers.figures import ONE_HOST_LIMIT, TWO_HOSTS_LIMIT, comparisons_of, rows_of
from benchmarks.workers.markdown import Place, Section, render_workers
from benchmarks.workers.roster import free_name, on_free_hosts, on_one_host, on_two_hosts
from benchmarks.workloads import find_workload
from lockstep.atomic_files import atomic_write
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WorkersSettings:
    """What is measured.

    Args:
        workloads: their names.
        link: between the two hosts.
        only: names of the contenders that are wanted; None for all. One with a free link comes with its own.
    """

    workloads: tuple[str, ...]
    link: Link
    only: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        known = [one.name for name in self.workloads for place in _places(name, self.link) for one in place[1]]
        unknown = [name for name in self.only or () if name not in known]
        if unknown:
            names = ", ".join(map(repr, dict.fromkeys(known)))
            raise ConfigError(f"--only {' '.join(unknown)} names no contender; choose from {names}")


@dataclass(frozen=True, kw_only=True)
class WorkersResult:
    """What came of it: the report as text, and all of its numbers."""

    conditions: Conditions
    sections: tuple[Section, ...]
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        """The report as Markdown."""
        return render_workers(self.conditions, self.sections)


def measure_workers(settings: WorkersSettings, conditions: Conditions, progress: Progress) -> WorkersResult:
    """Measures all contenders in turn, on one host and on two; where these cannot be made, it is said why.

    Args:
        settings: what is measured.
        conditions: how.
        progress: told of each trial's outcome.

    Raises:
        ReplicaError: a contender failed.
    """
    reason = why_no_hosts()
    trials = [
        trial
        for name in settings.workloads
        for trial in trials_of(find_workload(name), _taking_part(settings, name, hosts=not reason), conditions)
    ]
    rounds = run_rounds(trials, rounds=conditions.rounds, progress=progress)
    sections = [
        section
        for name in settings.workloads
        for place, contenders in _places(name, settings.link)
        if (section := _section(settings, name, place, contenders, rounds, reason)).rows or section.absences
    ]
    return WorkersResult(conditions=conditions, sections=tuple(sections), samples=rounds.samples)


def write_workers_report(folder: Path, result: WorkersResult) -> Path:
    """Writes ``DATE-workers-cpu-CORES.md`` and ``.json``, each whole or not at all; a run of the same day is replaced.

    Returns:
        The path of the Markdown file.
    """
    record = {
        "conditions": asdict(result.conditions),
        "comparisons": [
            {"workload": section.workload.name, "place": section.place, **asdict(one), "reached": one.reached}
            for section in result.sections
            for one in section.comparisons
        ],
        "absences": [asdict(absence) for section in result.sections for absence in section.absences],
        "samples": [asdict(sample) for sample in result.samples],
    }
    base = folder / f"{result.conditions.date}-workers-cpu-{result.conditions.machine.cores}"
    atomic_write(base.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    return atomic_write(base.with_suffix(".md"), result.text)


def _places(workload: str, link: Link) -> tuple[tuple[Place, tuple[Contender, ...]], ...]:
    return (("one host", on_one_host(workload)), ("two hosts", on_two_hosts(workload, link)))


def _taking_part(settings: WorkersSettings, workload: str, *, hosts: bool) -> list[Contender]:
    """In the order in which they run; one with a free link right after its own."""
    chosen = _chosen(settings, on_one_host(workload))
    free = {contender.name: contender for contender in on_free_hosts(workload)}
    for contender in _chosen(settings, on_two_hosts(workload, settings.link)) if hosts else ():
        chosen += [contender, *([free[name]] if (name := free_name(contender.name)) in free else [])]
    return chosen


def _chosen(settings: WorkersSettings, contenders: Sequence[Contender]) -> list[Contender]:
    return [contender for contender in contenders if settings.only is None or contender.name in settings.only]


def _section(
    settings: WorkersSettings,
    name: str,
    place: Place,
    contenders: Sequence[Contender],
    rounds: Rounds,
    reason: str,
) -> Section:
    chosen = _chosen(settings, contenders)
    present = [] if place == "two hosts" and reason else chosen
    limit = ONE_HOST_LIMIT if place == "one host" else TWO_HOSTS_LIMIT
    return Section(
        workload=find_workload(name),
        place=place,
        link=settings.link.text,
        rows=rows_of(present, rounds.samples, name),
        comparisons=comparisons_of(present, rounds.samples, name, limit=limit),
        absences=tuple(
            Absence(workload=name, contender=one.name, reason=reason) for one in chosen if one not in present
        ),
    )
