"""What every ``lockstep train RECIPE`` does around the recipe's own run: devices, folders, the report at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.devices import logical_table, take_devices
from lockstep.cli.output import check_file, check_folder
from lockstep.cli.strategy import make_strategy, speaks
from lockstep.extras import require
from lockstep.report.curves import draw_curves
from lockstep.report.table import epochs_table, history_columns, metrics_line
from lockstep.strategies.base import Strategy
from lockstep.train.fit_settings import Verbose
from lockstep.train.history import History

OutputFlag = Annotated[Path, typer.Option(metavar="DIR", help="Where the logs, the weights and the curves are put.")]
CheckFlag = Annotated[
    bool, typer.Option("--check-exact", help="Then repeat the first steps on one device, without dropout, and compare.")
]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="No progress lines; the result alone.")]


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """The flags that every recipe has beside its own.

    Args:
        devices: as ``--devices`` was given.
        output: folder for logs, weights and curves.
        check_exact: compare the first steps with one device.
        quiet: no progress lines.
    """

    devices: str | None
    output: Path
    check_exact: bool
    quiet: bool


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What is reported of a run.

    Args:
        history: the logs and times of the epochs.
        test_metrics: the result over the test part.
        size: of the model, in words.
        notes: lines to print below the table of epochs.
        last: lines to print at the end.
    """

    history: History
    test_metrics: Mapping[str, float]
    size: str
    notes: Sequence[str] = ()
    last: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One recipe's run.

    Args:
        title: what is trained, such as "masked language model".
        work: on what, in batches of what size, for how long.
        seed: of the strategy.
        train: called with the strategy, the folder of the logs, the folder of the model, and how much to say.
        check: called with the strategy; ``str()`` of what it returns is printed.
    """

    title: str
    work: str
    seed: int
    train: Callable[[Strategy, Path, Path, Verbose], Trained]
    check: Callable[[Strategy], object]


def run_training(job: TrainingJob, flags: TrainingFlags) -> int:
    """Trains, prints the result and leaves logs, weights and curves in the output folder."""
    folder = flags.output.expanduser()
    # Now rather than after the training:
    check_output(folder)
    for package in ("matplotlib", "tensorboard"):
        require(package, "report")
    chosen = take_devices(flags.devices)
    say = print if speaks() else _say_nothing
    say(f"{job.title} on {counted(len(chosen), 'logical device')}: {job.work}\n\n{logical_table(chosen)}\n", flush=True)
    with closing(make_strategy(chosen, job.seed)) as strategy:
        workers = strategy.workers
        if workers.size > 1:
            say(f"{workers.size} workers, {workers.num_replicas} replicas: {', '.join(workers.names)}\n", flush=True)
        trained = _train(job, strategy, folder, verbose=0 if flags.quiet else 1)
        if workers.is_chief:
            _report(job, trained, strategy, folder)
        if flags.check_exact:
            say(f"\n{job.check(strategy)}")
    return 0


def _say_nothing(*_: object, **__: object) -> None:
    """Only the chief prints."""


def counted(number: int, noun: str) -> str:
    """``1 line``, ``128 lines``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _train(job: TrainingJob, strategy: Strategy, output: Path, *, verbose: Verbose) -> Trained:
    # A folder of its own for every run: TensorBoard draws the runs under one folder as one crooked line.
    logs = output / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}"
    return job.train(strategy, logs, output / "model", verbose)


def _report(job: TrainingJob, trained: Trained, strategy: Strategy, output: Path) -> None:
    columns = history_columns(trained.history)
    print(f"\n{epochs_table(columns)}\n")
    for note in trained.notes:
        print(note)
    print(f"test    {metrics_line(trained.test_metrics)}")
    print(f"model   {output / 'model'} ({trained.size})")
    print(f"logs    tensorboard --logdir {output / 'logs'}")
    title = f"{job.title} on {', '.join(device.name for device in strategy.devices)}"
    print(f"curves  {draw_curves(columns, output / 'curves.png', title=title, test=trained.test_metrics)}")
    for line in trained.last:
        print(line)


def check_output(output: Path) -> None:
    """Refuses an output that could not be written at the end, before anything is trained and without writing."""
    for folder in (output, output / "logs", output / "model"):
        check_folder(folder)
    check_file(output / "curves.png")
