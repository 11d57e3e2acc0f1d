"""Runs the recipe ``mlm`` on a strategy: training with validation, then the test and what the model would fill in.

What a command calls. It prints nothing itself; the weights and what belongs to them are written at the end, if asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.recipes.exactness import ExactnessReport
from lockstep.recipes.mlm.build import (
    MlmTask,
    build_metrics,
    build_mlm,
    build_optimizer,
    build_scheduler,
    read_text,
    settings_of,
    updates,
)
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.exactness import check_exactness
from lockstep.recipes.mlm.filling import Filled, Question, fill, hidden_words, questions_of
from lockstep.recipes.mlm.loss import masked_token_loss
from lockstep.recipes.mlm.saving import save_mlm
from lockstep.recipes.same_run import SameRun
from lockstep.recipes.text.for_all import text_for_all
from lockstep.recipes.text.splits import TextSplits
from lockstep.strategies.base import Strategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.train.callbacks import Callback, EarlyStopping, TensorBoard
from lockstep.train.fit import Verbose
from lockstep.train.logs import History
from lockstep.train.model import Model

__all__ = ["ExactnessReport", "MlmResult", "check_exactness", "train_mlm"]

_EXAMPLES, _LIKELIEST = 5, 3
"""Lines of the test text of which a word is hidden at the end, and words that are shown for it."""


@dataclass(frozen=True, kw_only=True)
class MlmResult:
    """What a run came to.

    Args:
        history: the logs and times of the epochs.
        test_metrics: loss and accuracy over the test part.
        source: where the text came from.
        parameters: of the whole model, head included, tied weights counted once.
        vocabulary: tokens that the tokenizer knows.
        filled: what the trained model would fill in for the examples.
    """

    history: History
    test_metrics: dict[str, float]
    source: str
    parameters: int
    vocabulary: int
    filled: tuple[Filled, ...]


def train_mlm(
    config: MlmConfig,
    strategy: Strategy,
    *,
    examples: Sequence[str] | None = None,
    callbacks: Sequence[Callback] = (),
    log_dir: Path | None = None,
    output_dir: Path | None = None,
    verbose: Verbose = 1,
) -> MlmResult:
    """Trains and validates epoch by epoch, then tests. Every worker must call it.

    With a ``BackupAndRestore`` among the callbacks, a run that was interrupted goes on where it stopped.

    Args:
        config: the run.
        strategy: the devices.
        examples: sentences with [MASK] in place of words to fill in at the end; None hides a word in each of five
            lines of the test text.
        callbacks: called before those of the recipe: early stopping and TensorBoard.
        log_dir: folder of the TensorBoard logs; None writes none.
        output_dir: folder that gets weights, config and tokenizer at the end, as transformers reads them; None writes
            none.
        verbose: 0 silent, 1 a live line per epoch, 2 a plain line per epoch.

    Raises:
        ConfigError: an example that hides no word.
        CheckpointError: a backup of a run with other settings.
    """
    text = text_for_all(partial(read_text, config), strategy.workers)
    task = build_mlm(config, text)
    questions = _questions(config, task, text, examples)
    parameters = sum(parameter.numel() for parameter in task.module.parameters())  # now: a strategy may divide them
    model = compile_mlm(config, task, strategy)
    hooks = [*callbacks, SameRun(partial(settings_of, config, task, text)), *_own_callbacks(config, log_dir)]
    history = model.fit(task.train, task.valid, epochs=config.epochs, callbacks=hooks, verbose=verbose)
    test_metrics = model.evaluate(task.test, verbose=0)
    if output_dir is not None:
        save_mlm(model, task, output_dir)
    return MlmResult(
        history=history,
        test_metrics=test_metrics,
        source=task.source,
        parameters=parameters,
        vocabulary=task.vocabulary.size,
        filled=fill(model, questions, task.vocabulary, likeliest=_LIKELIEST),
    )


def compile_mlm(config: MlmConfig, task: MlmTask, strategy: Strategy) -> Model:
    """A Model of the task's module on the strategy, ready for fit."""
    # Models that are divided among workers keep their scores divided, and are not recorded.
    task.module.static = strategy.devices[0].kind == "GPU" and not isinstance(strategy, ParallelStrategy)
    with strategy.scope():
        model = Model(task.module)
        model.compile(
            optimizer=partial(build_optimizer, config),
            loss=masked_token_loss,
            metrics=build_metrics(),
            scheduler=partial(build_scheduler, steps=updates(config, task)),
            precision=config.precision,
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
        )
    return model


def _questions(
    config: MlmConfig, task: MlmTask, text: TextSplits, examples: Sequence[str] | None
) -> tuple[Question, ...]:
    if examples is not None:
        return questions_of(examples, task.vocabulary)
    return hidden_words(text.test, task.vocabulary, number=_EXAMPLES, seed=config.seed)


def _own_callbacks(config: MlmConfig, log_dir: Path | None) -> list[Callback]:
    stopping = [EarlyStopping("val_loss", patience=config.patience)] if config.patience else []
    return [*stopping, *([TensorBoard(log_dir)] if log_dir is not None else [])]
