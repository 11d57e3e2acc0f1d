"""Writes a run's report: Markdown for people, and beside it JSON with every sample for those who count again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Absence, Sample, run_rounds, trials_of
from benchmarks.results import Comparison, Figures, figures_of
from benchmarks.trial import Conditions, Contender, Workload
from lockstep.atomic_files import atomic_write
from lockstep.errors import LockstepError
from lockstep_tools.report import markdown_table


class NothingToRunError(LockstepError):
    """This machine lacks what the suite measures. The command says why and exits with 77, as a skipped test does."""


Column = Callable[[Figures], str]
COLUMNS: Mapping[str, Column] = {
    "step ms": lambda row: f"{row.median_ms:.1f}",
    "p10": lambda row: f"{row.percentile_ms(10):.1f}",
    "p90": lambda row: f"{row.percentile_ms(90):.1f}",
    "ratio": lambda row: "" if row.ratio is None else f"{row.ratio:.3f}",
    "CPU ms": lambda row: f"{row.over_rounds(lambda sample: sample.cpu_ms):.0f}",
    "exchange + update": lambda row: "" if row.exchange_share is None else f"{row.exchange_share:.1%}",
    "first step s": lambda row: f"{row.first_step_s:.2f}",
    "first step CPU s": lambda row: f"{row.over_rounds(lambda sample: sample.first_step_cpu_s):.2f}",
    "peak MB": lambda row: f"{row.memory.peak_mb:.0f}",
    "PSS MB": lambda row: f"{row.memory.pss_mb:.0f}",
    "sent MB": lambda row: f"{row.over_rounds(lambda sample: sample.sent_mb):.1f}",
    "loss": lambda row: f"{row.over_rounds(lambda sample: sample.loss):.4f}",
    "parameters": lambda row: f"{row.trained:,}",
}
MEANINGS: Mapping[str, str] = {
    "step ms": "the median of all timed steps of all rounds; with several processes, of the mean of theirs. p10, p90: "
    "the percentiles.",
    "ratio": "the step time relative to the fastest hand-written loop on torch alone, or without one to the first row: "
    "the median over the rounds of the quotient of the median steps of one round. Below 1 is faster.",
    "CPU ms": "CPU time of a step, of all threads and processes together, waiting in a spinning barrier included.",
    "exchange + update": "from the moment when the last local replica arrives at `optimizer.step` to the moment when "
    "all have left it, as part of the step. With several workers it includes the wait for the last of them.",
    "first step s": "from the start of the processes to the end of the slowest one's first step, with imports, model "
    "and, with several workers, their rendezvous.",
    "first step CPU s": "CPU time of all processes together until then, of torchrun too.",
    "peak MB": "the sum of the peak resident memory (VmHWM) of all processes of the contender.",
    "PSS MB": "resident memory in the last step; a page that processes share counts once.",
    "sent MB": "10**6 bytes that leave each host in a step, headers included, as the interface counts them.",
    "loss": "of the last step. All train the same model on the same batches, so losses agree but for dropout, the "
    "batch statistics of each replica or process and, on TensorFlow and JAX, the initial weights.",
    "parameters": "that the optimizer changes.",
}
"""What the columns mean; those that need no word of their own are explained with the one before."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of contenders on one workload, and what is compared."""

    workload: str  # its name, for the JSON
    title: str
    columns: Mapping[str, Column]
    figures: Sequence[Figures]
    comparisons: Sequence[Comparison] = ()
    absences: Sequence[Absence] = ()
    remark: str = ""  # stands above the table


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a suite; its files are ``DATE-NAME.md`` and ``DATE-NAME.json``."""

    name: str
    date: str
    text: str  # the Markdown
    record: Mapping[str, Any]  # everything that was measured, for the JSON
    ok: bool = True  # whether the command succeeds


def columns(*names: str) -> dict[str, Column]:
    """Some of ``COLUMNS``, in this order."""
    return {name: COLUMNS[name] for name in names}


def report_in_turn(
    name: str,
    conditions: Conditions,
    title: str,
    work: Sequence[tuple[Workload, Sequence[Contender]]],
    shown: Mapping[str, Column],
    comparisons_of: Callable[[Sequence[Figures]], list[Comparison]],
    *,
    meanings: Mapping[str, str] | None = None,
) -> Report:
    """Measures the contenders of all workloads in turn, all on the cores of this machine; a section a workload.

    ``shown``: the columns. The others are those of ``report_of``.
    """
    trials = [trial for workload, contenders in work for trial in trials_of(workload, contenders, conditions)]
    rounds = run_rounds(trials, rounds=conditions.rounds)
    sections = [
        Section(
            workload=workload.name,
            title=workload.title,
            columns=shown,
            figures=(figures := figures_of(contenders, rounds.samples, workload.name)),
            comparisons=comparisons_of(figures),
            absences=[each for each in rounds.absences if each.workload == workload.name],
        )
        for workload, contenders in work
    ]
    return report_of(name, conditions, title, sections, rounds.samples, meanings=meanings)


def report_of(
    name: str,
    conditions: Conditions,
    title: str,
    sections: Sequence[Section],
    samples: Sequence[Sample],
    *,
    meanings: Mapping[str, str] | None = None,
) -> Report:
    """The report of contenders that took turns; ``name`` is that of the files, after the date.

    ``meanings``: further explanations of columns, or other ones than in ``MEANINGS``.
    """
    shown = {name for section in sections for name in section.columns}
    known = {name: text for name, text in MEANINGS.items() if name in shown} | dict(meanings or {})
    legend = "\n".join(["## What the columns mean", "", *(f"- {name}: {text}" for name, text in known.items())])
    absences = [absence for section in sections for absence in section.absences]
    record = {
        "conditions": asdict(conditions),
        "comparisons": [
            {"workload": section.workload, **asdict(each), "value": each.value, "verdict": each.verdict}
            for section in sections
            for each in section.comparisons
        ],
        "absences": [asdict(absence) for absence in absences],
        "samples": [asdict(sample) for sample in samples],
    }
    return Report(
        name=name,
        date=conditions.date,
        text="\n\n".join([_head(conditions, title), *map(_section_text, sections), legend]) + "\n",
        record=record,
        ok=not any(absence.failed for absence in absences),
    )


def _head(conditions: Conditions, title: str) -> str:
    warm_up, steps, rounds = conditions.warm_up, conditions.steps, conditions.rounds
    measured = f"at most {rounds} rounds, the contenders in turn, each in fresh processes"
    facts = (
        *conditions.machine.facts,
        *conditions.facts,
        ("command", f"`{conditions.command}`"),
        ("measured", f"{measured}; {warm_up} warm-up steps, {steps} timed"),
    )
    return "\n".join([f"# {title}, {conditions.date}", "", *(f"- {name}: {text}" for name, text in facts)])


def _section_text(section: Section) -> str:
    headings = ("contender", *section.columns)
    rows = [[row.contender.name, *(column(row) for column in section.columns.values())] for row in section.figures]
    rows += [[absence.contender, "not run", *[""] * (len(headings) - 2)] for absence in section.absences]
    notes = [
        f"- {row.contender.name} logged: {note}"
        for row in section.figures
        for note in dict.fromkeys(note for sample in row.samples for note in sample.notes)
    ]
    lines = [
        *(f"- {row.contender.name}: {row.contender.settings}" for row in section.figures),
        *notes,
        *(f"- {absence.contender}: not run: {absence.reason}" for absence in section.absences),
    ]
    compared = _comparison_table(section.comparisons)
    blocks = [f"## {section.title}", section.remark, markdown_table(headings, rows), compared, "\n".join(lines)]
    return "\n\n".join(block for block in blocks if block)


def _comparison_table(comparisons: Iterable[Comparison]) -> str:
    """What is compared, and the limits; empty without comparisons."""
    rows = [
        [
            each.text,
            "" if each.limit is None else f"{each.bound} {each.limit:.2f}{each.unit}",
            *(f"{spread(each.values):.3f}{each.unit}" if each.values else "" for spread in (median, min, max)),
            each.verdict,
        ]
        for each in comparisons
    ]
    return markdown_table(("compared", "limit", "median round", "lowest", "highest", "reached"), rows) if rows else ""


def write_report(folder: Path, report: Report) -> Path:
    """Writes the Markdown and the JSON, each atomically, and returns the path of the Markdown file.

    A report of the same day and name is replaced.
    """
    base = folder / f"{report.date}-{report.name}"
    record = json.dumps(report.record, indent=1) + "\n"
    atomic_write(base.with_name(f"{base.name}.json"), record)
    return atomic_write(base.with_name(f"{base.name}.md"), report.text)
