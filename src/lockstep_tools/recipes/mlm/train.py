"""Training of the recipe ``mlm``: building the parts of a run, training them on a strategy, and checking exactness.

text -> tokenizer -> batches
    \\-> model
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lockstep.atomic_files import atomic_write
from lockstep.collectives.communicator import run_on_chief
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback
from lockstep.train.fit import Verbose
from lockstep.train.model import Model
from lockstep_tools.recipes import training
from lockstep_tools.recipes.exactness import ExactnessReport, compare
from lockstep_tools.recipes.from_hub import warn_of_ignored
from lockstep_tools.recipes.memory import checkpoint_layers
from lockstep_tools.recipes.mlm.batches import MaskedBatches
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.examples import ConstantAnswer, FilledTokens, constant_answer, fill_tokens
from lockstep_tools.recipes.mlm.model import (
    IGNORED_LABEL,
    MaskedLanguageModel,
    MaskedTokenAccuracy,
    load_pretrained,
    masked_token_loss,
    new_bert,
)
from lockstep_tools.recipes.text.corpus import TextSplits, python_text, read_folder, read_on_chief
from lockstep_tools.recipes.text.tokenizer import TokenRows, encode, new_tokenizer

_MAY_CHANGE = ("data", "pretrained", "patience", "patience_updates", "gradient_checkpointing")
"""Settings that may differ in a resumed run: paths, and how the same numbers are computed."""


@dataclass(frozen=True, kw_only=True)
class MlmTask(training.Task):
    """The parts of a run. Validation and test batches have their own masks, the same in every epoch."""

    tokenizer: Any
    text: TextSplits


def build_mlm(config: MlmConfig, text: TextSplits | None = None, *, static_shapes: bool = False) -> MlmTask:
    """Reads the text (unless it is given), makes or loads tokenizer and model, and tokenizes the lines.

    Raises a DataError if the text cannot be used, and a ConfigError if the pretrained model cannot be used.
    """
    text = read_text(config) if text is None else text
    module, tokenizer = _model(config, text)
    module.static_shapes = static_shapes
    if config.gradient_checkpointing:
        checkpoint_layers(module.bert)
    max_tokens = min(config.sequence_length, module.bert.config.max_position_embeddings)
    tokenizer.model_max_length = max_tokens

    def batches(lines: Sequence[str], split: int) -> MaskedBatches:
        rows = TokenRows(encode(tokenizer, lines, max_tokens=max_tokens))
        # Three seeds a run, which no other run's seed shares.
        seed = 3 * config.seed + split  # other masks in each split
        return MaskedBatches(rows, tokenizer, config, max_tokens=max_tokens, seed=seed)

    train = batches(text.train, 0)
    return MlmTask(
        source=text.source,
        config=config,
        module=module,
        parameters=training.num_parameters(module),
        train=train,
        valid=tuple(batches(text.valid, 1)),
        test=tuple(batches(text.test, 2)),
        loss=masked_token_loss,
        optimizer=partial(build_optimizer, config),
        scheduler=partial(build_scheduler, steps=num_updates(config, len(train))),
        metrics=build_metrics(),
        settings=partial(run_settings, config, text, tokenizer),
        tokenizer=tokenizer,
        text=text,
    )


def read_text(config: MlmConfig) -> TextSplits:
    """Reads the text of the config, or the embedded text."""
    return python_text() if config.data is None else read_folder(config.data.expanduser())


def _model(config: MlmConfig, text: TextSplits) -> tuple[MaskedLanguageModel, Any]:
    if config.pretrained is not None:
        warn_of_ignored(config, ("layers", "hidden", "heads", "feed_forward", "vocabulary"))
        return load_pretrained(config.pretrained, dropout=config.dropout)
    tokenizer = new_tokenizer(text.train, config.tokenizer, max_tokens=config.sequence_length)
    # test_the_callers_random_numbers_are_left_alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return new_bert(config), tokenizer


def build_optimizer(config: MlmConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns fused Adam: a step of bert_tiny takes 3 ms on one core, against 25 ms (foreach) and 58 ms (plain)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=config.first_rate, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, *, steps: int) -> LambdaLR:
    """Returns a schedule that lowers the learning rate linearly to 0 after ``steps`` updates."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def build_metrics() -> dict[str, Any]:
    """Returns name -> metric: the accuracy of the masked tokens."""
    return {"accuracy": MaskedTokenAccuracy()}


def num_updates(config: MlmConfig, batches: int) -> int:
    """Returns the number of updates of the run; a cycle of accumulation that the end of an epoch cuts short counts."""
    return config.epochs * training.updates_per_epoch(config, batches)


def run_settings(config: MlmConfig, text: TextSplits, tokenizer: Any) -> dict[str, Any]:
    """Returns name -> value of everything that the results depend on, except the devices; a hash of text and tokens."""
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    for line in (*text.train, *text.valid):
        digest.update(b"\0" + line.encode())
    return {**training.settings_except(config, _MAY_CHANGE), "text": digest.hexdigest()[:16]}


@dataclass(frozen=True, kw_only=True)
class MlmResult(training.Result):
    """The result of a run.

    Besides those of ``training.Result``: the size of the vocabulary, the text's lines (read and dropped, for a person
    to read), what the accuracy compares with, and filled-in tokens.
    """

    vocabulary: int
    lines: str
    constant: ConstantAnswer
    filled: FilledTokens


def train_mlm(
    config: MlmConfig,
    strategy: Strategy,
    *,
    callbacks: Sequence[Callback] = (),
    log_dir: Path | None = None,
    output_dir: Path | None = None,
    verbose: Verbose = 1,
    choose_batch_size: training.ChooseBatchSize | None = None,
) -> MlmResult:
    """Trains and validates epoch by epoch, then tests. Every worker must call it. It prints nothing but the progress.

    With a ``BackupAndRestore`` among the callbacks, an interrupted run resumes where it stopped.

    Args:
        config: the configuration of the run.
        strategy: the devices.
        callbacks: callbacks that run before those of the recipe, early stopping and TensorBoard.
        log_dir: folder for TensorBoard logs; None writes none.
        output_dir: folder for weights, config and tokenizer at the end, as transformers reads them; None writes none.
        verbose: 0 silent, 1 a live line per epoch, 2 a plain line per epoch.
        choose_batch_size: chooses another batch size than the config's, before the training.

    Raises:
        CheckpointError: the backup is of a run with other settings.
    """
    text = read_on_chief(partial(read_text, config), strategy.workers)
    # A divided model has vocabulary-parallel logits, and its steps are not captured as CUDA graphs.
    static_shapes = strategy.devices[0].kind == "GPU" and strategy.layout is None
    task = build_mlm(config, text, static_shapes=static_shapes)
    if choose_batch_size is not None:
        config = training.with_batch_size(config, task, strategy, choose_batch_size)
        task = build_mlm(config, text, static_shapes=static_shapes)
    model = training.compile_task(task, strategy)
    result = training.fit_and_test(task, model, callbacks=callbacks, log_dir=log_dir, verbose=verbose)
    if output_dir is not None:
        save_mlm(model, task, output_dir)
    return MlmResult(
        **vars(result),
        vocabulary=len(task.tokenizer),
        lines=str(text),
        constant=constant_answer(task.train, task.test, task.tokenizer),
        filled=fill_tokens(model, task.text.test, task.tokenizer, most_frequent=task.train.most_frequent_token()),
    )


def save_mlm(model: Model, task: MlmTask, folder: Path) -> None:
    """Writes a folder that ``--pretrained`` and transformers can read. Every worker must call it; the chief writes."""
    model.save_weights(folder / "model.safetensors")
    run_on_chief(model.strategy.workers, "write the config and the tokenizer", lambda: _save_config(task, folder))


def _save_config(task: MlmTask, folder: Path) -> None:
    task.tokenizer.save_pretrained(folder)
    config = {**json.loads(task.module.bert.config.to_json_string()), "architectures": ["BertForMaskedLM"]}
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")


def check_exactness(config: MlmConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the strategy and again without it, from the same weights on the same batches.

    Dropout is set to 0. Every worker must call it. ``steps`` are global batches, one update each.
    """
    text = read_on_chief(partial(read_text, config), strategy.workers)
    task = build_mlm(replace(config, dropout=0.0), text)
    return compare(task, strategy, tuple(islice(task.train, steps)), _plain_loss, "no dropout")


def _plain_loss(module: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(module(**inputs), labels[labels != IGNORED_LABEL])
