"""``lockstep bench pipeline``: schedules of a pipeline, measured beside what theory says of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from lockstep.cli.flags import check_file, check_folder, config_parameters, with_parameters
from lockstep.extras import require
from lockstep.parallel.pipeline_config import SCHEDULES
from lockstep.parallel.pipeline_trace import textbook_bubble
from lockstep.scaling.machine import this_machine
from lockstep.scaling.schedules import (
    PipelineSettings,
    Sample,
    measure_pipeline,
    parse_schedules,
    pipeline_files,
    terminal_table,
    write_pipeline_report,
)

EXAMPLE = "Example: lockstep bench pipeline --workers 2 --schedules 1f1b,zero_bubble"

SchedulesFlag = Annotated[
    str | None,
    typer.Option(metavar="NAME,NAME", help=f"Some of {', '.join(SCHEDULES)}. Without it: all.", show_default=False),
]
OutputFlag = Annotated[Path, typer.Option(metavar="DIR", help="Where Markdown, JSON and the picture are put.")]


def pipeline_command() -> Callable[..., Callable[[], int]]:
    """The command, with a flag for every setting."""
    measured = [p for p in config_parameters(PipelineSettings) if p.name != "schedules"]
    places = list(inspect.signature(_places, eval_str=True).parameters.values())

    def command(*, schedules: str | None, output: Path, **flags: Any) -> Callable[[], int]:
        settings = PipelineSettings(schedules=parse_schedules(schedules), **flags)
        return lambda: _measure(settings, output.expanduser())

    parameters = [*places, *measured]
    return with_parameters(
        command,
        parameters,
        help_text="Measure how long the workers of a pipeline are idle under each schedule, beside theory.",
    )


def _places(*, schedules: SchedulesFlag = None, output: OutputFlag = Path("runs/pipeline")) -> None:
    """The flags that no config documents."""


def _measure(settings: PipelineSettings, output: Path) -> int:
    # What would fail at the end fails now:
    require("transformers", "text")
    check_folder(output)
    planned = pipeline_files(output, date=date.today().isoformat(), cores=this_machine().cores)
    for file in (planned.markdown, planned.json, planned.picture):
        check_file(file)
    usual = textbook_bubble(settings.workers, settings.microbatches)
    print(f"S={settings.workers} workers, M={settings.microbatches} microbatches: (S-1)/(M+S-1) = {usual:.1%}\n")
    result = measure_pipeline(settings, output=output, progress=_say)
    print(f"\n{terminal_table(result)}\n")
    files = write_pipeline_report(output, result)
    print(f"table   {files.markdown}\nactions {files.json}\npicture {files.picture}")
    return 0


def _say(sample: Sample, done: int, planned: int) -> None:
    bubble = median(step.bubble for step in sample.steps)
    length_ms = 1000 * median(step.length for step in sample.steps)
    print(
        f"{done:3d}/{planned}  round {sample.round + 1}  {sample.schedule:<13}  {length_ms:8.1f} ms a step  "
        f"idle {bubble:6.1%}",
        flush=True,
    )
