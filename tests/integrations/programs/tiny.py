"""Tiny models and data for a Trainer, and one run of it: shared by the tests and by the workers that they start."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, TrainingArguments

VOCABULARY, PAD, IGNORED = 40, 0, -100
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
# Of the logs, what is a time and not a number of the training.
TIMES = ("runtime", "per_second", "preparation_time")


def model(kind: str = "SequenceClassification", *, dropout: float = 0.0, **settings: Any) -> nn.Module:
    """A BERT for a task, in float64, the same every time."""
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if kind == "CausalLM":
        settings = {"is_decoder": True, **settings}
        kind = "LMHeadModel"
    made: nn.Module = getattr(transformers, f"Bert{'' if kind == 'LMHeadModel' else 'For'}{kind}")(
        BertConfig(**SIZES, **drops, **settings)
    )
    return made.double()


def rows(number: int, labels: str = "class", *, seed: int = 1, labelled: bool = False) -> list[dict[str, Any]]:
    """Rows of 2 to 12 tokens with labels: "class", "number", "several", or "tokens" and "tags", many ignored.

    Some rows may have no label at all, unless ``labelled``.
    """
    random = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(number):
        length = int(torch.randint(2, 13, (), generator=random))
        ids = torch.randint(1, VOCABULARY, (length,), generator=random)
        row: dict[str, Any] = {"input_ids": ids.tolist()}
        if labels == "class":
            row["labels"] = int(ids.sum() % 2)
        elif labels == "number":
            row["labels"] = float(ids.double().mean()) / VOCABULARY
        elif labels == "several":
            row["labels"] = [float(ids[0] % 2), float(ids[-1] % 2), float(length % 2)]
        else:
            kept = torch.rand(length, generator=random) < torch.rand((), generator=random)
            kept[1] |= labelled
            row["labels"] = torch.where(kept, ids % 5 if labels == "tags" else ids, IGNORED).tolist()
        made.append(row)
    return made


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest row of the batch."""
    longest = max(len(row["input_ids"]) for row in batch)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (longest - len(values))

    ids = torch.tensor([padded(row["input_ids"], PAD) for row in batch])
    made = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if "labels" in batch[0]:
        by_token = isinstance(batch[0]["labels"], list) and isinstance(batch[0]["labels"][0], int)
        labels = [padded(row["labels"], IGNORED) if by_token else row["labels"] for row in batch]
        made["labels"] = torch.tensor(labels, dtype=torch.float64 if isinstance(_first(labels), float) else torch.int64)
    return made


def _first(labels: list[Any]) -> Any:
    return labels[0][0] if isinstance(labels[0], list) else labels[0]


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of right classes, and a number that depends on every logit."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    right = (logits.argmax(-1) == prediction.label_ids).mean()
    return {"accuracy": float(right), "spread": float(np.abs(logits).mean())}


@dataclass
class Task:
    """A training: what is given to the Trainer, but for the size of the batch on a device."""

    model: Callable[[], nn.Module] = model
    train: Any = field(default_factory=lambda: rows(21))
    valid: Any = field(default_factory=lambda: rows(13, seed=2))
    batch: int = 8
    args: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    trainer: Callable[[type], type] = lambda base: base
    resume: Any = None


@dataclass
class Outcome:
    """What a training left."""

    history: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    trainer: Any
    resumed: bool = False


def arguments(folder: str, per_device: int, **settings: Any) -> TrainingArguments:
    """Short, silent, on the CPU; everything is logged."""
    return TrainingArguments(
        **{
            "output_dir": folder,
            "per_device_train_batch_size": per_device,
            "per_device_eval_batch_size": per_device,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **settings,
        }
    )


def train(task: Task, base: type, *, replicas: int = 1, folder: str | None = None, **named: Any) -> Outcome:
    """Trains with ``base`` or what the task makes of it; the global batch is always the task's."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return train(task, base, replicas=replicas, folder=temporary, **named)
    args = arguments(folder, task.batch // replicas, **task.args)
    given = {"data_collator": collate, "train_dataset": task.train, "eval_dataset": task.valid, **task.more}
    if "model_init" not in given:
        given["model"] = task.model()
    trainer = task.trainer(base)(args=args, **given, **named)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=task.resume)
    return outcome(trainer, resumed=task.resume is not None)


def outcome(trainer: Any, *, resumed: bool = False) -> Outcome:
    """The numbers of a trained Trainer."""
    logs = [{k: v for k, v in log.items() if not k.endswith(TIMES)} for log in trainer.state.log_history]
    state = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return Outcome(logs, state, trainer, resumed)


def assert_same(ours: Outcome, theirs: Outcome, *, far: float = 1e-9) -> None:
    """Losses, gradient norms, metrics and weights are equal; ``far=0`` is bit by bit."""
    if ours.resumed or theirs.resumed:  # the last line is about the steps of this call alone
        ours, theirs = replace(ours, history=ours.history[:-1]), replace(theirs, history=theirs.history[:-1])
    assert [set(log) for log in ours.history] == [set(log) for log in theirs.history]
    for our_log, their_log in zip(ours.history, theirs.history, strict=True):
        for name, value in their_log.items():
            assert our_log[name] == pytest.approx(value, rel=far and max(far, 1e-6), abs=far), f"{name}, {our_log}"
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=far, atol=far)
