"""Runs the recipe ``mlm`` on a strategy: training with validation, then the test; and the check that it is exact.

What a command calls. It prints nothing itself; the weights and what belongs to them are written at the end, if asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.checkpoint.whole_file import write_whole
from lockstep.collectives.values import on_chief
from lockstep.recipes.exactness import ExactnessReport
from lockstep.recipes.mlm.build import (
    MlmTask,
    build_metrics,
    build_mlm,
    build_optimizer,
    build_scheduler,
    read_text,
    updates,
)
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.exactness import check_exactness
from lockstep.recipes.mlm.loss import masked_token_loss
from lockstep.recipes.text.for_all import text_for_all
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback, EarlyStopping, TensorBoard
from lockstep.train.fit_settings import Verbose
from lockstep.train.history import History
from lockstep.train.model import Model

__all__ = ["ExactnessReport", "MlmResult", "check_exactness", "train_mlm"]


@dataclass(frozen=True, kw_only=True)
class MlmResult:
    """What a run came to.

    Args:
        history: the logs and times of the epochs.
        test_metrics: loss and accuracy over the test part.
        source: where the text came from.
        parameters: of the whole model, head included, tied weights counted once.
        vocabulary: tokens that the tokenizer knows.
    """

    history: History
    test_metrics: dict[str, float]
    source: str
    parameters: int
    vocabulary: int


def train_mlm(
    config: MlmConfig,
    strategy: Strategy,
    *,
    callbacks: Sequence[Callback] = (),
    log_dir: Path | None = None,
    output_dir: Path | None = None,
    verbose: Verbose = 1,
) -> MlmResult:
    """Trains and validates epoch by epoch, then tests.

    Args:
        config: the run.
        strategy: the devices.
        callbacks: called before those of the recipe: early stopping and TensorBoard.
        log_dir: folder of the TensorBoard logs; None writes none.
        output_dir: folder that gets weights, config and tokenizer at the end, as transformers reads them; None writes
            none.
        verbose: 0 silent, 1 a live line per epoch, 2 a plain line per epoch.
    """
    task = build_mlm(config, text_for_all(partial(read_text, config), strategy.workers))
    parameters = sum(parameter.numel() for parameter in task.module.parameters())  # now: a strategy may divide them
    model = compile_mlm(config, task, strategy)
    hooks = [*callbacks, *_own_callbacks(config, log_dir)]
    history = model.fit(task.train, task.valid, epochs=config.epochs, callbacks=hooks, verbose=verbose)
    test_metrics = model.evaluate(task.test, verbose=0)
    if output_dir is not None:
        _save(model, task, output_dir)
    return MlmResult(
        history=history,
        test_metrics=test_metrics,
        source=task.source,
        parameters=parameters,
        vocabulary=task.vocabulary.size,
    )


def compile_mlm(config: MlmConfig, task: MlmTask, strategy: Strategy) -> Model:
    """A Model of the task's module on the strategy, ready for fit."""
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


def _own_callbacks(config: MlmConfig, log_dir: Path | None) -> list[Callback]:
    stopping = [EarlyStopping("val_loss", patience=config.patience)] if config.patience else []
    return [*stopping, *([TensorBoard(log_dir)] if log_dir is not None else [])]


def _save(model: Model, task: MlmTask, folder: Path) -> None:
    """A folder that ``--pretrained`` and transformers' BertForMaskedLM load. The chief writes; all call it."""
    model.save_weights(folder / "model.safetensors")
    on_chief(model.strategy.workers, "describe the model", lambda: _describe(task, folder))


def _describe(task: MlmTask, folder: Path) -> None:
    tokenizer = task.vocabulary.tokenizer
    names = {f"{kind}_token": tokenizer.id_to_token(number) for kind, number in task.vocabulary.named_ids.items()}
    write_whole(folder / "config.json", task.module.bert.config.to_json_string())
    write_whole(folder / "tokenizer.json", tokenizer.to_str())
    write_whole(folder / "tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
