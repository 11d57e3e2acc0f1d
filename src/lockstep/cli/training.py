"""What every ``lockstep train RECIPE`` does around the recipe's own run: devices or workers, folders, the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.backup import NO_BACKUP, BackupPlan
from lockstep.cli.devices import logical_table
from lockstep.cli.grid import NOT_DIVIDED, GridFlags, grid_table
from lockstep.cli.in_workers import InWorkers
from lockstep.cli.output import check_file, check_folder
from lockstep.cli.strategy import declared_workers, make_strategy, speaks, take_own_devices
from lockstep.cluster.resolve import cluster_from_environment
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.parallel.mesh_layout import MeshLayout
from lockstep.parallel.pipeline_config import PipelineConfig
from lockstep.report import draw_curves, epochs_table, history_columns, metrics_line
from lockstep.strategies.base import Strategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.train.fit import Verbose
from lockstep.train.logs import History

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
        grid: how workers divide the model.

    Raises:
        ConfigError: devices, and a grid.
    """

    devices: str | None
    output: Path
    check_exact: bool
    quiet: bool
    grid: GridFlags = NOT_DIVIDED

    def __post_init__(self) -> None:
        if self.grid.asked and self.devices is not None:
            raise ConfigError(
                f"--devices {self.devices} divides one process among replicas, and {self.grid.flags} gives each worker "
                "one device; leave one of them out"
            )


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


def _any_grid(grid: MeshLayout, pipelining: PipelineConfig) -> None:
    """Refuses none."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One recipe's run.

    Args:
        title: what is trained, such as "masked language model".
        work: on what, in batches of what size, for how long.
        seed: of the strategy.
        train: called with the strategy, the folder of the logs, the folder of the model, and how much to say.
        check: called with the strategy; ``str()`` of what it returns is printed.
        fits: called with the grid and its pipelines, where workers divide the model; refuses what its sizes do not
            allow.
        backup: what an interrupted run leaves, and whether this one goes on from it; it is removed at the end.
    """

    title: str
    work: str
    seed: int
    train: Callable[[Strategy, Path, Path, Verbose], Trained]
    check: Callable[[Strategy], object]
    fits: Callable[[MeshLayout, PipelineConfig], None] = _any_grid
    backup: BackupPlan = NO_BACKUP


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """One ``lockstep train RECIPE``, ready to be called.

    Args:
        job: the recipe's run.
        flags: the others.
    """

    job: TrainingJob
    flags: TrainingFlags

    def __call__(self) -> int | InWorkers:
        """Trains, or asks for the workers that divide the model, where nobody has started any."""
        grid, workers = self.flags.grid, declared_workers()
        if not grid.asked:
            return run_training(self.job, self.flags)
        self.check(grid.fewest_workers if workers is None else workers)
        if workers is not None or grid.fewest_workers == 1:
            return run_training(self.job, self.flags)
        check_output(self.flags.output.expanduser())
        self.job.backup.check(self.flags.output.expanduser())
        return InWorkers(workers=grid.fewest_workers)

    def check(self, workers: int) -> None:
        """Refuses a grid that does not fit the workers or the model, before any of them has begun.

        Raises:
            ConfigError: it does not; the message says which would.
        """
        if self.flags.grid.asked:
            grid = self.flags.grid.choose(workers)
            self.job.fits(grid, self.flags.grid.pipelining(grid))


def run_training(job: TrainingJob, flags: TrainingFlags) -> int:
    """Trains, prints the result and leaves logs, weights and curves in the output folder."""
    folder = flags.output.expanduser()
    # Now rather than after the training:
    check_output(folder)
    job.backup.check(folder)
    if speaks():  # two seconds of importing, which no other worker needs
        require("matplotlib", "plots")
        require("tensorboard", "train")
    say = print if speaks() else _say_nothing
    with closing(_begin(job, flags, say)) as strategy:
        workers = strategy.workers
        trained = _train(job, strategy, folder, verbose=0 if flags.quiet else 1)
        if workers.is_chief:
            _report(job, trained, strategy, folder)
            job.backup.remove(folder)
        if flags.check_exact:
            say(f"\n{job.check(strategy)}")
    return 0


def _begin(job: TrainingJob, flags: TrainingFlags, say: Callable[..., None]) -> Strategy:
    """Says on what it is going to train; the strategy."""
    if flags.grid.asked:
        cluster = cluster_from_environment()
        grid = flags.grid.choose(1 if cluster is None else cluster.num_workers)
        say(f"{job.title} on {counted(grid.workers, 'worker')}: {job.work}\n\n{grid_table(grid)}\n", flush=True)
        return flags.grid.make_strategy(cluster, seed=job.seed)
    chosen = take_own_devices(flags.devices)
    say(f"{job.title} on {counted(len(chosen), 'logical device')}: {job.work}\n\n{logical_table(chosen)}\n", flush=True)
    strategy = make_strategy(chosen, job.seed)
    workers = strategy.workers
    if workers.size > 1:
        say(f"{workers.size} workers, {workers.num_replicas} replicas: {', '.join(workers.names)}\n", flush=True)
    return strategy


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
    title = f"{job.title} on {_places(strategy)}"
    print(f"curves  {draw_curves(columns, output / 'curves.png', title=title, test=trained.test_metrics)}")
    for line in trained.last:
        print(line)


def _places(strategy: Strategy) -> str:
    if isinstance(strategy, ParallelStrategy):
        return str(strategy.grid)
    return ", ".join(device.name for device in strategy.devices)


def check_output(output: Path) -> None:
    """Refuses an output that could not be written at the end, before anything is trained and without writing."""
    for folder in (output, output / "logs", output / "model"):
        check_folder(folder)
    check_file(output / "curves.png")
