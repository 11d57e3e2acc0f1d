"""A report for a person, as plain text, and for a machine, as JSON. Pure."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

from lockstep.report.table import text_table
from lockstep.verify.causes import Finding, explain
from lockstep.verify.compare import KINDS, NOISE_FACTOR, Allowance, Comparison, Difference
from lockstep.verify.config import VerifyConfig
from lockstep.verify.experiments import Laboratory, Progress


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One pair of runs.

    Args:
        what: what was compared.
        outcome: the first thing that differs, or that nothing does.
    """

    what: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What came out.

    Args:
        config: what was asked.
        comparison: of the program as written, N replicas with one.
        allowance: what counted as rounding.
        first: the first thing that differs; None where nothing does.
        findings: the causes; empty where nothing differs, or where no hypothesis explains it.
        experiments: every pair of runs, in order.
    """

    config: VerifyConfig
    comparison: Comparison
    allowance: Allowance
    first: Difference | None = None
    findings: tuple[Finding, ...] = ()
    experiments: tuple[Experiment, ...] = field(default=(), repr=False)

    @property
    def equal(self) -> bool:
        """Whether N replicas gave the numbers of one."""
        return self.first is None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong: the numbers are equal, or differ by dropout alone, which is a replica's own."""
        return self.equal or (bool(self.findings) and all(finding.by_definition for finding in self.findings))

    def largest(self) -> list[Difference]:
        """Of every kind the largest difference relative to its size, in the order of a step."""
        found: dict[str, Difference] = {}
        for each in self.comparison.differences:
            if each.kind not in found or each.relative > found[each.kind].relative:
                found[each.kind] = each
        return [found[kind] for kind in KINDS if kind in found]


def verify(config: VerifyConfig, *, progress: Progress | None = None) -> VerifyReport:
    """Runs the program on N replicas and on one, and says whether they agree and, if not, why.

    Args:
        config: the program, and how far it is to be run.
        progress: called with a line before each pair of runs.

    Raises:
        ConfigError: the program fails by itself, or there is nothing to compare.
        ReplicaError: a run took too long, or the program fails on one of the sides only.
    """
    laboratory = Laboratory(config, progress or (lambda line: None))
    first = laboratory.first(laboratory.base)
    findings = [] if first is None else explain(laboratory, first)
    allowance = laboratory.allowance
    return VerifyReport(
        config=config,
        comparison=laboratory.base,
        allowance=allowance,
        first=first,
        findings=tuple(findings),
        experiments=tuple(
            Experiment(what=what, outcome=_outcome(comparison, allowance)) for what, comparison in laboratory.done
        ),
    )


def _outcome(comparison: Comparison, allowance: Allowance) -> str:
    first = comparison.first(allowance)
    if first is None:
        return "equal"
    return f"step {first.step}: {first.kind} {first.name} differs by {first.relative:.1e} of its size"


MOST_ROWS = 8
_WIDTH = 110


def render(report: VerifyReport) -> str:
    """The verdict with a table of differences and, where there is a difference, its causes."""
    parts = [_title(report), *_notes(report)]
    if report.first is None:
        parts += [_table(report, report.largest()), _equal(report)]
    else:
        parts += [_table(report, _beyond(report)), _different(report, report.first), *_causes(report)]
    return "\n\n".join(parts)


def to_json(report: VerifyReport) -> str:
    """Everything in the text and all experiments, as one JSON object; a number that is not finite is null."""
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
        "rounding": {
            "granted": report.allowance.granted,
            "noise_factor": NOISE_FACTOR,
            "measured": bool(report.allowance.noise),
        },
        "notes": _notes(report),
    }
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _title(report: VerifyReport) -> str:
    comparison = report.comparison
    devices = ", ".join(comparison.start.devices)
    updates = _count(len(comparison.steps), "update")
    return f"{report.config.program.name}: {updates} on {len(comparison.start.devices)} replicas ({devices}) and on one"


def _notes(report: VerifyReport) -> list[str]:
    comparison, notes = report.comparison, []
    if comparison.extra:
        which = "all replicas" if comparison.extra > 0 else "one replica"
        notes.append(f"note: the run on {which} made {_count(abs(comparison.extra), 'update')} more than the other")
    if len(comparison.steps) < report.config.steps and not comparison.extra:
        asked = _count(report.config.steps, "update")
        notes.append(f"note: the program ended before the {asked} asked for; what there is was compared")
    if comparison.ends[0].strategies > 1:
        notes.append(
            f"note: the program made {comparison.ends[0].strategies} strategies of several devices; compared is the "
            f"first, on {', '.join(comparison.start.devices)}"
        )
    return notes


def _beyond(report: VerifyReport) -> list[Difference]:
    """The first that rounding does not explain, from the step of the first on."""
    beyond = [each for each in report.comparison.differences if not report.allowance.explains(each)]
    return sorted(beyond, key=lambda each: each.order)[:MOST_ROWS]


def _table(report: VerifyReport, differences: list[Difference]) -> str:
    rows = [
        [
            str(each.step) if each.step else "start",
            each.kind,
            each.name,
            _number(each.amount),
            _number(each.relative),
            _number(_relative_allowed(report, each)),
        ]
        for each in differences
    ]
    return text_table(["step", "what", "name", "differs by", "relative", "rounding"], rows)


def _equal(report: VerifyReport) -> str:
    granted = f"{report.allowance.granted:.1e} of a tensor's largest value"
    measured = f", or {NOISE_FACTOR} times the measured rounding" if report.allowance.noise else ""
    return f"equal within rounding: nothing differs by more than {granted}{measured}"


def _different(report: VerifyReport, first: Difference) -> str:
    amount = "cannot be compared" if math.isinf(first.amount) else f"differs by {first.relative:.2g} of its size"
    note = f" ({first.note})" if first.note else ""
    where = f"step {first.step}" if first.step else "before the first step"
    if first.kind == "rows":
        return f"different: {where}, the rows of the global batch ({first.name}) are not the same"
    return f"different: {where}, {first.kind} {first.name} is the first that {amount}{note}"


def _causes(report: VerifyReport) -> list[str]:
    if not report.findings:
        tried = "\n".join(f"  {each.what}: {each.outcome}" for each in report.experiments)
        return [f"cause: none of the hypotheses explains it; what was tried:\n{tried}"]
    return [
        "\n".join(
            [
                f"cause: {finding.cause}",
                *_entry("what", finding.said),
                *_entry("tested", finding.tested),
                *_entry("change", finding.advice),
            ]
        )
        for finding in report.findings
    ]


def _entry(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"  {name:<8}", subsequent_indent=" " * 10, break_long_words=False
    )


def _relative_allowed(report: VerifyReport, difference: Difference) -> float:
    allowed = report.allowance.allowed(difference)
    return allowed / difference.size if difference.size else allowed


def _as_dict(report: VerifyReport, difference: Difference) -> dict[str, Any]:
    return {
        **{name: _finite(value) for name, value in vars(difference).items()},
        "relative": _finite(difference.relative),
        "allowed": _finite(report.allowance.allowed(difference)),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float) -> str:
    return "-" if math.isinf(value) else "0" if value == 0 else f"{value:.1e}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
