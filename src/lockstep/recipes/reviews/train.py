"""Runs the recipe ``reviews`` on a strategy: training with validation, the best epoch's test, and answers.

What a command calls. It prints nothing itself. Checkpoints are written as the Trainer writes them; the model and what
belongs to it at the end, if asked.
"""

from __future__ import annotations

import copy
import csv
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lockstep.checkpoint.whole_file import write_whole
from lockstep.collectives.communicator import on_chief
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.exactness import (
    Difference,
    ExactnessReport,
    MakeOptimizer,
    check_steps,
    largest_difference,
    plain_sgd,
    train_in_plain_pytorch,
)
from lockstep.recipes.from_hub import quiet_transformers
from lockstep.recipes.memory import trained_parameters
from lockstep.recipes.reviews.batches import GroupedOrder, ReviewRows, encode, load_tokenizer, new_tokenizer
from lockstep.recipes.reviews.config import NAMES_OF_TWO, ReviewsConfig
from lockstep.recipes.reviews.dataset import Division, Review, ReviewParts, ReviewTable, divide, read_csv, read_embedded
from lockstep.recipes.reviews.model import longest_row, make_model
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback
from lockstep.train.logs import History

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from lockstep.recipes.reviews.trainer import ReviewsTrainer


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model says of a text.

    Args:
        text: what it was asked.
        label: the name of the likeliest class.
        score: its probability, as the model has it.
    """

    text: str
    label: str
    score: float


def ask(model: Any, tokenizer: Any, texts: Sequence[str], *, max_tokens: int) -> tuple[Answer, ...]:
    """Has a text-classification pipeline classify the texts.

    Args:
        model: a transformers model for sequence classification; it is put into eval mode.
        tokenizer: its own.
        texts: what to ask.
        max_tokens: where a text is cut off.
    """
    if not texts:
        return ()
    pipeline = require("transformers", "text").pipeline(
        "text-classification", model=model.eval(), tokenizer=tokenizer, device=model.device
    )
    # One at a time: for a list it sets an environment variable for good.
    found = [pipeline(text, truncation=True, max_length=max_tokens)[0] for text in texts]
    return tuple(
        Answer(text=text, label=answer["label"], score=float(answer["score"]))
        for text, answer in zip(texts, found, strict=True)
    )


def write_predictions(path: Path, reviews: Sequence[Review], logits: Tensor, names: Sequence[str]) -> None:
    """Writes a CSV file with the columns label, predicted, score and review, which any spreadsheet opens.

    Args:
        path: the file.
        reviews: of the test.
        logits: [reviews, classes].
        names: of the classes.
    """
    best = logits.float().softmax(dim=1).max(dim=1)
    written = io.StringIO(newline="")
    rows = csv.writer(written)
    rows.writerow(["label", "predicted", "score", "review"])
    for review, place, score in zip(reviews, best.indices.tolist(), best.values.tolist(), strict=True):
        rows.writerow([review.label, names[place], f"{score:.4f}", review.text])
    write_whole(path, written.getvalue())


CPU = torch.device("cpu")
_BROUGHT = ("tokens", "vocabulary", "layers", "hidden", "heads", "feed_forward", "dropout")


@dataclass(frozen=True, kw_only=True)
class ReviewsTask:
    """The parts of a run.

    Args:
        model: a transformers model, on the CPU; a PeftModel where there are adapters.
        tokenizer: a transformers tokenizer.
        train: rows, with other tokens hidden in every epoch.
        valid: rows that stay as they are.
        test: rows that stay as they are.
        names: of the classes, in the order of the logits.
        table: the reviews as they were read.
        parts: the reviews as they are used.
    """

    model: Any
    tokenizer: Any
    train: ReviewRows
    valid: ReviewRows
    test: ReviewRows
    names: tuple[str, ...]
    table: ReviewTable
    parts: ReviewParts


def build_reviews(config: ReviewsConfig, *, device: torch.device = CPU) -> ReviewsTask:
    """Reads the reviews, makes or loads tokenizer and model, and turns the reviews into tokens, once.

    Args:
        config: the run.
        device: of the first replica.

    Raises:
        DataError: the reviews cannot be used.
        ConfigError: the pretrained model or the names cannot be used.
    """
    table = read_table(config)
    parts = divide_table(config, table)
    names = class_names(config, parts.labels)
    with quiet_transformers(extra="text"):
        tokenizer = _tokenizer(config, [review.text for review in parts.train])
        model = make_model(config, tokenizer, names, device=device)
        limit = longest_row(config, model)
        hide = config.hidden_fraction if tokenizer.mask_token_id is not None else 0.0
        return ReviewsTask(
            model=model,
            tokenizer=tokenizer,
            train=_rows(parts.train, parts, tokenizer, limit, hide=hide, seed=config.seed),
            valid=_rows(parts.valid, parts, tokenizer, limit),
            test=_rows(parts.test, parts, tokenizer, limit),
            names=names,
            table=table,
            parts=parts,
        )


def read_table(config: ReviewsConfig) -> ReviewTable:
    """The reviews that the config names, or the embedded ones."""
    if config.csv is None:
        return read_embedded()
    return read_csv(config.csv.expanduser(), encoding=config.encoding, separator=config.delimiter)


def divide_table(config: ReviewsConfig, table: ReviewTable) -> ReviewParts:
    """The reviews in three parts, as the config says."""
    how = Division(
        test_fraction=config.test_fraction,
        valid_fraction=config.valid_fraction,
        keep_repeated=config.repeated == "keep",
        limit=config.limit,
        seed=config.seed,
    )
    return divide(table, how)


def class_names(config: ReviewsConfig, labels: Sequence[int]) -> tuple[str, ...]:
    """What the classes are called.

    Raises:
        ConfigError: there are not as many different names as classes.
    """
    if config.names is None:
        return NAMES_OF_TWO if len(labels) == 2 else tuple(str(label) for label in labels)
    names = tuple(name.strip() for name in config.names.split(","))
    if len(set(names)) != len(labels) or not all(names):
        raise ConfigError(
            f"names={config.names!r} was given for the {len(labels)} classes {', '.join(map(str, labels))}; expected as"
            " many different names, with commas between"
        )
    return names


def build_collator(task: ReviewsTask) -> Any:
    """Pads the rows of a batch to the longest of them, and a multiple of 8 as matrix kernels take whole vectors."""
    return require("transformers", "text").DataCollatorWithPadding(task.tokenizer, pad_to_multiple_of=8)


def _tokenizer(config: ReviewsConfig, texts: Sequence[str]) -> Any:
    if config.pretrained is not None:
        _warn_of_ignored(config)
        return load_tokenizer(config.pretrained)
    if config.lora is not None:
        warnings.warn(
            f"lora={config.lora!r} trains adapters beside frozen weights, which are random here and stay so; give"
            " pretrained weights",
            stacklevel=3,
        )
    return new_tokenizer(texts, config.tokenizer, max_tokens=config.max_tokens, cache_dir=config.cache_dir)


def _warn_of_ignored(config: ReviewsConfig) -> None:
    defaults = {field.name: field.default for field in fields(ReviewsConfig)}
    brought = [name for name in _BROUGHT if getattr(config, name) != defaults[name]]
    if brought:
        warnings.warn(
            f"{', '.join(brought)} have no effect with pretrained={config.pretrained!r}, which brings its own",
            stacklevel=4,
        )


def _rows(
    reviews: Sequence[Review], parts: ReviewParts, tokenizer: Any, limit: int, *, hide: float = 0.0, seed: int = 0
) -> ReviewRows:
    encoded = encode(tokenizer, [review.text for review in reviews], max_tokens=limit)
    classes = [parts.labels.index(review.label) for review in reviews]
    return ReviewRows(encoded, classes, hide=hide, mask_id=tokenizer.mask_token_id or 0, seed=seed)


def check_exactness(config: ReviewsConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the Trainer and again without it, from the same weights on the same batches.

    Args:
        config: the run; its dropout is taken as 0.
        strategy: the replicas to compare with one device.
        steps: global batches to train, each one update.

    Raises:
        ConfigError: ``steps`` is below 1.
        DataError: the reviews cannot be used.
    """
    check_steps(steps)
    task = build_reviews(replace(config, dropout=0.0), device=strategy.devices[0].torch_device)
    for part in task.model.modules():  # pretrained models bring their own
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    batches = _first_batches(config, task, strategy, steps)
    adam = partial(torch.optim.AdamW, lr=config.rate, weight_decay=config.weight_decay, fused=True)
    return ExactnessReport(
        steps=len(batches),
        replicas=strategy.num_replicas_in_sync,
        condition="no dropout",
        sgd=_between("SGD", config, task, strategy, batches, plain_sgd),
        adam=_between("Adam", config, task, strategy, batches, adam),
    )


def _first_batches(config: ReviewsConfig, task: ReviewsTask, strategy: Strategy, steps: int) -> Sequence[Any]:
    """The first global batches of the first epoch, in plain PyTorch."""
    size = config.per_device_train_batch_size * strategy.num_replicas_in_sync
    order = GroupedOrder(task.train, batch_size=size, window=config.length_window, seed=config.seed)
    order.set_epoch(0)
    loader = DataLoader(task.train, batch_size=size, sampler=order, collate_fn=build_collator(task))
    return list(islice(loader, steps))


def _between(
    name: str,
    config: ReviewsConfig,
    task: ReviewsTask,
    strategy: Strategy,
    batches: Sequence[Any],
    optimizer: MakeOptimizer,
) -> Difference:
    ours, plain = copy.deepcopy(task.model), copy.deepcopy(task.model)
    our_losses = _trainer_losses(config, replace(task, model=ours), strategy, len(batches), optimizer)
    plain_losses = train_in_plain_pytorch(plain, batches, _plain_loss, optimizer)
    return Difference(
        optimizer=name,
        loss=max(abs(a - b) for a, b in zip(our_losses, plain_losses, strict=True)),
        weight=largest_difference(ours, plain),
        moved=largest_difference(task.model, plain),
    )


def _trainer_losses(
    config: ReviewsConfig, task: ReviewsTask, strategy: Strategy, steps: int, make_optimizer: MakeOptimizer
) -> list[float]:
    """The loss of every step."""
    from lockstep.recipes.reviews.trainer import ReviewsTrainer, training_arguments

    optimizer = make_optimizer([p for p in task.model.parameters() if p.requires_grad])
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
        trainer = ReviewsTrainer(
            config,
            task,
            args=args,
            strategy=strategy,
            callbacks=[],
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
        )
        trainer.train()
        return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]


def _plain_loss(module: nn.Module, batch: Any) -> Tensor:
    logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"])


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders of a run; None writes none.

    Args:
        checkpoints: gets the Trainer's checkpoints, the last three; without it they are gone at the end.
        logs: gets the TensorBoard logs.
        model: gets weights, config and tokenizer at the end, as ``pipeline`` reads them.
        predictions: a CSV file that gets what was predicted for each review of the test.
        resume: a checkpoint to go on from.
    """

    checkpoints: Path | None = None
    logs: Path | None = None
    model: Path | None = None
    predictions: Path | None = None
    resume: Path | None = None

    def __post_init__(self) -> None:
        if self.resume is not None and not (self.resume / "trainer_state.json").is_file():
            raise ConfigError(
                f"resume={str(self.resume)!r} is no checkpoint of a Trainer: it has no trainer_state.json; give a"
                " folder such as runs/reviews/checkpoints/20260101-120000/checkpoint-109"
            )

    @contextmanager
    def for_checkpoints(self) -> Iterator[Path]:
        """The folder of the checkpoints, or one that is gone afterwards: the best epoch is read back from it."""
        if self.checkpoints is not None:
            yield self.checkpoints
        else:
            with TemporaryDirectory(prefix="lockstep-reviews-") as folder:
                yield Path(folder)


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
    from lockstep.recipes.reviews.trainer import EpochRecord, ReviewsTrainer, training_arguments

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
