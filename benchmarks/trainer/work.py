"""The work of all contenders: steps of the recipe ``reviews``, on a global batch that each divides in its own way.

A step is one of the Trainer's own loop, as a user has it: rows are masked and collated in it, gradients clipped, losses
logged. Everything here is called in a contender's process; model, rows and their order are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.trial import Batch, Workload
from lockstep.recipes.reviews.batches import LengthGroupedSampler
from lockstep.recipes.reviews.config import ReviewsConfig, reviews
from lockstep.recipes.reviews.task import ReviewsTask, build_collator, build_reviews

if TYPE_CHECKING:
    from transformers import TrainingArguments

ROWS = 128
"""Reviews in a global batch: the recipe's 64 on each of two replicas."""


@dataclass(frozen=True, kw_only=True)
class ReviewsWork:
    """What one contender's process trains.

    Args:
        config: the recipe's, with this contender's rows per device.
        task: model, rows, tokenizer.
        arguments: of the Trainer.
    """

    config: ReviewsConfig
    task: ReviewsTask
    arguments: TrainingArguments

    @property
    def order(self) -> LengthGroupedSampler:
        """The rows of an epoch, batch by batch: of every 128, the first half is the first replica's or process's."""
        return _order(self.config, self.task)


@contextmanager
def reviews_work(*, shares: int, steps: int) -> Iterator[ReviewsWork]:
    """Builds model and data, and ends with the folder that the Trainer would save to.

    Args:
        shares: among how many devices or processes the global batch is divided.
        steps: how many are trained.
    """
    from lockstep.recipes.reviews.trainer import training_arguments

    config = replace(reviews(), per_device_train_batch_size=ROWS // shares)
    with TemporaryDirectory(prefix="lockstep-bench-") as folder:
        arguments = training_arguments(
            config,
            folder,
            on_cpu=True,
            max_steps=steps,
            logging_first_step=True,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
        )
        yield ReviewsWork(config=config, task=build_reviews(config), arguments=arguments)


def _order(config: ReviewsConfig, task: ReviewsTask) -> LengthGroupedSampler:
    return LengthGroupedSampler(task.train, batch_size=ROWS, window=config.length_window, seed=config.seed)


def _model() -> nn.Module:
    model: nn.Module = build_reviews(reviews()).model
    return model


def _batches(batches: int) -> list[Batch]:
    config = reviews()
    task = build_reviews(config)
    loader = DataLoader(task.train, ROWS, sampler=_order(config, task), collate_fn=build_collator(task))
    inputs = [dict(batch) for batch in islice(loader, batches)]
    return [(batch, batch.pop("labels")) for batch in inputs]


def _loss(outputs: Any, labels: Tensor) -> tuple[Tensor, int]:
    return cross_entropy(outputs.logits, labels, reduction="sum"), len(labels)


REVIEWS = Workload(
    name="reviews",
    title="the recipe `reviews`: a BERT of two layers of width 128 and 20,000 words on Chinese reviews, global batch"
    f" {ROWS}, padded to its longest row, dropout 0.1, AdamW, gradients clipped",
    make_module=_model,
    make_batches=_batches,
    loss=_loss,
    count=ROWS,
    learning_rate=reviews().rate,
)
