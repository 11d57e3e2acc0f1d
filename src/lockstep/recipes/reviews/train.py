"""Training of the recipe ``reviews`` with the Trainer: validation by epoch, the best epoch's test, and new reviews.

It prints nothing but the progress. Checkpoints are those of the Trainer.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lockstep.atomic_files import atomic_write
from lockstep.collectives.communicator import run_on_chief
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.config_checks import at_least
from lockstep.recipes.exactness import ExactnessReport, Weights, compare
from lockstep.recipes.from_hub import quiet_transformers
from lockstep.recipes.memory import trained_parameters
from lockstep.recipes.reviews.batches import LengthGroupedSampler
from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.dataset import Review
from lockstep.recipes.reviews.task import ReviewsTask, build_collator, build_reviews, max_row_length
from lockstep.recipes.training import MakeOptimizer, Result, num_parameters
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from lockstep.recipes.reviews.trainer import ReviewsTrainer


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Where a run writes, and which checkpoint it resumes from; nothing is written where a path is None.

    ``checkpoints`` gets the Trainer's last three, ``logs`` those for TensorBoard, ``model`` what ``pipeline`` reads;
    ``predictions`` is a CSV file for the test split.
    """

    checkpoints: Path | None = None
    logs: Path | None = None
    model: Path | None = None
    predictions: Path | None = None
    resume: Path | None = None

    def __post_init__(self) -> None:
        if self.resume is not None and not (self.resume / "trainer_state.json").is_file():
            raise ConfigError(
                f"resume={str(self.resume)!r} is not a checkpoint of a Trainer: it has no trainer_state.json; give a"
                " folder such as runs/reviews/checkpoints/20260101-120000/checkpoint-109"
            )


@dataclass(frozen=True, kw_only=True)
class Classified:
    """A text, the name of its likeliest class, and the probability of this class according to the model."""

    text: str
    label: str
    score: float


@dataclass(frozen=True, kw_only=True)
class ReviewsResult(Result):
    """The result of a run; the test metrics are loss, accuracy and F1.

    Args:
        best_epoch: the epoch, from 1, with the highest F1 over the validation split; it is tested.
        trained_parameters: number of parameters that were trained.
        classified: the classes of the given texts, in their order.
    """

    best_epoch: int
    trained_parameters: int
    classified: tuple[Classified, ...]


def train_reviews(
    config: ReviewsConfig,
    task: ReviewsTask,
    strategy: Strategy,
    *,
    texts: Sequence[str] = (),
    paths: RunPaths | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    bar: Callback | None = None,
) -> ReviewsResult:
    """Trains and validates epoch by epoch, tests the best epoch, and classifies ``texts``. Every worker must call it.

    Args:
        config: the configuration of the run.
        task: the result of ``build_reviews``; its model is trained.
        strategy: the devices.
        texts: new reviews to classify.
        paths: where to write; None writes nothing.
        callbacks: callbacks of transformers.
        bar: a progress bar of ``lockstep.train``.
    """
    from lockstep.recipes.reviews.trainer import HistoryCallback, ReviewsTrainer, training_arguments

    paths, is_chief = paths or RunPaths(), strategy.workers.is_chief
    with quiet_transformers(extra="text"), ExitStack() as stack:
        if bar is not None:
            stack.enter_context(closing(bar))
        checkpoints = paths.checkpoints
        if checkpoints is None:  # the best epoch is read back from its checkpoint
            checkpoints = Path(stack.enter_context(TemporaryDirectory(prefix="lockstep-reviews-")))
        args = training_arguments(config, checkpoints, on_cpu=strategy.devices[0].kind == "CPU")
        trainer = ReviewsTrainer(config, task, args=args, strategy=strategy, callbacks=[*callbacks])
        if paths.logs is not None and is_chief:
            writer = stack.enter_context(closing(_summary_writer(paths.logs)))
            trainer.add_callback(require("transformers.integrations", "text").TensorBoardCallback(writer))
        rows = trainer.args.train_batch_size * config.accumulate
        recorder = HistoryCallback(rows=len(task.train), batch_size=rows, bar=bar if is_chief else None)
        trainer.add_callback(recorder)
        trainer.train(resume_from_checkpoint=None if paths.resume is None else str(paths.resume))
        metrics, logits = _test(trainer, task)
        trained = trained_parameters(task.model)
        model: Any = trainer.model
        if config.lora is not None:
            model = model.merge_and_unload()  # of peft: adds the adapters to the weights
        run_on_chief(strategy.workers, "write the model", lambda: _write(paths, model, task, logits))
        history, f1 = recorder.history, recorder.history.history["val_f1"]
        return ReviewsResult(
            history=history,
            best_epoch=history.epoch[f1.index(max(f1))] + 1,
            test_metrics=metrics,
            parameters=num_parameters(model),
            trained_parameters=trained,
            classified=classify(model, task.tokenizer, texts, max_tokens=max_row_length(config, model)),
        )


def _summary_writer(folder: Path) -> Any:
    return require("torch.utils.tensorboard", "train").SummaryWriter(str(folder))


def _test(trainer: ReviewsTrainer, task: ReviewsTask) -> tuple[dict[str, float], Tensor]:
    """The metrics of the test split, and its logits in the order of its reviews."""
    rows, order = task.test.sorted_by_length()
    output: Any = trainer.predict(rows, metric_key_prefix="test")
    sorted_logits = torch.as_tensor(output.predictions)
    logits = torch.empty_like(sorted_logits)
    logits[torch.tensor(order)] = sorted_logits
    return {name: float(output.metrics[f"test_{name}"]) for name in ("loss", "accuracy", "f1")}, logits


def _write(paths: RunPaths, model: Any, task: ReviewsTask, logits: Tensor) -> None:
    if paths.model is not None:
        model.save_pretrained(paths.model)
        task.tokenizer.save_pretrained(paths.model)
    if paths.predictions is not None:
        write_predictions(paths.predictions, task.splits.test, logits, task.names)


def write_predictions(path: Path, reviews: Sequence[Review], logits: Tensor, names: Sequence[str]) -> None:
    """Writes label, predicted class, score and text of each review to a CSV file; logits are [reviews, classes]."""
    best = logits.float().softmax(dim=1).max(dim=1)
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["label", "predicted", "score", "review"])
    for review, index, score in zip(reviews, best.indices.tolist(), best.values.tolist(), strict=True):
        rows.writerow([review.label, names[index], f"{score:.4f}", review.text])
    atomic_write(path, text.getvalue())


def classify(model: Any, tokenizer: Any, texts: Sequence[str], *, max_tokens: int) -> tuple[Classified, ...]:
    """Classifies texts with a text-classification pipeline of transformers; the model is put into eval mode."""
    if not texts:
        return ()
    pipeline = require("transformers", "text").pipeline(
        "text-classification", model=model.eval(), tokenizer=tokenizer, device=model.device
    )
    # One at a time: for a list the pipeline sets an environment variable for good.
    found = [pipeline(text, truncation=True, max_length=max_tokens)[0] for text in texts]
    return tuple(
        Classified(text=text, label=best["label"], score=float(best["score"]))
        for text, best in zip(texts, found, strict=True)
    )


def check_exactness(config: ReviewsConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the Trainer and again without it, from the same weights on the same batches.

    Dropout is off, since each replica draws its own masks by definition. So are gradient clipping and the learning rate
    schedule, so that the plain loop needs neither. Every worker must call it.

    Args:
        config: the configuration of the run.
        strategy: the replicas to compare with one device.
        steps: number of global batches, one update each.

    Raises:
        ConfigError: ``steps`` is below 1.
        DataError: the reviews cannot be used.
    """
    at_least("steps", steps, 1)
    task = build_reviews(replace(config, dropout=0.0), device=strategy.devices[0].torch_device)
    for module in task.model.modules():  # a pretrained model has its own dropout
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    size = config.per_device_train_batch_size * strategy.num_replicas_in_sync
    sampler = LengthGroupedSampler(task.train, batch_size=size, window=config.length_window, seed=config.seed)
    batches = list(islice(DataLoader(task.train, size, sampler=sampler, collate_fn=build_collator(task)), steps))
    train = partial(_train_with_trainer, config=config, task=task, strategy=strategy, steps=len(batches))
    adam = partial(torch.optim.AdamW, lr=config.rate, weight_decay=config.weight_decay, fused=True)
    return compare(task.model, strategy, batches, train, _plain_loss, adam=adam, condition="no dropout")


def _train_with_trainer(
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    config: ReviewsConfig,
    task: ReviewsTask,
    strategy: Strategy,
    steps: int,
) -> tuple[Sequence[float], Weights]:
    """The loss of every step, and the weights after the last."""
    from lockstep.recipes.reviews.trainer import ReviewsTrainer, training_arguments

    optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
    with TemporaryDirectory(prefix="lockstep-exact-") as folder, quiet_transformers(extra="text"):
        args = training_arguments(
            replace(config, clip_norm=0.0),
            folder,
            on_cpu=strategy.devices[0].kind == "CPU",
            max_steps=steps,
            logging_steps=1,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
        )
        constant = (optimizer, LambdaLR(optimizer, lambda step: 1.0))
        of_module = replace(task, model=module)
        trainer = ReviewsTrainer(config, of_module, args=args, strategy=strategy, callbacks=[], optimizers=constant)
        trainer.train()
    losses = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    return losses, dict(module.named_parameters())


def _plain_loss(module: nn.Module, batch: Any) -> Tensor:
    logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"])
