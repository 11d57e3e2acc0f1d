"""Training of the recipe ``reviews`` with the Trainer: validation by epoch, the best epoch's test, and new reviews.

It prints nothing but the progress. Checkpoints are those of the Trainer.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from lockstep.collectives.communicator import run_on_chief
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback, TensorBoard
from lockstep.train.model import Model
from lockstep_tools.recipes.from_hub import quiet_transformers
from lockstep_tools.recipes.memory import trained_parameters
from lockstep_tools.recipes.reviews.config import ReviewsConfig
from lockstep_tools.recipes.reviews.task import ReviewsTask, build_collator, max_row_length
from lockstep_tools.recipes.training import (
    SAMPLE_ROWS,
    ChooseBatchSize,
    Result,
    ResumeCheck,
    num_parameters,
    settings_except,
)

if TYPE_CHECKING:
    from transformers import TrainerCallback


_MAY_CHANGE = (
    *("data", "encoding", "pretrained", "gradient_checkpointing"),
    *("per_device_train_batch_size", "per_device_eval_batch_size"),
)
"""Settings that may differ in a resumed run: paths, how the same numbers are computed, and the rows of one replica."""


def per_device_batch_size(config: ReviewsConfig, task: ReviewsTask, strategy: Strategy, choose: ChooseBatchSize) -> int:
    """Returns the rows per replica of the global batch that ``choose`` returns. Every worker must call it.

    It gets a Model of a copy of the task's model, whose steps compute and keep what the Trainer's do.
    """
    clip_norm = config.clip_norm or None
    with strategy.scope():
        # The strategy mirrors this module in place; the Trainer needs the task's model as it is.
        model = Model(copy.deepcopy(task.model))
        model.compile(
            lambda parameters: torch.optim.AdamW(
                (parameter for parameter in parameters if parameter.requires_grad), config.rate
            ),
            "cross_entropy",
            precision=config.precision,
            clip_norm=clip_norm,
        )
    longest = task.train.lengths.argsort(descending=True, stable=True)[:SAMPLE_ROWS].tolist()
    x = dict(build_collator(task)([task.train[index] for index in longest]))
    y = x.pop("labels")
    return max(1, choose(model, (x, y), len(task.train)) // strategy.num_replicas_in_sync)


def run_settings(config: ReviewsConfig, task: ReviewsTask, strategy: Strategy) -> dict[str, Any]:
    """Returns name -> value of everything that the results depend on, except the devices; a hash of tokens and labels.

    The batch size is that of all replicas, so a run may go on with more or fewer of them.
    """
    size = config.per_device_train_batch_size * strategy.num_replicas_in_sync
    digest = hashlib.sha256()
    for rows in (task.train, task.valid):
        rows.update_digest(digest)
    return {**settings_except(config, _MAY_CHANGE), "global_batch_size": size, "reviews": digest.hexdigest()[:16]}


def check_resume(folder: Path, check: ResumeCheck, *, finished: bool) -> None:
    """Checks that a folder to resume from is a checkpoint of a Trainer, of a run with the settings of this one.

    A ``finished`` run may go on for another number of epochs.

    Raises:
        ConfigError: the folder is no checkpoint.
        CheckpointError: the settings differ.
    """
    from lockstep_tools.recipes.reviews.trainer import saved_settings

    if not (folder / "trainer_state.json").is_file():
        raise ConfigError(
            f"resume={str(folder)!r} is not a checkpoint of a Trainer: it has no trainer_state.json; give a folder such"
            " as runs/reviews/checkpoints/20260101-120000/checkpoint-109"
        )
    saved = saved_settings(folder)
    check.check_state_dict({name: saved[name] for name in saved if not (finished and name == "epochs")})


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder with a folder for each run, named by its time; None without one."""
    checkpoints = [
        (path.parent.name, int(path.name.rpartition("-")[2]), path)
        for path in folder.glob("*/checkpoint-*")
        if (path / "trainer_state.json").is_file()
    ]
    return max(checkpoints)[-1] if checkpoints else None


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
    checkpoint_dir: Path | None = None,
    log_dir: Path | None = None,
    output_dir: Path | None = None,
    resume: Path | None = None,
    resume_finished: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    bar: Callback | None = None,
) -> ReviewsResult:
    """Trains and validates epoch by epoch, tests the best epoch, and classifies ``texts``. Every worker must call it.

    Args:
        config: the configuration of the run.
        task: the result of ``build_reviews``; its model is trained.
        strategy: the devices.
        texts: new reviews to classify.
        checkpoint_dir: folder for the Trainer's last three checkpoints; None keeps none.
        log_dir: folder for TensorBoard logs; None writes none.
        output_dir: folder for the model and its tokenizer at the end, as ``pipeline`` reads them; None writes none.
        resume: the checkpoint of an interrupted run with the same settings to resume from.
        resume_finished: whether ``resume`` is of a finished run, which may go on for another number of epochs.
        callbacks: callbacks of transformers.
        bar: a progress bar of ``lockstep.train``.

    Raises:
        CheckpointError: ``resume`` is of a run with other settings.
    """
    from lockstep_tools.recipes.reviews import trainer as trainers

    check = ResumeCheck(partial(run_settings, config, task, strategy))
    if resume is not None:
        check_resume(resume, check, finished=resume_finished)
    is_chief = strategy.workers.is_chief
    with quiet_transformers(), ExitStack() as stack:
        if bar is not None:
            stack.enter_context(closing(bar))
        if checkpoint_dir is None:  # the best epoch is read back from its checkpoint
            checkpoint_dir = Path(stack.enter_context(TemporaryDirectory(prefix="lockstep-reviews-")))
        args = trainers.training_arguments(config, checkpoint_dir, on_cpu=strategy.devices[0].kind == "CPU")
        sigterm = stack.enter_context(closing(trainers.SaveAtSigterm(strategy)))
        added = [*callbacks, trainers.SettingsCallback(check), sigterm]
        trainer = trainers.ReviewsTrainer(config, task, args=args, strategy=strategy, callbacks=added)
        logger = None
        if log_dir is not None and is_chief:
            logger = stack.enter_context(closing(_tensorboard(log_dir, resumed=resume is not None)))
        rows = trainer.args.train_batch_size * config.accumulate
        chief_bar = bar if is_chief else None
        recorder = trainers.HistoryCallback(
            strategy, rows=len(task.train), batch_size=rows, bar=chief_bar, logger=logger
        )
        trainer.add_callback(recorder)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        fingerprint = trainer.fingerprint()
        tested: Any = trainer.predict(task.test.sorted_by_length(), metric_key_prefix="test").metrics
        trained = trained_parameters(task.model)
        model: Any = trainer.model
        if config.lora is not None:
            model = model.merge_and_unload()  # of peft: adds the adapters to the weights
        if output_dir is not None:
            run_on_chief(strategy.workers, "write the model", lambda: _write(output_dir, model, task))
        history, f1 = recorder.history, recorder.history.history["val_f1"]
        return ReviewsResult(
            source=task.table.source,
            history=history,
            fingerprint=fingerprint,
            best_epoch=history.epoch[f1.index(max(f1))] + 1,
            test_metrics={name: float(tested[f"test_{name}"]) for name in ("loss", "accuracy", "f1")},
            batch_size=config.per_device_train_batch_size,
            parameters=num_parameters(model),
            updates=trainer.state.global_step,
            trained_parameters=trained,
            classified=classify(model, task.tokenizer, texts, max_tokens=max_row_length(config, model)),
        )


def _tensorboard(log_dir: Path, *, resumed: bool) -> TensorBoard:
    """A logger that begins logs in a folder, or goes on in those of the resumed run."""
    logger = TensorBoard(log_dir, update_freq="batch")
    if resumed:
        logger.load_state_dict({"run": str(log_dir)})
    return logger


def _write(folder: Path, model: Any, task: ReviewsTask) -> None:
    model.save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)


def classify(model: Any, tokenizer: Any, texts: Sequence[str], *, max_tokens: int) -> tuple[Classified, ...]:
    """Classifies texts with a text-classification pipeline of transformers; the model is put into eval mode."""
    if not texts:
        return ()
    pipeline = require("transformers", "text").pipeline(
        "text-classification", model=model.eval(), tokenizer=tokenizer, device=model.device
    )
    # One at a time: for a list the pipeline sets an environment variable for good.
    answers = [pipeline(text, truncation=True, max_length=max_tokens)[0] for text in texts]
    return tuple(
        Classified(text=text, label=answer["label"], score=float(answer["score"]))
        for text, answer in zip(texts, answers, strict=True)
    )
