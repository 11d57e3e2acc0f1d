"""The report on schedules: Markdown, JSON with every action of every step, and a picture of a measured step of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.whole_file import write_whole
from lockstep.report.schedule_picture import Scale, draw_timetables
from lockstep.report.table import markdown_table, text_table
from lockstep.scaling.pipeline.figures import Row
from lockstep.scaling.pipeline.run import PipelineResult
from lockstep.scaling.pipeline.trial import Sample

_HEADINGS = (
    "schedule", "stages a worker", "step ms", "busy ms", "idle", "lowest", "highest", "(S-1)/(M+S-1)", "schedule's own",
    "with these costs",
)  # fmt: skip
_LEGEND = """\
## What the columns mean

- A step is what the schedule does with one batch: from the first action of any worker to the end of the last one. An
  action is the forward pass of one microbatch in one stage (the loss is part of the last stage's), its backward pass,
  or the part of that for the stage's inputs or for its weights. The optimizer's update is not part of it.
- step ms: its length. busy ms: what the actions of a worker take of it, on average over the workers. Medians over the
  steps of all rounds.
- idle: the measured bubble: the share of the step in which a worker is in no action, on average over the workers; what
  it takes to send and receive is part of it. The median over all steps; lowest and highest of the rounds' medians.
- (S-1)/(M+S-1): the bubble of GPipe and 1F1B with S workers and M microbatches where all stages are equally fast.
- schedule's own: the idle share of the timetable that the schedule comes to if a backward pass takes twice as long as a
  forward pass, each half of it as long, all stages are equally fast, and nothing else takes time.
- with these costs: the same if every action takes what those of its kind and stage took here on average. What the
  measured share is above that is sending, waiting for the operating system, and steps that are not alike."""
_CROWDED = (
    "There are more workers than cores, so one computes while another would wait: the idle shares say nothing "
    "about the schedules. Measure with at most as many workers as cores."
)


@dataclass(frozen=True, kw_only=True)
class PipelineFiles:
    """The files of a report."""

    markdown: Path
    json: Path
    picture: Path


def pipeline_files(folder: Path, *, date: str, cores: int) -> PipelineFiles:
    """Where a report goes: ``DATE-pipeline-cpu-CORES`` with three suffixes."""
    base = f"{date}-pipeline-cpu-{cores}"
    return PipelineFiles(markdown=folder / f"{base}.md", json=folder / f"{base}.json", picture=folder / f"{base}.svg")


def write_pipeline_report(folder: Path, result: PipelineResult) -> PipelineFiles:
    """Writes the three files, each whole or not at all; a run of the same day is replaced."""
    files = pipeline_files(folder, date=result.date, cores=result.machine.cores)
    texts = {
        files.json: json.dumps(_record(result)) + "\n",
        files.picture: render_picture(result),
        files.markdown: render_markdown(result, files.picture.name),
    }
    for path, text in texts.items():
        write_whole(path, text)
    return files


def render_markdown(result: PipelineResult, picture: str) -> str:
    """The whole report.

    Args:
        result: what was measured.
        picture: the name of the file of the picture.
    """
    parts = [
        f"# Schedules of a pipeline, {result.date}",
        "\n".join(f"- {name}: {said}" for name, said in _facts(result)),
        *([f"**{_CROWDED}**"] if result.crowded else []),
        markdown_table(_HEADINGS, _cells(result.rows)),
        "A measured step of each, the one whose idle share is the median; all on one scale:",
        f"![Measured steps of each schedule]({picture})",
        _LEGEND,
    ]
    return "\n\n".join(parts) + "\n"


def terminal_table(result: PipelineResult) -> str:
    """The table for a person who waited for it."""
    table = text_table(_HEADINGS, _cells(result.rows))
    return f"{table}\n\n{_CROWDED}" if result.crowded else table


def render_picture(result: PipelineResult) -> str:
    """A measured step of each schedule, one below the other."""
    scale = Scale(length=max(row.typical.length for row in result.rows))
    tables = {f"{row.schedule}, {1000 * row.typical.length:.0f} ms": row.typical for row in result.rows}
    return draw_timetables(tables, scale, title="measured steps of each schedule")


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            row.schedule,
            str(row.stages_per_worker),
            f"{row.step_ms:.1f}",
            f"{row.busy_ms:.1f}",
            *(f"{share:.1%}" for share in (row.bubble, row.lowest, row.highest, row.textbook, row.own, row.with_costs)),
        ]
        for row in rows
    ]


def _facts(result: PipelineResult) -> list[tuple[str, str]]:
    machine, settings = result.machine, result.settings
    where = f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}"
    tokens = f"{settings.rows} lines of {settings.sequence} tokens"
    processes = f"{settings.workers} workers, a process each with its share of the cores,"
    rounds = f"{settings.rounds} rounds, the schedules in turn, each in fresh processes"
    return [
        ("machine", f"{where}; load average before the run {machine.load:.2f}"),
        ("versions", f"Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}"),
        ("commit", machine.commit),
        ("model", f"BERT, {settings.layers} layers of width {settings.hidden}, {settings.vocabulary} words, fp32, SGD"),
        ("pipeline", f"{processes} over gloo; {settings.microbatches} microbatches of {tokens}"),
        ("measured", f"{rounds}; {settings.warm_up} steps of warm-up, then {settings.steps} timed"),
        ("command", f"`{result.command}`"),
    ]


def _record(result: PipelineResult) -> dict[str, Any]:
    rows = [{key: value for key, value in asdict(row).items() if key != "typical"} for row in result.rows]
    return {
        "settings": asdict(result.settings),
        "date": result.date,
        "machine": asdict(result.machine),
        "command": result.command,
        "rows": rows,
        "samples": [_plain(sample) for sample in result.samples],
    }


def _plain(sample: Sample) -> dict[str, Any]:
    """Each action as [kind, stage, microbatch, begin ms, end ms], from the beginning of its step."""
    steps = [
        [
            [
                [slot.action.kind, slot.action.stage, slot.action.microbatch]
                + [round(1000 * (time - step.begin), 3) for time in (slot.begin, slot.end)]
                for slot in slots
            ]
            for slots in step.workers
        ]
        for step in sample.steps
    ]
    return {"schedule": sample.schedule, "round": sample.round, "steps": steps}
