"""``lockstep bench pipeline``: how long the workers of a pipeline idle under each schedule, beside what theory says.

settings -> fresh workers for each schedule, in turn, several rounds -> traces of steps -> table and SVG
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.atomic_files import atomic_write
from lockstep.checks import check_choice, check_least
from lockstep.console import text_table
from lockstep.errors import ConfigError
from lockstep.parallel.layer_split import check_layers
from lockstep.parallel.pipeline_config import SCHEDULES, PipelineConfig, ScheduleName, choose_pipeline_config
from lockstep.parallel.pipeline_trace import ActionKind, Orders, PipelineTrace, simulate, textbook_bubble
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.model import new_bert
from lockstep_tools.report import markdown_table
from lockstep_tools.scaling.machine import Machine, this_machine
from lockstep_tools.scaling.plots import draw_pipelines


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """A small BERT with its head, and how it is measured.

    Args:
        schedules: their names.
        workers: processes that divide its layers.
        microbatches: parts of a batch.
        layers: encoder layers.
        hidden: width of a token's vector, a multiple of 32.
        steps: timed steps of a trial.
        rounds: how often each schedule is measured, in turn with the others.
    """

    schedules: tuple[ScheduleName, ...] = SCHEDULES
    workers: int = 2
    microbatches: int = 8
    layers: int = 8
    hidden: int = 256
    steps: int = 6
    rounds: int = 3

    def __post_init__(self) -> None:
        check_least(self, 2, "workers")
        check_least(self, 1, "layers", "hidden", "steps", "rounds")
        if self.hidden % _HEAD:
            raise ConfigError(f"hidden={self.hidden} is no multiple of {_HEAD}, the width of a head; give one")
        if not self.schedules:
            raise ConfigError(f"no schedule was named; choose some of {', '.join(SCHEDULES)}")
        for schedule in self.schedules:
            check_choice("schedule", schedule, SCHEDULES)
            check_layers(self.pipelining(schedule), self.layers)

    @property
    def model(self) -> MlmConfig:
        return MlmConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.hidden // _HEAD,
            feed_forward=4 * self.hidden,
            vocabulary=_VOCABULARY,
            sequence_length=_SEQUENCE,
            dropout=0.0,
        )

    def pipelining(self, schedule: ScheduleName) -> PipelineConfig:
        return choose_pipeline_config(schedule, self.microbatches, self.workers)


_HEAD = 32  # width of a head
_ROWS, _SEQUENCE, _VOCABULARY = 8, 64, 512  # of a microbatch
_WARM_UP = 2  # steps


def parse_schedules(text: str | None) -> tuple[ScheduleName, ...]:
    """Reads ``1f1b,zero_bubble``; None is all of them. Raises ConfigError for an unknown name."""
    if text is None:
        return SCHEDULES
    names = [name.strip() for name in text.split(",")]
    for name in names:
        check_choice("--schedules", name, SCHEDULES)
    return tuple(schedule for schedule in SCHEDULES if schedule in names)


TRIAL_LIMIT_S = 1200.0
_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one trial gave."""

    schedule: ScheduleName
    round: int  # 0 for the first
    steps: tuple[PipelineTrace, ...]  # the timed steps, in seconds


def measure_in_worker(settings: PipelineSettings, schedule: ScheduleName) -> list[PipelineTrace]:
    """The timed steps. Every worker must run it; all return the same."""
    torch.manual_seed(0)
    pipelining = settings.pipelining(schedule)
    strategy = ls.ParallelStrategy(
        data=1, pipeline=settings.workers, microbatches=settings.microbatches, schedule=schedule,
        stages_per_worker=pipelining.stages_per_worker,
    )  # fmt: skip
    steps: list[PipelineTrace] = []
    with closing(strategy), strategy.scope():
        model = ls.Model(new_bert(settings.model))
        model.compile(_optimizer, _loss)
        sharded: Any = model.module
        # The trace is that of the last step, so it is taken before the next one begins.
        record = ls.LambdaCallback(on_train_batch_end=lambda *_: steps.append(sharded.pipeline_trace()))
        tokens = torch.randint(_VOCABULARY, (_ROWS * settings.microbatches, _SEQUENCE))
        batch = ({"input_ids": tokens}, tokens)
        model.fit([batch] * (_WARM_UP + settings.steps), epochs=1, callbacks=[record], verbose=0)
    return steps[_WARM_UP:]


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, _RATE)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A schedule over all its rounds."""

    schedule: ScheduleName
    stages_per_worker: int
    step_ms: float  # from the first action to the last, median
    bubble: float  # the measured idle share, median
    textbook: float  # (S-1)/(M+S-1)
    timetable: float  # what the schedule's timetable has if a backward pass takes twice a forward pass
    with_costs: float  # what it has if each action takes what it took on average
    typical: PipelineTrace  # the step whose idle share is the median


def rows_of(settings: PipelineSettings, samples: Sequence[Sample], orders: dict[ScheduleName, Orders]) -> list[Row]:
    """A row for each schedule, in the order of the settings."""
    return [
        _row(
            settings,
            schedule,
            [step for sample in samples if sample.schedule == schedule for step in sample.steps],
            order,
        )
        for schedule, order in orders.items()
    ]


def _row(settings: PipelineSettings, schedule: ScheduleName, steps: Sequence[PipelineTrace], orders: Orders) -> Row:
    return Row(
        schedule=schedule,
        stages_per_worker=settings.pipelining(schedule).stages_per_worker,
        step_ms=1000 * median(step.length for step in steps),
        bubble=median(step.bubble for step in steps),
        textbook=textbook_bubble(settings.workers, settings.microbatches),
        timetable=simulate(orders).bubble,
        with_costs=_with_costs(orders, steps).bubble,
        typical=sorted(steps, key=lambda step: step.bubble)[len(steps) // 2],
    )


def _with_costs(orders: Orders, steps: Sequence[PipelineTrace]) -> PipelineTrace:
    """The timetable in which every action takes what those of its kind and stage took on average."""
    durations: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for step in steps:
        for slots in step.workers:
            for slot in slots:
                durations[slot.action.kind, slot.action.stage].append(slot.end - slot.begin)
    mean = {key: fmean(values) for key, values in durations.items()}
    return simulate(orders, lambda action: mean[action.kind, action.stage])


Progress = Callable[[Sample, int, int], None]
"""Called with each sample, how many there are by then, and how many there will be."""


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """A run and how it was made."""

    settings: PipelineSettings
    date: str  # YYYY-MM-DD
    machine: Machine
    rows: tuple[Row, ...]  # one a schedule


def measure_pipeline(settings: PipelineSettings, *, progress: Progress) -> PipelineResult:
    """Measures every schedule once a round, in fresh processes. Raises a ClusterError if one fails or is too slow."""
    from lockstep.parallel.pipeline import orders_of  # imports torch's pipelining, which every command would wait for

    machine = this_machine()
    samples: list[Sample] = []
    for round in range(settings.rounds):
        for schedule in settings.schedules:
            steps = ls.launch(
                measure_in_worker,
                workers=settings.workers,
                args=(settings, schedule),
                # Workers that share a GPU would measure its scheduling and not the schedule's.
                gpus_per_worker=0,
                timeout_s=TRIAL_LIMIT_S,
            )
            samples.append(Sample(schedule=schedule, round=round, steps=tuple(steps)))
            progress(samples[-1], len(samples), settings.rounds * len(settings.schedules))
    orders = {schedule: orders_of(settings.pipelining(schedule)) for schedule in settings.schedules}
    rows = rows_of(settings, samples, orders)
    return PipelineResult(settings=settings, date=date.today().isoformat(), machine=machine, rows=tuple(rows))


_HEADINGS = ("schedule", "stages a worker", "step ms", "idle", "(S-1)/(M+S-1)", "schedule's own", "with these costs")
_LEGEND = """\
- step ms: from the first action of any worker in a batch to the end of the last one, without the update; the median.
- idle: the share of that in which a worker is in no action, on average over the workers; the median.
- (S-1)/(M+S-1): the idle share of GPipe and 1F1B with S workers and M microbatches if all stages are equally fast.
- schedule's own: the schedule's idle share if a backward pass takes twice as long as a forward pass, each half of it as
  long, all stages are equally fast, and nothing else takes time.
- with these costs: the same if every action takes what those of its kind and stage took here on average."""
_CROWDED = (
    "There are more workers than cores, so one computes while another would wait: the idle shares say nothing "
    "about the schedules. Measure with at most as many workers as cores."
)


def pipeline_files(folder: Path, *, date: str, cores: int) -> tuple[Path, Path]:
    """Where a report and its picture go: ``DATE-pipeline-cpu-CORES`` with two suffixes."""
    base = f"{date}-pipeline-cpu-{cores}"
    return folder / f"{base}.md", folder / f"{base}.svg"


def write_pipeline_report(files: tuple[Path, Path], result: PipelineResult) -> None:
    """Writes the report and its picture, each whole or not at all."""
    markdown, picture = files
    traces = {f"{row.schedule}, {1000 * row.typical.length:.0f} ms": row.typical for row in result.rows}
    for path, text in {picture: draw_pipelines(traces), markdown: render_markdown(result, picture.name)}.items():
        atomic_write(path, text)


def render_markdown(result: PipelineResult, picture: str) -> str:
    """The whole report; ``picture`` is the name of the picture's file."""
    settings = result.settings
    facts = [
        *result.machine.facts,
        ("model", f"BERT, {settings.layers} layers of width {settings.hidden}, vocabulary {_VOCABULARY}, fp32"),
        (
            "pipeline",
            f"{settings.workers} workers, {settings.microbatches} microbatches of {_ROWS} x {_SEQUENCE}",
        ),
        ("measured", f"{settings.rounds} rounds of {_WARM_UP} steps of warm-up, then {settings.steps} timed"),
    ]
    parts = [
        f"# Schedules of a pipeline, {result.date}",
        "\n".join(f"- {name}: {text}" for name, text in facts),
        *_warnings(result),
        markdown_table(_HEADINGS, _cells(result.rows)),
        "A measured step of each, the one whose idle share is the median; all on one scale:",
        f"![Measured steps of each schedule]({picture})",
        _LEGEND,
    ]
    return "\n\n".join(parts) + "\n"


def terminal_table(result: PipelineResult) -> str:
    """The table for a person who waited for it."""
    return "\n\n".join([text_table(_HEADINGS, _cells(result.rows)), *_warnings(result)])


def _warnings(result: PipelineResult) -> list[str]:
    crowded = [_CROWDED] if result.settings.workers > result.machine.cores else []
    return crowded + result.machine.warnings


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            row.schedule,
            str(row.stages_per_worker),
            f"{row.step_ms:.1f}",
            *(f"{share:.1%}" for share in (row.bubble, row.textbook, row.timetable, row.with_costs)),
        ]
        for row in rows
    ]
