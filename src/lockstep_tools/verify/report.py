"""``verify``, the entry point, and its report as text."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from operator import attrgetter

from lockstep import console
from lockstep.console import GAP, text_table
from lockstep_tools.verify.causes import Finding, explain
from lockstep_tools.verify.compare import KINDS, NOISE_FACTOR, Comparison, Difference, Tolerance
from lockstep_tools.verify.config import VerifyConfig
from lockstep_tools.verify.experiments import ExperimentRunner, Progress

MAX_TABLE_ROWS = 8
_WIDTH = 110  # columns, where there is no narrower terminal
_SHORT_NAME = 16  # characters of a tensor's name that are always shown


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of a verification."""

    config: VerifyConfig  # the verification
    comparison: Comparison  # N replicas with one, the program as written
    tolerance: Tolerance  # what counted as rounding
    first: Difference | None = None  # the first difference beyond rounding; None if there is none
    findings: tuple[Finding, ...] = ()  # the causes; empty if nothing differs, or if no hypothesis explains it
    # every pair of runs, in order: what was compared, and the first difference beyond rounding, or "equal"
    experiments: tuple[tuple[str, str], ...] = ()

    @property
    def equal(self) -> bool:
        """Whether N replicas computed what one replica computes, up to rounding."""
        return self.first is None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong: the runs are equal, or differ by dropout alone, whose masks are a replica's own."""
        return self.equal or (bool(self.findings) and all(finding.by_definition for finding in self.findings))


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
        experiments=tuple((what, _outcome(comparison.first(tolerance))) for what, comparison in runner.completed),
    )


def _outcome(first: Difference | None) -> str:
    if first is None:
        return "equal"
    return f"step {first.step}: {first.kind} {first.name} differs by {first.relative:.1e} of its size"


def render(report: VerifyReport) -> str:
    """The report as text: a table of differences, the verdict and, if there is a difference, its causes."""
    comparison, devices = report.comparison, report.comparison.start.devices
    updates = _count(len(comparison.steps), "update")
    title = f"{report.config.program.name}: {updates} on {len(devices)} replicas ({', '.join(devices)}) and on one"
    if report.first is None:
        largest: dict[str, Difference] = {}
        for difference in comparison.differences:
            kind = difference.kind
            largest[kind] = max(difference, largest.get(kind, difference), key=attrgetter("relative"))
        rows, verdict = [largest[kind] for kind in KINDS if kind in largest], [_equal(report)]
    else:
        beyond = [difference for difference in comparison.differences if not report.tolerance.covers(difference)]
        rows = sorted(beyond, key=attrgetter("order"))[:MAX_TABLE_ROWS]
        verdict = [_different(report.first), *_causes(report)]
    return "\n\n".join([title, *_notes(report), _table(report, rows), *verdict])


def _notes(report: VerifyReport) -> list[str]:
    comparison, notes = report.comparison, []
    if comparison.extra:
        which = "all replicas" if comparison.extra > 0 else "one replica"
        notes.append(f"note: the run on {which} made {_count(abs(comparison.extra), 'update')} more than the other")
    elif len(comparison.steps) < report.config.steps:
        notes.append(f"note: the program ended before the {_count(report.config.steps, 'update')} asked for")
    if comparison.ends[0].strategies > 1:
        notes.append(
            f"note: the program made {comparison.ends[0].strategies} strategies of several devices; the first one, on "
            f"{', '.join(comparison.start.devices)}, was compared"
        )
    return notes


def _table(report: VerifyReport, differences: list[Difference]) -> str:
    rows = []
    for difference in differences:
        tolerance = report.tolerance.of(difference)
        numbers = (
            difference.amount,
            difference.relative,
            tolerance / difference.size if difference.size else tolerance,
        )
        step = str(difference.step) if difference.step else "start"
        rows.append([step, difference.kind, difference.name, *map(_number, numbers)])
    headings = ["step", "what", "name", "differs by", "relative", "rounding"]
    if (columns := console.width()) is not None:
        beside = (max(map(len, cells)) + len(GAP) for cells in zip(headings, *rows, strict=True) if cells[0] != "name")
        # The numbers are the result; names give way, since the end of a name tells the layer.
        longest = max(_SHORT_NAME, columns - sum(beside))
        rows = [[*row[:2], _end_of(row[2], longest), *row[3:]] for row in rows]
    return text_table(headings, rows)


def _end_of(name: str, length: int) -> str:
    """The name, or its end if it is longer: the layer's own names are there."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


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
        tried = "\n".join(f"  {what}: {outcome}" for what, outcome in report.experiments)
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
    width = min(_WIDTH, console.width() or _WIDTH)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=" " * 10, break_long_words=False)


def _number(value: float) -> str:
    return "-" if math.isinf(value) else "0" if value == 0 else f"{value:.1e}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
