"""``lockstep bench pipeline``: how long the workers of a pipeline idle under each schedule, beside what theory says.

settings -> fresh workers for each schedule, in turn, several rounds -> traces of steps -> table, JSON, SVG
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.atomic_files import atomic_write
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.parallel.pipeline_config import (
    SCHEDULES,
    PipelineConfig,
    ScheduleName,
    check_layers,
    choose_pipeline_config,
)
from lockstep.parallel.pipeline_trace import ActionKind, Orders, PipelineTrace, simulate, textbook_bubble
from lockstep.recipes.config_checks import at_least, one_of
from lockstep.report import markdown_table, text_table
from lockstep.scaling.machine import Machine, this_machine
from lockstep.scaling.pipeline_plot import Scale, draw_traces


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """A small BERT with its head, and how it is measured.

    Args:
        schedules: their names.
        workers: processes that divide its layers.
        microbatches: parts of a batch.
        rows: sequences in a microbatch.
        sequence: tokens in a sequence.
        layers: encoder layers.
        hidden: width of a token's vector, a multiple of 32.
        vocabulary: tokens that have an embedding.
        steps: timed steps of a trial.
        warm_up: steps before them, at least 1.
        rounds: how often each schedule is measured, in turn with the others.
    """

    schedules: tuple[ScheduleName, ...] = SCHEDULES
    workers: int = 2
    microbatches: int = 8
    rows: int = 8
    sequence: int = 64
    layers: int = 8
    hidden: int = 256
    vocabulary: int = 512
    steps: int = 6
    warm_up: int = 2
    rounds: int = 3

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 2)
        for name in ("rows", "sequence", "layers", "hidden", "vocabulary", "steps", "warm_up", "rounds"):
            at_least(name, getattr(self, name), 1)
        if self.hidden % _HEAD:
            raise ConfigError(f"hidden={self.hidden} is no multiple of {_HEAD}, the width of a head; give one")
        if not self.schedules:
            raise ConfigError(f"no schedule was named; choose some of {', '.join(SCHEDULES)}")
        for schedule in self.schedules:
            one_of("schedule", schedule, SCHEDULES)
            check_layers(self.pipelining(schedule), self.layers)

    @property
    def heads(self) -> int:
        return self.hidden // _HEAD

    def pipelining(self, schedule: ScheduleName) -> PipelineConfig:
        """How the strategy runs a schedule."""
        return choose_pipeline_config(schedule, self.microbatches, self.workers)


_HEAD = 32


def parse_schedules(text: str | None) -> tuple[ScheduleName, ...]:
    """Reads ``1f1b,zero_bubble``; None is all of them. Raises ConfigError for an unknown name."""
    if text is None:
        return SCHEDULES
    names = [name.strip() for name in text.split(",")]
    for name in names:
        one_of("--schedules", name, SCHEDULES)
    return tuple(known for known in SCHEDULES if known in names)


TRIAL_LIMIT_S = 1200.0
_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one trial gave."""

    schedule: ScheduleName
    round: int  # 0 for the first
    steps: tuple[PipelineTrace, ...]  # the timed steps, in seconds


def run_trial(settings: PipelineSettings, schedule: ScheduleName, *, round: int) -> Sample:
    """Measures in fresh processes; raises ClusterError if a worker failed or took longer than ``TRIAL_LIMIT_S``."""
    require("transformers", "transformers")
    steps = ls.launch(
        measure_in_worker, workers=settings.workers, args=(settings, schedule), gpus_per_worker=0,
        timeout_s=TRIAL_LIMIT_S,
    )  # fmt: skip
    return Sample(schedule=schedule, round=round, steps=tuple(steps))


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
        model = ls.Model(_model(settings))
        model.compile(_optimizer, _loss)
        watch = ls.LambdaCallback(on_train_batch_end=lambda *_: steps.append(_timetable(model)))
        tokens = torch.randint(settings.vocabulary, (settings.rows * settings.microbatches, settings.sequence))
        batch = ({"input_ids": tokens}, tokens)
        model.fit([batch] * (settings.warm_up + settings.steps), epochs=1, callbacks=[watch], verbose=0)
    return steps[settings.warm_up :]


def _timetable(model: ls.Model) -> PipelineTrace:
    part: Any = model.module
    table: PipelineTrace = part.pipeline_trace()
    return table


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, _RATE)


def _loss(outputs: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.transpose(1, 2), tokens, reduction="none")


def _model(settings: PipelineSettings) -> nn.Module:
    transformers = require("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.BertConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=4 * settings.hidden,
        max_position_embeddings=settings.sequence,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    module: nn.Module = transformers.BertForMaskedLM(config)
    return module


@dataclass(frozen=True, kw_only=True)
class Row:
    """A schedule over all its rounds."""

    schedule: ScheduleName
    stages_per_worker: int
    steps: int  # timed steps of all rounds
    step_ms: float  # from the first action to the last, median
    busy_ms: float  # of that, computing, on average over the workers, median
    bubble: float  # the measured idle share, median
    lowest: float  # of the rounds' medians
    highest: float  # of the rounds' medians
    textbook: float  # (S-1)/(M+S-1)
    own: float  # what the schedule's timetable has if a backward pass takes twice a forward pass
    with_costs: float  # what it has if each action takes what it took on average
    typical: PipelineTrace  # the step whose idle share is the median


def rows_of(settings: PipelineSettings, samples: Sequence[Sample], orders: dict[ScheduleName, Orders]) -> list[Row]:
    """A row for each schedule, in the order of the settings."""
    return [
        _row(settings, schedule, [each for each in samples if each.schedule == schedule], orders[schedule])
        for schedule in settings.schedules
    ]


def _row(settings: PipelineSettings, schedule: ScheduleName, samples: Sequence[Sample], orders: Orders) -> Row:
    steps = [step for sample in samples for step in sample.steps]
    rounds = [median(step.bubble for step in sample.steps) for sample in samples]
    in_order = sorted(steps, key=lambda step: step.bubble)
    return Row(
        schedule=schedule,
        stages_per_worker=settings.pipelining(schedule).stages_per_worker,
        steps=len(steps),
        step_ms=1000 * median(step.length for step in steps),
        busy_ms=1000 * median(step.length * (1 - step.bubble) for step in steps),
        bubble=median(step.bubble for step in steps),
        lowest=min(rounds),
        highest=max(rounds),
        textbook=textbook_bubble(settings.workers, settings.microbatches),
        own=simulate(orders).bubble,
        with_costs=_with_costs(orders, steps).bubble,
        typical=in_order[len(in_order) // 2],
    )


def _with_costs(orders: Orders, steps: Sequence[PipelineTrace]) -> PipelineTrace:
    """The timetable in which every action takes what those of its kind and stage took on average."""
    taken: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for step in steps:
        for slots in step.workers:
            for slot in slots:
                taken[slot.action.kind, slot.action.stage].append(slot.end - slot.begin)
    mean = {key: fmean(values) for key, values in taken.items()}
    return simulate(orders, lambda action: mean[action.kind, action.stage])


Progress = Callable[[Sample, int, int], None]
"""Called with each sample, how many there are by then, and how many there will be."""


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """A run and how it was made."""

    settings: PipelineSettings
    date: str  # YYYY-MM-DD
    machine: Machine
    command: str  # that makes the run again
    rows: tuple[Row, ...]  # one a schedule
    samples: tuple[Sample, ...]  # all of them

    @property
    def crowded(self) -> bool:
        """Whether workers share cores: then one computes while another waits, and no bubble can be seen."""
        return self.settings.workers > self.machine.cores


def measure_pipeline(settings: PipelineSettings, *, output: Path, progress: Progress) -> PipelineResult:
    """Measures every schedule once a round, in fresh processes; ``output`` is for the command in the report."""
    from lockstep.parallel.pipeline import orders_of  # imports torch's pipelining, which every command would wait for

    machine = this_machine()
    orders = {schedule: orders_of(settings.pipelining(schedule)) for schedule in settings.schedules}
    samples: list[Sample] = []
    for round in range(settings.rounds):
        for schedule in settings.schedules:
            samples.append(run_trial(settings, schedule, round=round))
            progress(samples[-1], len(samples), settings.rounds * len(settings.schedules))
    return PipelineResult(
        settings=settings,
        date=date.today().isoformat(),
        machine=machine,
        command=command_of(settings, output),
        rows=tuple(rows_of(settings, samples, orders)),
        samples=tuple(samples),
    )


def command_of(settings: PipelineSettings, output: Path) -> str:
    """The command that makes a run again."""
    flags = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    flags |= {"schedules": ",".join(settings.schedules), "output": output}
    arguments = [each for name, value in flags.items() for each in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join(["lockstep", "bench", "pipeline", *arguments])


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
        atomic_write(path, text)
    return files


def render_markdown(result: PipelineResult, picture: str) -> str:
    """The whole report; ``picture`` is the name of the picture's file."""
    parts = [
        f"# Schedules of a pipeline, {result.date}",
        "\n".join(f"- {name}: {text}" for name, text in _facts(result)),
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
    return draw_traces(tables, scale, title="measured steps of each schedule")


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
    settings = result.settings
    tokens = f"{settings.rows} sequences of {settings.sequence} tokens"
    processes = f"{settings.workers} workers, a process each with its share of the cores,"
    rounds = f"{settings.rounds} rounds, the schedules in turn, each in fresh processes"
    return [
        *result.machine.facts,
        (
            "model",
            f"BERT, {settings.layers} layers of width {settings.hidden}, vocabulary {settings.vocabulary}, fp32, SGD",
        ),
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
