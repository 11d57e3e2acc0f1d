"""``verify``, the entry point, and its report: as text for a person and as JSON for a program."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

from lockstep.report import text_table
from lockstep.verify.causes import Finding, explain
from lockstep.verify.compare import KINDS, NOISE_FACTOR, Comparison, Difference, Tolerance
from lockstep.verify.config import VerifyConfig
from lockstep.verify.experiments import ExperimentRunner, Progress

MAX_TABLE_ROWS = 8
_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One pair of runs."""

    what: str  # what was compared
    outcome: str  # the first difference beyond rounding, or "equal"


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of a verification."""

    config: VerifyConfig  # the verification
    comparison: Comparison  # N replicas with one, the program as written
    tolerance: Tolerance  # what counted as rounding
    first: Difference | None = None  # the first difference beyond rounding; None if there is none
    findings: tuple[Finding, ...] = ()  # the causes; empty if nothing differs, or if no hypothesis explains it
    experiments: tuple[Experiment, ...] = field(default=(), repr=False)  # every pair of runs, in order

    @property
    def equal(self) -> bool:
        """Whether N replicas computed what one replica computes, up to rounding."""
        return self.first is None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong: the runs are equal, or differ by dropout alone, whose masks are a replica's own."""
        return self.equal or (bool(self.findings) and all(finding.by_definition for finding in self.findings))

    def largest(self) -> list[Difference]:
        """The largest relative difference of each kind, in the order of a step."""
        found: dict[str, Difference] = {}
        for each in self.comparison.differences:
            if each.kind not in found or each.relative > found[each.kind].relative:
                found[each.kind] = each
        return [found[kind] for kind in KINDS if kind in found]


def verify(config: VerifyConfig, *, progress: Progress | None = None) -> VerifyReport:
    """Runs the program on N replicas and on one, and reports whether they agree and, if not, why.

    Args:
        config: the program, and how many updates to compare.
        progress: called with a line before each pair of runs.

    Raises:
        ConfigError: the program fails by itself, or there is nothing to compare.
        ReplicaError: a run took too long, or the program fails in one of the two runs only.
    """
    runner = ExperimentRunner(config, progress or (lambda line: None))
    first = runner.first(runner.base)
    findings = () if first is None else tuple(explain(runner, first))
    tolerance = runner.tolerance  # may have been measured meanwhile
    return VerifyReport(
        config=config,
        comparison=runner.base,
        tolerance=tolerance,
        first=first,
        findings=findings,
        experiments=tuple(
            Experiment(what=what, outcome=_outcome(comparison.first(tolerance))) for what, comparison in runner.done
        ),
    )


def _outcome(first: Difference | None) -> str:
    if first is None:
        return "equal"
    return f"step {first.step}: {first.kind} {first.name} differs by {first.relative:.1e} of its size"


def render(report: VerifyReport) -> str:
    """The report as text: a table of differences, the verdict and, if there is a difference, its causes."""
    parts = [_title(report), *_notes(report)]
    if report.first is None:
        parts += [_table(report, report.largest()), _equal(report)]
    else:
        beyond = [each for each in report.comparison.differences if not report.tolerance.covers(each)]
        first = sorted(beyond, key=lambda each: each.order)[:MAX_TABLE_ROWS]
        parts += [_table(report, first), _different(report.first), *_causes(report)]
    return "\n\n".join(parts)


def to_json(report: VerifyReport) -> str:
    """The report as a JSON object, with all experiments. Numbers that are not finite are null."""
    comparison = report.comparison
    found: dict[str, Any] = {
        "program": report.config.program.name,
        "equal": report.equal,
        "sound": report.sound,
        "replicas": len(comparison.start.devices),
        "devices": list(comparison.start.devices),
        "updates": len(comparison.steps),
        "asked_updates": report.config.steps,
        "first": None if report.first is None else _as_dict(report, report.first),
        "largest": [_as_dict(report, each) for each in report.largest()],
        "causes": [vars(finding) for finding in report.findings],
        "experiments": [vars(each) for each in report.experiments],
        "tolerance": {
            "relative": report.tolerance.relative,
            "noise_factor": NOISE_FACTOR,
            "measured": bool(report.tolerance.noise),
        },
        "notes": _notes(report),
    }
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _title(report: VerifyReport) -> str:
    comparison, devices = report.comparison, report.comparison.start.devices
    updates = _count(len(comparison.steps), "update")
    return f"{report.config.program.name}: {updates} on {len(devices)} replicas ({', '.join(devices)}) and on one"


def _notes(report: VerifyReport) -> list[str]:
    comparison, notes = report.comparison, []
    if comparison.extra:
        which = "all replicas" if comparison.extra > 0 else "one replica"
        notes.append(f"note: the run on {which} made {_count(abs(comparison.extra), 'update')} more than the other")
    elif len(comparison.steps) < report.config.steps:
        asked = _count(report.config.steps, "update")
        notes.append(f"note: the program ended before the {asked} asked for; those that it made were compared")
    if comparison.ends[0].strategies > 1:
        notes.append(
            f"note: the program made {comparison.ends[0].strategies} strategies of several devices; the first one, on "
            f"{', '.join(comparison.start.devices)}, was compared"
        )
    return notes


def _table(report: VerifyReport, differences: list[Difference]) -> str:
    rows = []
    for each in differences:
        tolerance = report.tolerance.of(each)
        numbers = (each.amount, each.relative, tolerance / each.size if each.size else tolerance)
        rows.append([str(each.step) if each.step else "start", each.kind, each.name, *map(_number, numbers)])
    return text_table(["step", "what", "name", "differs by", "relative", "rounding"], rows)


def _equal(report: VerifyReport) -> str:
    relative = f"{report.tolerance.relative:.1e} of a tensor's largest value"
    measured = f", or {NOISE_FACTOR} times the measured rounding" if report.tolerance.noise else ""
    return f"equal within rounding: nothing differs by more than {relative}{measured}"


def _different(first: Difference) -> str:
    where = f"step {first.step}" if first.step else "before the first step"
    if first.kind == "rows":
        return f"different: {where}, the rows of the global batch ({first.name}) are not the same"
    amount = "cannot be compared" if math.isinf(first.amount) else f"differs by {first.relative:.2g} of its size"
    note = f" ({first.note})" if first.note else ""
    return f"different: {where}, {first.kind} {first.name} is the first that {amount}{note}"


def _causes(report: VerifyReport) -> list[str]:
    if not report.findings:
        tried = "\n".join(f"  {each.what}: {each.outcome}" for each in report.experiments)
        return [f"cause: none of the hypotheses explains it; what was tried:\n{tried}"]
    return [
        "\n".join(
            [
                f"cause: {finding.cause}",
                *_entry("what", finding.description),
                *_entry("tested", finding.tested),
                *_entry("change", finding.advice),
            ]
        )
        for finding in report.findings
    ]


def _entry(name: str, text: str) -> list[str]:
    indent = f"  {name:<8}"
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=" " * 10, break_long_words=False)


def _as_dict(report: VerifyReport, difference: Difference) -> dict[str, Any]:
    numbers = {"relative": difference.relative, "allowed": report.tolerance.of(difference)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in {**vars(difference), **numbers}.items()
    }


def _number(value: float) -> str:
    return "-" if math.isinf(value) else "0" if value == 0 else f"{value:.1e}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
