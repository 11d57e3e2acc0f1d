"""Runs the recipe ``reviews`` on a strategy: training with validation, the best epoch's test, and answers.

What a command calls. It prints nothing itself. Checkpoints are written as the Trainer writes them; the model and what
belongs to it at the end, if asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.collectives.values import on_chief
from lockstep.extras import require
from lockstep.recipes.memory.lora import trained_parameters
from lockstep.recipes.quiet import quiet_transformers
from lockstep.recipes.reviews.answers import Answer, ask, write_predictions
from lockstep.recipes.reviews.build import ReviewsTask, build_reviews
from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.exactness import check_exactness
from lockstep.recipes.reviews.model import longest_row
from lockstep.recipes.reviews.places import Places
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback
from lockstep.train.logs import History

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from lockstep.recipes.reviews.trainer import ReviewsTrainer

__all__ = ["Answer", "Places", "ReviewsResult", "build_reviews", "check_exactness", "train_reviews"]


@dataclass(frozen=True, kw_only=True)
class ReviewsResult:
    """What a run came to.

    Args:
        history: the logs and times of the epochs.
        best_epoch: the one with the highest F1 over the validation part, from 1; the test and the answers are its.
        test_metrics: loss, accuracy and F1 over the test part.
        parameters: of the whole model.
        trained_parameters: of them, those that were trained.
        answers: to the texts, in their order.
    """

    history: History
    best_epoch: int
    test_metrics: dict[str, float]
    parameters: int
    trained_parameters: int
    answers: tuple[Answer, ...]


def train_reviews(
    config: ReviewsConfig,
    task: ReviewsTask,
    strategy: Strategy,
    *,
    texts: Sequence[str] = (),
    places: Places | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    bar: Callback | None = None,
) -> ReviewsResult:
    """Trains and validates by epochs, tests the best of them, and asks it about ``texts``. Every worker must call it.

    Args:
        config: the run.
        task: its parts, as ``build_reviews`` makes them of the config; its model is trained.
        strategy: the devices.
        texts: new reviews to classify.
        places: where to write; None writes nothing.
        callbacks: of transformers.
        bar: a progress bar of ``lockstep.train``, told of epochs and steps.
    """
    places = places or Places()
    with (
        quiet_transformers(extra="text"),
        places.for_checkpoints() as checkpoints,
        _trainer_of(
            config, task, strategy, checkpoints=checkpoints, logs=places.logs, callbacks=callbacks, bar=bar
        ) as (trainer, history),
    ):
        trainer.train(resume_from_checkpoint=None if places.resume is None else str(places.resume))
        metrics, logits = _tested(trainer, task)
        trained = trained_parameters(task.model)
        model = _without_adapters(trainer.model)
        on_chief(strategy.workers, "write the model", lambda: _write(places, model, task, logits))
        return ReviewsResult(
            history=history,
            best_epoch=_best_epoch(history),
            test_metrics=metrics,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trained_parameters=trained,
            answers=ask(model, task.tokenizer, texts, max_tokens=longest_row(config, model)),
        )


@contextmanager
def _trainer_of(
    config: ReviewsConfig,
    task: ReviewsTask,
    strategy: Strategy,
    *,
    checkpoints: Path,
    logs: Path | None,
    callbacks: Sequence[TrainerCallback],
    bar: Callback | None,
) -> Iterator[tuple[ReviewsTrainer, History]]:
    """The Trainer and what will record it; afterwards the bar and the log files are closed."""
    from lockstep.recipes.reviews.record import EpochRecord
    from lockstep.recipes.reviews.trainer import ReviewsTrainer, training_arguments

    with ExitStack() as stack:
        args = training_arguments(config, checkpoints, on_cpu=strategy.devices[0].kind == "CPU")
        hooks = [*callbacks]
        if logs is not None and strategy.workers.is_chief:
            hooks.append(_tensorboard(stack, logs))
        trainer = ReviewsTrainer(config, task, args=args, strategy=strategy, callbacks=hooks)
        rows = trainer.args.train_batch_size * config.accumulate
        record = EpochRecord(rows=len(task.train), batch_size=rows, bar=bar if strategy.workers.is_chief else None)
        trainer.add_callback(record)
        if bar is not None:
            stack.enter_context(closing(bar))
        yield trainer, record.history


def _tensorboard(stack: ExitStack, logs: Path) -> TrainerCallback:
    """Transformers' own: the names of its users, every ten steps."""
    writer = stack.enter_context(closing(require("torch.utils.tensorboard", "train").SummaryWriter(str(logs))))
    callback: TrainerCallback = require("transformers.integrations", "text").TensorBoardCallback(writer)
    return callback


def _tested(trainer: ReviewsTrainer, task: ReviewsTask) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics of the test, and the logits in the order of its reviews."""
    rows, order = task.test.sorted_by_length()
    found: Any = trainer.predict(rows, metric_key_prefix="test")
    logits = torch.as_tensor(found.predictions)
    in_order = torch.empty_like(logits)
    in_order[torch.tensor(order)] = logits
    return {name: float(found.metrics[f"test_{name}"]) for name in ("loss", "accuracy", "f1")}, in_order


def _best_epoch(history: History) -> int:
    scores = history.history["val_f1"]
    return history.epoch[scores.index(max(scores))] + 1


def _without_adapters(model: Any) -> Any:
    """A plain transformers model: adapters are added to the weights that they stand beside."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def _write(places: Places, model: Any, task: ReviewsTask, logits: torch.Tensor) -> None:
    if places.model is not None:
        model.save_pretrained(places.model)
        task.tokenizer.save_pretrained(places.model)
    if places.predictions is not None:
        write_predictions(places.predictions, task.parts.test, logits, task.names)
