"""The largest global batch of the recipe ``mlm`` that fits a strategy's devices."""

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
from lockstep.recipes.config_checks import SameRun, settings_but
from lockstep.recipes.exactness import Batch, Comparison, ExactnessReport, check_steps
from lockstep.recipes.memory import checkpoint_layers
from lockstep.recipes.mlm.batches import IGNORED_LABEL, BatchSettings, Inputs, MaskedBatches
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.fill_mask import Filled, Question, fill, hidden_words, questions_of
from lockstep.recipes.mlm.model import (
    BertShape,
    MaskedLanguageModel,
    load_pretrained,
    masked_token_loss,
    new_bert,
)
from lockstep.recipes.text.corpus import TextSplits, python_text, read_wikitext, text_for_all
from lockstep.recipes.text.tokenizer import Vocabulary, cached_wordpiece, wordpiece_vocabulary
from lockstep.strategies.base import Strategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.train.callbacks import Callback, EarlyStopping, TensorBoard
from lockstep.train.compile import CompileConfig
from lockstep.train.fit import Verbose
from lockstep.train.logs import History
from lockstep.train.model import Model

_NO_MATTER = ("text", "pretrained", "attention", "patience", "gradient_checkpointing", "cache_dir")
"""Settings that may change where a run goes on: places, and how the same numbers are computed."""
FixedBatches = tuple[tuple[Inputs, Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class MlmTask:
    """The parts of a run.

    Args:
        module: the model, on the CPU.
        vocabulary: its tokens.
        train: batches in another order and with other masks every epoch.
        valid: batches that stay as they are.
        test: batches that stay as they are.
        longest_line: tokens of a line, beyond which it is cut off.
        source: where the text came from.
    """

    module: MaskedLanguageModel
    vocabulary: Vocabulary
    train: MaskedBatches
    valid: FixedBatches
    test: FixedBatches
    longest_line: int
    source: str


def build_mlm(config: MlmConfig, text: TextSplits | None = None) -> MlmTask:
    """Reads the text, makes or loads tokenizer and module, and turns the lines into tokens, once.

    Args:
        config: the run.
        text: what ``read_text`` gave, where it has been read already.

    Raises:
        DataError: the text cannot be used.
        ConfigError: the pretrained model cannot be used.
    """
    text = read_text(config) if text is None else text
    module, vocabulary = _model(config, text)
    if config.gradient_checkpointing:
        checkpoint_layers(module.bert)
    limit = min(config.sequence_length, module.bert.config.max_position_embeddings)
    return MlmTask(
        module=module,
        vocabulary=vocabulary,
        train=_batches(text.train, vocabulary, config, limit=limit, part=0),
        valid=tuple(_batches(text.valid, vocabulary, config, limit=limit, part=1)),
        test=tuple(_batches(text.test, vocabulary, config, limit=limit, part=2)),
        longest_line=limit,
        source=text.source,
    )


def read_text(config: MlmConfig) -> TextSplits:
    """The text that the config names, or the embedded one."""
    if config.text is None:
        return python_text(longer_than=config.min_characters)
    return read_wikitext(config.text.expanduser(), longer_than=config.min_characters)


def build_optimizer(config: MlmConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam over what is trained. Fused: a step of bert_tiny takes 3 ms on one core, 25 ms foreach, 58 ms plain."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=config.first_rate, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, *, steps: int) -> LambdaLR:
    """The rate falls linearly from the optimizer's to 0 after ``steps`` updates."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def build_metrics() -> dict[str, Any]:
    """Name -> torchmetrics Metric: the accuracy over masked tokens."""
    require("torchmetrics", "text")
    from lockstep.recipes.mlm.metrics import MaskedTokenAccuracy  # a class of torchmetrics, which is an extra

    return {"accuracy": MaskedTokenAccuracy()}


def settings_of(config: MlmConfig, task: MlmTask, text: TextSplits) -> dict[str, Any]:
    """Name -> value of all that the numbers of a run depend on but its devices; of the text and its tokens a hash."""
    digest = hashlib.sha256(task.vocabulary.tokenizer.to_str().encode())
    for line in (*text.train, *text.valid):
        digest.update(b"\0" + line.encode())
    return {**settings_but(config, _NO_MATTER), "text": digest.hexdigest()[:16]}


def updates(config: MlmConfig, task: MlmTask) -> int:
    """Updates of the whole run: a cycle that the end of an epoch cuts short is one too."""
    return config.epochs * math.ceil(len(task.train) / config.accumulate)


def _model(config: MlmConfig, text: TextSplits) -> tuple[MaskedLanguageModel, Vocabulary]:
    if config.pretrained is not None:
        _warn_of_ignored(config)
        loaded = load_pretrained(config.pretrained, attention=config.attention, dropout=config.dropout)
        return loaded.module, loaded.vocabulary
    tokenizer = cached_wordpiece(text.train, config.tokenizer, cache_dir=config.cache_dir.expanduser())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module = new_bert(config.shape, attention=config.attention)
    return module, wordpiece_vocabulary(tokenizer)


def _warn_of_ignored(config: MlmConfig) -> None:
    defaults = {field.name: field.default for field in fields(BertShape)}
    brought = [n for n in defaults if n not in ("positions", "dropout") and getattr(config, n) != defaults[n]]
    if brought:
        warnings.warn(
            f"{', '.join(brought)} have no effect with pretrained={config.pretrained!r}, which brings its own size",
            stacklevel=4,
        )


def _batches(
    lines: Sequence[str], vocabulary: Vocabulary, config: MlmConfig, *, limit: int, part: int
) -> MaskedBatches:
    """Batches of one part of the text; each part has masks of its own, and only training ever changes its epoch."""
    settings = BatchSettings(
        batch_size=config.batch_size,
        shuffle_buffer=config.shuffle_buffer,
        length_window=config.length_window,
        padding=config.padding,
        sequence_length=limit,
        seed=3 * config.seed + part,
    )
    rows = vocabulary.encode(lines, max_tokens=limit)
    return MaskedBatches(rows, vocabulary, rule=config.masking, settings=settings)


def check_exactness(config: MlmConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the strategy and again without it, from the same weights on the same batches.

    Args:
        config: the run; its dropout is taken as 0.
        strategy: the replicas to compare with one device.
        steps: global batches to train, each one update.

    Raises:
        ConfigError: ``steps`` is below 1.
    """
    check_steps(steps)
    text = text_for_all(partial(read_text, config), strategy.workers)
    task = build_mlm(replace(config, dropout=0.0), text)
    batches = tuple(islice(task.train, steps))
    both = Comparison(module=task.module, batches=batches, loss=masked_token_loss, plain_loss=_plain_loss)
    adam = partial(build_optimizer, config)
    return both.report(strategy, adam, condition="no dropout")


def _plain_loss(module: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(module(**inputs), labels[labels != IGNORED_LABEL])


def save_mlm(model: Model, task: MlmTask, folder: Path) -> None:
    """Writes a folder for ``--pretrained``, BertForMaskedLM and ``pipeline("fill-mask")``.

    The chief writes; every worker must call it.
    """
    model.save_weights(folder / "model.safetensors")
    run_on_chief(model.strategy.workers, "describe the model", lambda: _describe(task, folder))


def _describe(task: MlmTask, folder: Path) -> None:
    tokenizer = task.vocabulary.tokenizer
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": task.longest_line,
        **{f"{kind}_token": tokenizer.id_to_token(number) for kind, number in task.vocabulary.named_ids.items()},
    }
    config = {**json.loads(task.module.bert.config.to_json_string()), "architectures": ["BertForMaskedLM"]}
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")
    atomic_write(folder / "tokenizer.json", tokenizer.to_str())
    atomic_write(folder / "tokenizer_config.json", json.dumps(described))


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


def largest_mlm_batch(config: MlmConfig, strategy: Strategy) -> LargestBatch:
    """Tries batches whose lines are all as long as a line can be, so that what fits does so in every batch.

    Args:
        config: the run; its batch size is where the search begins.
        strategy: the devices.

    Raises:
        DeviceMemoryError: not even one line a replica fits.
    """
    task = build_mlm(config)
    steps = CompileConfig(loss=masked_token_loss, precision=config.precision, clip_norm=config.clip_norm)
    return largest_batch(
        compile_mlm(config, task, strategy),
        steps,
        task.train.longest,
        start=config.batch_size,
        examples=task.train.lines,
    )
