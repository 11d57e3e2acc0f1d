"""A scaling run as one HTML page that needs nothing else: tables, plots, definitions. Pure: values in, text out."""

from __future__ import annotations

from lockstep.extras import require
from lockstep.scaling.charts import HEIGHT, WIDTH, epoch_bars, speed_up_plot, step_stacks, throughput_bars
from lockstep.scaling.page_style import STYLE
from lockstep.scaling.page_template import TEMPLATE
from lockstep.scaling.parts import PARTS
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
    is_extrapolated,
    part_cells,
    row_cells,
)


def render_page(result: ScalingResult) -> str:
    """The whole page; every text in it is escaped.

    Raises:
        MissingExtraError: jinja2, which torch brings, is not installed.
    """
    jinja2 = require("jinja2", "plots")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    rows = result.rows
    page: str = environment.from_string(TEMPLATE).render(
        result=result,
        style=STYLE,
        replicated=[row for row in rows if row.configuration.replicas > 1],
        text_columns=TEXT_COLUMNS,
        row_headings=ROW_HEADINGS,
        row_cells=[row_cells(row) for row in rows],
        part_headings=PART_HEADINGS,
        part_cells=[part_cells(row) for row in rows],
        plot=speed_up_plot(rows),
        width=WIDTH,
        height=HEIGHT,
        throughput=throughput_bars(rows),
        epochs=epoch_bars(rows),
        extrapolated=is_extrapolated(rows),
        parts=PARTS,
        stacks=step_stacks(rows),
        facts=facts(result),
        definitions=definitions(result),
        published=[published_cells(row) for row in PUBLISHED.get(result.recipe, ())],
        published_headings=PUBLISHED_HEADINGS,
        published_title=PUBLISHED_TITLE,
        published_note=PUBLISHED_NOTE,
    )
    return page
