"""What every ``lockstep train RECIPE`` does: devices or workers, folders, backups, the report.

flags -> TrainingCommand -> strategy -> the recipe's training -> report, weights, logs and curves in --output
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer

from lockstep import __version__, console
from lockstep.atomic_files import atomic_write
from lockstep.cluster.environment import cluster_from_environment
from lockstep.console import counted
from lockstep.errors import ConfigError
from lockstep.extras import find_package
from lockstep.launch.batch_size_finder import find_batch_size
from lockstep.strategies.base import Strategy
from lockstep.train.fit import Verbose
from lockstep.train.model import Model
from lockstep_tools.cli.devices import (
    declared_workers,
    is_chief,
    logical_table,
    make_strategy,
    take_own_devices,
)
from lockstep_tools.cli.flags import (
    NO_FLAG,
    RESULT_FILES,
    DevicesFlag,
    FolderFlag,
    check_file,
    check_folder,
    check_no_results,
)
from lockstep_tools.cli.in_workers import InWorkers, ResumeFlag, naming_what_resumes
from lockstep_tools.cli.training_flags import NO_BACKUP, NO_MESH, BackupPlan, MeshFlags
from lockstep_tools.recipes.model_card import ModelCard
from lockstep_tools.recipes.run_record import RunRecord, layout_of, peak_memory
from lockstep_tools.recipes.training import Result
from lockstep_tools.report import epochs_table, metrics_line, write_curves, write_history


@dataclass(frozen=True, kw_only=True)
class RunFolders:
    """The folders of a run: ``--output``, and in it one for the logs of this run, which TensorBoard draws as a line."""

    output: Path
    logs: Path

    @classmethod
    def new(cls, output: Path) -> RunFolders:
        """The folders of a run that begins now."""
        return cls.named(output, f"{datetime.now():%Y%m%d-%H%M%S}")

    @classmethod
    def named(cls, output: Path, run: str) -> RunFolders:
        """The folders of the run with this name, the time at which it began."""
        return cls(output=output, logs=output / "logs" / run)

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.logs.name

    @property
    def model(self) -> Path:
        return self.output / "model"

    @property
    def checkpoints(self) -> Path:
        """The folder for the checkpoints that the Trainer saves in this run."""
        return self.output / "checkpoints" / self.run


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What is reported of a run.

    Args:
        result: the result of the recipe.
        card: the card of the model.
        tested_epoch: the epoch, from 1, whose weights the model has.
        size: what follows the number of parameters in the line ``model``.
        baseline: what the test result compares with.
        notes: lines below the table of epochs.
        last: lines at the end.
    """

    result: Result
    card: ModelCard
    tested_epoch: int
    size: str
    baseline: str | None = None
    notes: Sequence[str] = ()
    last: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(ABC):
    """One ``lockstep train RECIPE``, ready to be called.

    ``recipe`` is the module that trains, ``name`` its name, ``data`` the module that reads the data, ``embedded`` what
    it reads without --data, ``title`` says what is trained, and ``size`` names the setting that may be "auto".

    Args:
        devices: how to divide the devices.
        memory_limit: MB of memory on the host that each process may take, for a batch size of auto; default: 0.8 of
            what is free.
        output: folder for logs, weights and curves.
        overwrite: replace a finished run's results in --output.
        check_exact: then repeat the first steps on one device, without dropout, and compare.
        quiet: print the result alone.
        config: the recipe's configuration.
        auto: whether the batch size is found by trial steps.
        mesh: how workers divide the model.
        backup: how often a backup is saved.
    """

    devices: DevicesFlag = None
    memory_limit: Annotated[int | None, typer.Option(metavar="MB")] = None
    output: FolderFlag
    overwrite: bool = False
    check_exact: Annotated[bool, NO_FLAG] = False
    quiet: bool = False
    config: Any
    auto: Annotated[bool, NO_FLAG] = False
    mesh: MeshFlags = NO_MESH
    backup: BackupPlan = NO_BACKUP
    size: ClassVar[str] = "batch_size"
    recipe: ClassVar[Any]
    name: ClassVar[str]
    data: ClassVar[Any]
    embedded: ClassVar[str]
    title: ClassVar[str]

    def __post_init__(self) -> None:
        if self.mesh.divides_model and self.devices is not None:
            raise ConfigError(
                f"--devices {self.devices} divides one process among replicas, and {self.mesh.flags} gives each worker "
                "one device; leave one of them out"
            )
        if self.mesh.divides_model and self.auto:
            raise ConfigError(
                f"a batch size of auto is found by steps of one worker alone, and {self.mesh.flags} divides the model"
                " among workers; give a number"
            )
        if self.memory_limit is not None and not self.auto:
            raise ConfigError(
                f"--memory-limit {self.memory_limit} is a limit for the search of a batch size; add --batch-size auto"
                " (--per-device-train-batch-size auto for reviews)"
            )

    @property
    @abstractmethod
    def work(self) -> str:
        """Data and batches, for a person to read."""

    @property
    def source(self) -> str:
        """The data, for a person to read."""
        return self.embedded if self.config.data is None else str(self.config.data)

    @abstractmethod
    def train(self, strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        """Trains on a strategy."""

    def newest_backup(self, output: Path) -> Path | None:
        """The newest backup of an interrupted run in ``output``; None if there is none."""
        return self.backup.newest(output)

    def check_backup(self, output: Path) -> None:
        """Checks, without writing, that no backup of an interrupted run would be lost."""
        self.backup.check(output)

    def resume_flag(self, output: Path) -> str | None:
        """The flag that continues this run from what it has saved; None if it has saved nothing."""
        return None if self.newest_backup(output) is None else "--resume"

    def find_resume_flag(self) -> ResumeFlag:
        """For a launcher: checks the output, and returns what calls ``resume_flag``."""
        return partial(self.resume_flag, self.check_output())

    def choose_folders(self, output: Path) -> RunFolders:
        """The folders of this run. Every worker calls it before any of them writes."""
        return RunFolders.new(output)

    def _places(self, folders: RunFolders, verbose: Verbose) -> dict[str, Any]:
        """Where a recipe of ``Model`` writes, and what it prints."""
        callbacks = self.backup.callbacks(folders.output)
        places = {"callbacks": callbacks, "log_dir": folders.logs, "output_dir": folders.model, "verbose": verbose}
        return {**places, "choose_batch_size": partial(self.choose_batch_size, folders) if self.auto else None}

    def choose_batch_size(self, folders: RunFolders, model: Model, sample: tuple[Any, Any], rows: int) -> int:
        """Finds and prints a global batch size. Trials are kept in --output, so a resumed run has the same."""
        self._say("trying training steps of growing batches")
        result = find_batch_size(
            model, *sample, largest=rows, memory_limit_mb=self.memory_limit, cache=folders.output / "batch-size"
        )
        self._say(f"{result}\n")
        return result.batch_size

    def _config_of(self, result: Result) -> Any:
        """The config with the batch size of the run."""
        return replace(self.config, **{self.size: result.batch_size})

    def _batches(self, number: int, noun: str) -> str:
        searched = f"batches of as many {noun}s as trial steps find"
        return searched if self.auto else f"global batches of {counted(number, noun)}"

    def __call__(self) -> int | InWorkers:
        """Trains; or asks for workers, if workers divide the model and nobody has started any."""
        workers = declared_workers()
        if self.mesh.divides_model:
            self.check(self.mesh.fewest_workers if workers is None else workers)
            # Only where nobody has started workers: under ``lockstep run`` or torchrun this process is one of them.
            if workers is None and self.mesh.fewest_workers > 1:
                return InWorkers(workers=self.mesh.fewest_workers, resume_flag=self.find_resume_flag())
        return self._run()

    def check(self, workers: int) -> None:
        """Checks that the mesh fits the number of workers and the model, before any worker is started.

        Raises:
            ConfigError: it does not; the message says what would.
        """
        if self.mesh.divides_model:
            mesh = self.mesh.choose(workers)
            self.mesh.pipelining(mesh)

    def check_output(self) -> Path:
        """Checks before hours of training that its results can be written. Returns the folder."""
        output = self.output.expanduser()
        for folder in (output, output / "logs", output / "model"):
            check_folder(folder)
        for name in RESULT_FILES:
            check_file(output / name)
        self.check_backup(output)
        if not self.overwrite and not self.continues_run_in(output):
            check_no_results(output)
        return output

    def continues_run_in(self, output: Path) -> bool:
        """Whether this run goes on from a backup in ``output``, and so may replace what that run has left."""
        return self.backup.resume and self.newest_backup(output) is not None

    def _run(self) -> int:
        """Trains, prints the result, and leaves logs, weights and curves in the output folder."""
        began = time.monotonic()
        output = self.check_output()
        if is_chief():
            if self.config.data is not None:
                self.data.check_data(self.config.data.expanduser())
            # What the end of the training needs is looked for before hours of it.
            find_package("matplotlib", "plots")
            find_package("tensorboard", "train")
        # Before anything is written: a worker that is late would otherwise find what the chief has just made.
        folders = self.choose_folders(output)
        # Until the backup is removed, after the results are written, Ctrl-C can be told how to go on.
        with closing(self._strategy()) as strategy, naming_what_resumes(partial(self.resume_flag, output)):
            self._say("reading the data and building the model; then the first step")
            trained = self.train(strategy, folders, 0 if self.quiet else 1)
            if strategy.workers.is_chief:
                self._write(trained, strategy, folders, time.monotonic() - began)
                self._report(trained, folders)
                self.backup.remove(output)
            if self.check_exact:
                say(f"\n{self.recipe.check_exactness(self.config, strategy)}")
        return 0

    def _strategy(self) -> Strategy:
        """Prints what will be trained on which devices, and makes the strategy."""
        work = f"{self.work}, {counted(self.config.epochs, 'epoch')}, {self.config.precision}"
        if self.mesh.divides_model:
            cluster = cluster_from_environment()
            mesh = self.mesh.choose(1 if cluster is None else cluster.num_workers)
            self._say(f"{self.title} on {counted(mesh.size, 'worker')}, {mesh}: {work}\n")
            return self.mesh.make_strategy(cluster, seed=self.config.seed)
        devices = take_own_devices(self.devices)
        self._say(f"{self.title} on {counted(len(devices), 'logical device')}: {work}\n\n{logical_table(devices)}\n")
        strategy = make_strategy(devices, self.config.seed)
        workers = strategy.workers
        if workers.size > 1:
            self._say(f"{workers.size} workers, {workers.num_replicas} replicas: {', '.join(workers.names)}\n")
        return strategy

    def _write(self, trained: Trained, strategy: Strategy, folders: RunFolders, seconds: float) -> None:
        """Writes curves, history, model card, and last the record, which says that the run is finished."""
        result, output = trained.result, folders.output
        data = self.embedded if self.config.data is None else self.config.data.expanduser().resolve().name
        record = RunRecord(
            recipe=self.name,
            run=folders.run,
            data=data,
            config=self._config_of(result),
            result=result,
            tested_epoch=trained.tested_epoch,
            layout=layout_of(strategy),
            seconds=seconds,
            memory=peak_memory(strategy),
        )
        where = str(strategy.layout or ", ".join(device.name for device in strategy.devices))
        title, settings = f"{self.title} on {where}", self._settings(result)
        write_curves(result.history, output / "curves.png", title=title, settings=settings, test=result.test_metrics)
        write_history(result.history, output / "history.csv")
        atomic_write(folders.model / "README.md", trained.card.render(record))
        # The last file: whoever sees it finds all others whole.
        atomic_write(output / "result.json", record.to_json())

    def _report(self, trained: Trained, folders: RunFolders) -> None:
        result, output = trained.result, folders.output
        lines = [
            f"{epochs_table(result.history)}\n",
            *trained.notes,
            *([] if result.stopping is None else [f"best    {result.stopping}"]),
            *([] if result.few_updates is None else [f"updates {result.few_updates}"]),
            f"test    {metrics_line(result.test_metrics)}",
            *([] if trained.baseline is None else [f"beside  {trained.baseline}"]),
            f"model   {folders.model} ({result.parameters:,} parameters{trained.size})",
            f"logs    tensorboard --logdir {output / 'logs'}",
            f"curves  {output / 'curves.png'}",
            f"numbers {output / 'history.csv'}, {output / 'result.json'}",
            *trained.last,
        ]
        if self.quiet:  # else it stands below the epochs, where fit writes it
            lines.append(f"fingerprint {result.fingerprint}")
        print(console.fill("\n".join(lines if self.quiet else ["", *lines])), flush=True)

    def _say(self, text: str) -> None:
        """Prints what comes before the result, unless --quiet is given."""
        if not self.quiet:
            say(text)

    def _settings(self, result: Result) -> str:
        """When the run ended, the versions, and every setting that is not None, for the curves."""
        config = self._config_of(result)
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        settings = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{datetime.now():%Y-%m-%d %H:%M}, lockstep {__version__}, torch {torch.__version__}: {settings}"


def say(text: str) -> None:
    """Prints on the chief only."""
    if is_chief():
        print(console.fill(text), flush=True)
