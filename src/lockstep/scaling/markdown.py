"""A scaling run as Markdown, and as tables for a terminal. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.report.table import text_table
from lockstep.scaling.published import (
    PUBLISHED,
    PUBLISHED_HEADINGS,
    PUBLISHED_NOTE,
    PUBLISHED_TITLE,
    published_cells,
)
from lockstep.scaling.run import ScalingResult
from lockstep.scaling.wording import (
    PART_HEADINGS,
    ROW_HEADINGS,
    TEXT_COLUMNS,
    definitions,
    facts,
    part_cells,
    row_cells,
)


def render_markdown(result: ScalingResult) -> str:
    """The whole report."""
    parts = [
        f"# Scaling of {result.recipe}, {result.date}",
        "\n".join([*(f"- {name}: {said}" for name, said in facts(result)), f"- command: `{result.command}`"]),
        _table(ROW_HEADINGS, [row_cells(row) for row in result.rows]),
        "## Where the time of a step goes",
        "Milliseconds, mean over the replicas.",
        _table(PART_HEADINGS, [part_cells(row) for row in result.rows]),
        "## What the rows and columns mean",
        "\n".join(f"- {name}: {said}" for name, said in definitions(result)),
        *_published(result.recipe),
    ]
    return "\n\n".join(parts) + "\n"


def terminal_tables(result: ScalingResult) -> str:
    """The two tables, for a person who waited for them."""
    rows = text_table(ROW_HEADINGS, [row_cells(row) for row in result.rows])
    parts = text_table(PART_HEADINGS, [part_cells(row) for row in result.rows])
    return f"{rows}\n\nwhere the time of a step goes (ms, mean over the replicas)\n\n{parts}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Words to the left, numbers to the right."""
    rule = ["---" if heading in TEXT_COLUMNS else "---:" for heading in headings]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def _published(recipe: str) -> list[str]:
    rows = PUBLISHED.get(recipe, ())
    if not rows:
        return []
    table = _table(PUBLISHED_HEADINGS, [published_cells(row) for row in rows])
    return [f"## {PUBLISHED_TITLE}", PUBLISHED_NOTE, table]
