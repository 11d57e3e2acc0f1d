"""Writes a run's report: Markdown for people, and beside it JSON with every sample for those who count again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Figures, Target
from benchmarks.trial import Conditions
from lockstep.atomic_files import atomic_write
from lockstep.errors import LockstepError
from lockstep.report import markdown_table


class NothingToRunError(LockstepError):
    """This machine lacks what the suite measures. The command says why and exits with 77, as a skipped test does."""


def head(conditions: Conditions, title: str) -> str:
    """The title and the circumstances of a run."""
    machine = conditions.machine
    where = f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}"
    how = f"{conditions.warm_up} steps of warm-up, then {conditions.steps} timed"
    facts = (
        f"machine: {where}; load average before the run {machine.load:.2f}",
        f"versions: Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}",
        *(f"{name}: {versions}" for name, versions in conditions.peers),
        f"commit: {machine.commit}",
        f"command: `{conditions.command}`",
        f"{conditions.rounds} rounds, the contenders in turn, each in fresh processes; in each trial {how}",
    )
    return "\n".join([f"# {title}, {conditions.date}", "", *(f"- {fact}" for fact in facts)])


def settings_list(figures: Sequence[Figures]) -> list[str]:
    """A line a contender: what was chosen, and how."""
    return [f"- {row.contender.name}: {row.contender.settings}" for row in figures]


def target_table(targets: Sequence[Target]) -> str:
    """Limits beside what was measured; empty without targets."""
    rows = [[target.text, *_verdict(target)] for target in targets]
    return markdown_table(("target", "limit", "measured", "reached"), rows) if rows else ""


def _verdict(target: Target) -> tuple[str, str, str]:
    return f"{target.bound} {target.limit:.2f}", f"{target.value:.3f}", "yes" if target.reached else "NO"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a suite returns."""

    name: str  # of the files, after the date: ``DATE-NAME.md`` and ``DATE-NAME.json``
    date: str  # YYYY-MM-DD
    text: str  # the Markdown
    record: Mapping[str, Any]  # everything that was measured, for the JSON
    ok: bool = True  # whether the command succeeds


def write_report(folder: Path, report: Report) -> Path:
    """Writes the Markdown and the JSON, each atomically; a report of the same day and name is replaced.

    Returns:
        The path of the Markdown file.
    """
    base = folder / f"{report.date}-{report.name}"
    record = json.dumps(report.record, indent=1) + "\n"
    atomic_write(base.with_name(f"{base.name}.json"), record)
    return atomic_write(base.with_name(f"{base.name}.md"), report.text)
