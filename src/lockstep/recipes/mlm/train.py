"""Training of the recipe ``mlm``: building the parts of a run, training them on a strategy, and checking exactness.

    text -> tokenizer -> batches
        \\-> model

The parts are plain PyTorch: they do not depend on the number of replicas.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
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
from lockstep.extras import require
from lockstep.recipes.batch_size import LargestBatch, largest_batch
from lockstep.recipes.config_checks import ResumeCheck, settings_except
from lockstep.recipes.exactness import Batch, Comparison, ExactnessReport, check_steps, train_with_model
from lockstep.recipes.memory import checkpoint_layers
from lockstep.recipes.mlm.batches import IGNORED_LABEL, BatchSettings, Inputs, MaskedBatches
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.fill_mask import FilledSentence, fill_masks, mask_words, tokenize_examples
from lockstep.recipes.mlm.model import (
    BertShape,
    MaskedLanguageModel,
    load_pretrained,
    masked_token_loss,
    new_bert,
)
from lockstep.recipes.text.corpus import TextSplits, python_text, read_on_chief, read_wikitext
from lockstep.recipes.text.tokenizer import Vocabulary, cached_wordpiece, wordpiece_vocabulary
from lockstep.strategies.base import Strategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.train.callbacks import Callback, EarlyStopping, TensorBoard
from lockstep.train.compile import CompileConfig
from lockstep.train.fit import Verbose
from lockstep.train.logs import History
from lockstep.train.model import Model

_MAY_CHANGE = ("data", "pretrained", "attention", "patience", "gradient_checkpointing", "cache_dir")
"""Settings that may differ in a resumed run: paths, and how the same numbers are computed."""
_NUM_EXAMPLES, _TOP_K = 5, 3
"""Number of lines of the test text in which a word is masked at the end, and of predictions for each."""
FixedBatches = tuple[tuple[Inputs, Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class MlmTask:
    """The parts of a run.

    Args:
        module: the model, on the CPU.
        vocabulary: the vocabulary of the model.
        train: training batches, with another order and other masks in every epoch.
        valid: validation batches, the same in every epoch.
        test: test batches.
        max_tokens: maximum length of a line, in tokens.
        text: the text of the batches.
    """

    module: MaskedLanguageModel
    vocabulary: Vocabulary
    train: MaskedBatches
    valid: FixedBatches
    test: FixedBatches
    max_tokens: int
    text: TextSplits


def build_mlm(config: MlmConfig, text: TextSplits | None = None) -> MlmTask:
    """Reads the text, makes or loads tokenizer and model, and tokenizes the lines.

    Args:
        config: the configuration of the run.
        text: the result of ``read_text``, if it has been read already.

    Raises:
        DataError: the text cannot be used.
        ConfigError: the pretrained model cannot be used.
    """
    text = read_text(config) if text is None else text
    module, vocabulary = _model(config, text)
    if config.gradient_checkpointing:
        checkpoint_layers(module.bert)
    max_tokens = min(config.sequence_length, module.bert.config.max_position_embeddings)

    def batches(lines: Sequence[str], split: int) -> MaskedBatches:
        settings = BatchSettings(
            batch_size=config.batch_size,
            shuffle_buffer=config.shuffle_buffer,
            length_window=config.length_window,
            padding=config.padding,
            sequence_length=max_tokens,
            seed=3 * config.seed + split,  # other masks in each split
        )
        rows = vocabulary.encode(lines, max_tokens=max_tokens)
        return MaskedBatches(rows, vocabulary, rule=config.masking, settings=settings)

    return MlmTask(
        module=module,
        vocabulary=vocabulary,
        train=batches(text.train, 0),
        valid=tuple(batches(text.valid, 1)),
        test=tuple(batches(text.test, 2)),
        max_tokens=max_tokens,
        text=text,
    )


def read_text(config: MlmConfig) -> TextSplits:
    """Reads the text of the config, or the embedded text."""
    if config.data is None:
        return python_text(longer_than=config.min_characters)
    return read_wikitext(config.data.expanduser(), longer_than=config.min_characters)


def build_optimizer(config: MlmConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns fused Adam: a step of bert_tiny takes 3 ms on one core, against 25 ms (foreach) and 58 ms (plain)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=config.first_rate, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, *, steps: int) -> LambdaLR:
    """Returns a schedule that lowers the learning rate linearly to 0 after ``steps`` updates."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def build_metrics() -> dict[str, Any]:
    """Returns name -> torchmetrics Metric: the accuracy of the masked tokens."""
    require("torchmetrics", "text")
    from lockstep.recipes.mlm.metrics import MaskedTokenAccuracy  # subclasses torchmetrics, which is optional

    return {"accuracy": MaskedTokenAccuracy()}


def num_updates(config: MlmConfig, task: MlmTask) -> int:
    """Returns the number of updates of the run; a cycle of accumulation that the end of an epoch cuts short counts."""
    return config.epochs * math.ceil(len(task.train) / config.accumulate)


def run_settings(config: MlmConfig, task: MlmTask) -> dict[str, Any]:
    """Returns name -> value of everything that the results depend on, except the devices; a hash of text and tokens."""
    digest = hashlib.sha256(task.vocabulary.tokenizer.to_str().encode())
    for line in (*task.text.train, *task.text.valid):
        digest.update(b"\0" + line.encode())
    return {**settings_except(config, _MAY_CHANGE), "text": digest.hexdigest()[:16]}


def _model(config: MlmConfig, text: TextSplits) -> tuple[MaskedLanguageModel, Vocabulary]:
    if config.pretrained is not None:
        _warn_of_ignored(config)
        return load_pretrained(config.pretrained, attention=config.attention, dropout=config.dropout)
    tokenizer = cached_wordpiece(text.train, config.tokenizer, cache_dir=config.cache_dir.expanduser())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module = new_bert(config.shape, attention=config.attention)
    return module, wordpiece_vocabulary(tokenizer)


def _warn_of_ignored(config: MlmConfig) -> None:
    defaults = {field.name: field.default for field in fields(BertShape)}
    ignored = [n for n in defaults if n not in ("positions", "dropout") and getattr(config, n) != defaults[n]]
    if ignored:
        warnings.warn(
            f"{', '.join(ignored)} have no effect with pretrained={config.pretrained!r}, which has its own size",
            stacklevel=4,
        )


@dataclass(frozen=True, kw_only=True)
class MlmResult:
    """The result of a run.

    Args:
        history: metrics and times of the epochs.
        test_metrics: loss and accuracy over the test split.
        source: where the text comes from.
        parameters: number of parameters of the whole model, tied ones counted once.
        vocabulary: number of tokens that the tokenizer knows.
        filled: the model's predictions for the examples.
    """

    history: History
    test_metrics: dict[str, float]
    source: str
    parameters: int
    vocabulary: int
    filled: tuple[FilledSentence, ...]


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
    """Trains and validates epoch by epoch, then tests. Every worker must call it. It prints nothing but the progress.

    With a ``BackupAndRestore`` among the callbacks, an interrupted run resumes where it stopped.

    Args:
        config: the configuration of the run.
        strategy: the devices.
        examples: sentences with [MASK] for each word to fill in at the end; None masks a word in each of five lines of
            the test text.
        callbacks: callbacks that run before those of the recipe, early stopping and TensorBoard.
        log_dir: folder for TensorBoard logs; None writes none.
        output_dir: folder for weights, config and tokenizer at the end, as transformers reads them; None writes none.
        verbose: 0 silent, 1 a live line per epoch, 2 a plain line per epoch.

    Raises:
        ConfigError: an example has no mask.
        CheckpointError: the backup is of a run with other settings.
    """
    task = build_mlm(config, read_on_chief(partial(read_text, config), strategy.workers))
    if examples is None:
        sentences = mask_words(task.text.test, task.vocabulary, number=_NUM_EXAMPLES, seed=config.seed)
    else:
        sentences = tokenize_examples(examples, task.vocabulary)
    parameters = sum(parameter.numel() for parameter in task.module.parameters())  # before a strategy divides them
    model = compile_mlm(config, task, strategy)
    all_callbacks = [*callbacks, ResumeCheck(partial(run_settings, config, task))]
    if config.patience:
        all_callbacks.append(EarlyStopping("val_loss", patience=config.patience))
    if log_dir is not None:
        all_callbacks.append(TensorBoard(log_dir))
    history = model.fit(task.train, task.valid, epochs=config.epochs, callbacks=all_callbacks, verbose=verbose)
    test_metrics = model.evaluate(task.test, verbose=0)
    if output_dir is not None:
        save_mlm(model, task, output_dir)
    return MlmResult(
        history=history,
        test_metrics=test_metrics,
        source=task.text.source,
        parameters=parameters,
        vocabulary=task.vocabulary.size,
        filled=fill_masks(model, sentences, task.vocabulary, top_k=_TOP_K),
    )


def compile_mlm(config: MlmConfig, task: MlmTask, strategy: Strategy) -> Model:
    """Returns a compiled ``Model`` of the task's module on the strategy."""
    # A divided model has vocabulary-parallel logits, and its steps are not captured as CUDA graphs.
    task.module.static_shapes = strategy.devices[0].kind == "GPU" and not isinstance(strategy, ParallelStrategy)
    with strategy.scope():
        model = Model(task.module)
        model.compile(
            optimizer=partial(build_optimizer, config),
            loss=masked_token_loss,
            metrics=build_metrics(),
            scheduler=partial(build_scheduler, steps=num_updates(config, task)),
            precision=config.precision,
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
        )
    return model


def save_mlm(model: Model, task: MlmTask, folder: Path) -> None:
    """Writes a folder that ``--pretrained``, BertForMaskedLM and ``pipeline("fill-mask")`` can read.

    The chief writes it; every worker must call it.
    """
    model.save_weights(folder / "model.safetensors")
    run_on_chief(model.strategy.workers, "write the config and the tokenizer", lambda: _save_config(task, folder))


def _save_config(task: MlmTask, folder: Path) -> None:
    tokenizer = task.vocabulary.tokenizer
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": task.max_tokens,
        **{f"{kind}_token": tokenizer.id_to_token(token_id) for kind, token_id in task.vocabulary.named_ids.items()},
    }
    config = {**json.loads(task.module.bert.config.to_json_string()), "architectures": ["BertForMaskedLM"]}
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")
    atomic_write(folder / "tokenizer.json", tokenizer.to_str())
    atomic_write(folder / "tokenizer_config.json", json.dumps(tokenizer_config))


def check_exactness(config: MlmConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the strategy and again without it, from the same weights on the same batches.

    Every worker must call it.

    Args:
        config: the configuration of the run; dropout is set to 0.
        strategy: the replicas to compare with one device.
        steps: number of global batches, one update each.

    Raises:
        ConfigError: ``steps`` is below 1.
    """
    check_steps(steps)
    text = read_on_chief(partial(read_text, config), strategy.workers)
    task = build_mlm(replace(config, dropout=0.0), text)
    batches = tuple(islice(task.train, steps))
    comparison = Comparison(
        module=task.module,
        batches=batches,
        train=partial(train_with_model, batches=batches, loss=masked_token_loss, strategy=strategy),
        plain_loss=_plain_loss,
    )
    return comparison.report(strategy, partial(build_optimizer, config), condition="no dropout")


def _plain_loss(module: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(module(**inputs), labels[labels != IGNORED_LABEL])


def largest_mlm_batch(config: MlmConfig, strategy: Strategy) -> LargestBatch:
    """Finds the largest global batch that fits even if all its lines have the maximum length.

    Args:
        config: the configuration of the run; the search begins with its batch size.
        strategy: the devices.

    Raises:
        DeviceMemoryError: not even one line per replica fits.
    """
    task = build_mlm(config)
    return largest_batch(
        compile_mlm(config, task, strategy),
        CompileConfig(loss=masked_token_loss, precision=config.precision, clip_norm=config.clip_norm),
        task.train.longest_batch,
        start=config.batch_size,
        examples=task.train.num_rows,
    )
