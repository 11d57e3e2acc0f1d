"""The Trainer on many replicas equals transformers' own on one device with the whole batch, feature by feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from tests.tiers import partly_slow

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

from lockstep.integrations.transformers import Trainer  # noqa: E402  what it needs is there
from lockstep.strategies.mirrored import MirroredStrategy  # noqa: E402

REPLICAS = 4


def items_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    total = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return total / num_items_in_batch


def mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits, labels)


def with_own_loss(base: type) -> type:
    class Weighed(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            weight = torch.tensor([1.0, 3.0], dtype=outputs.logits.dtype)
            loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"]) + weight.mean()
            return (loss, outputs) if return_outputs else loss

    return Weighed


def with_own_optimizer(base: type) -> type:
    class Own(base):
        def __init__(self, model, **named):
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
            super().__init__(model, optimizers=(optimizer, scheduler), **named)

    return Own


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def features(tiny: Any) -> dict[str, Any]:
    """Each a task; the name says what is looked at."""
    task, rows = tiny.Task, tiny.rows
    causal = {"model": lambda: tiny.model("CausalLM"), "train": rows(21, "tokens"), "valid": rows(9, "tokens", seed=2)}
    masked = {**causal, "model": lambda: tiny.model("MaskedLM")}
    tags = {
        "model": lambda: tiny.model("TokenClassification", num_labels=5),
        "train": rows(21, "tags"),
        "valid": rows(9, "tags", seed=2),
    }
    newer = hasattr(transformers.TrainingArguments, "train_sampling_strategy")  # since transformers 5.2
    by_length = {"train_sampling_strategy": "group_by_length"} if newer else {"group_by_length": True}
    number = {"model": lambda: tiny.model(num_labels=1), "train": rows(21, "number")}
    several = {"model": lambda: tiny.model(num_labels=3, problem_type="multi_label_classification")}
    return {
        "plain": task(),
        "accumulation": task(args={"gradient_accumulation_steps": 2}, batch=4),
        "clipping": task(args={"max_grad_norm": 0.1}),
        "no clipping": task(args={"max_grad_norm": 0.0}),
        "schedule": task(args={"lr_scheduler_type": "cosine", "warmup_steps": 3}),
        "plateau": task(args={"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}),
        "label smoothing": task(args={"label_smoothing_factor": 0.1}),
        "by length": task(args=by_length),
        "drop last": task(args={"dataloader_drop_last": True}),
        "model_init": task(more={"model_init": lambda: tiny.model()}),
        "loss of items": task(more={"compute_loss_func": items_loss}, args={"gradient_accumulation_steps": 2}),
        "loss function": task(more={"compute_loss_func": mean_loss}),
        "own compute_loss": task(trainer=with_own_loss),
        "own optimizer": task(trainer=with_own_optimizer),
        "adafactor": task(args={"optim": "adafactor"}),
        "stream": task(train=Stream(rows(21)), args={"max_steps": 4}),
        "datasets": task(train=datasets.Dataset.from_list(rows(21)), args={"dataloader_num_workers": 1}),
        "fewer rows than replicas": task(train=rows(11)),  # the last batch has 3
        "ignored rows": task(
            train=[{**row, "labels": -100} if number % 3 else row for number, row in enumerate(rows(21))]
        ),
        "checkpointing": task(args={"gradient_checkpointing": True}),
        "one number": task(**number),
        "several classes": task(**several, train=rows(21, "several")),
        "causal": task(**causal),
        "causal accumulation": task(**causal, args={"gradient_accumulation_steps": 3}),
        "causal, not across": task(**causal, args={"average_tokens_across_devices": False}),
        "causal smoothing": task(**causal, args={"label_smoothing_factor": 0.2}),
        "masked": task(**masked),
        "masked smoothing": task(**masked, args={"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}),
        "tags": task(**tags),
    }


TOKENS = (
    "causal",
    "causal accumulation",
    "causal, not across",
    "causal smoothing",
    "masked",
    "masked smoothing",
    "tags",
)
NAMES = (
    *("plain", "accumulation", "clipping", "no clipping", "schedule", "plateau", "label smoothing", "by length"),
    *("drop last", "model_init", "loss of items", "loss function", "own compute_loss", "own optimizer", "adafactor"),
    *(
        "stream",
        "datasets",
        "fewer rows than replicas",
        "ignored rows",
        "checkpointing",
        "one number",
        "several classes",
    ),
    *TOKENS,
)


def test_all_features_are_named(tiny: Any):
    assert set(features(tiny)) == set(NAMES)


SLOW = (
    "several classes",
    "stream",
    "causal smoothing",
    "masked smoothing",
    "causal, not across",
    "label smoothing",
    "adafactor",
    "one number",
    "drop last",
    "by length",
    "model_init",
    "tags",
    "schedule",
    "plateau",
    "datasets",
)


@pytest.mark.parametrize("name", partly_slow(NAMES, *SLOW))
def test_it_equals_one_device(tiny: Any, make_strategy: Callable[..., Any], name: str):
    task = features(tiny)[name]
    theirs = tiny.train(task, transformers.Trainer)
    ours = tiny.train(task, Trainer, replicas=REPLICAS, strategy=make_strategy(REPLICAS))
    tiny.assert_same(
        ours, theirs, far=1e-5 if name in TOKENS else 1e-9
    )  # BERT computes the losses of tokens in float32


class Prints(transformers.PrinterCallback):
    """As transformers prints logs without tqdm."""


def test_the_last_line_is_the_fingerprint_which_is_the_same_on_other_devices(
    tiny: Any, split_cpu: Callable[[int], Any], capsys: pytest.CaptureFixture[str]
):
    devices, lines = split_cpu(2), []
    for on in (devices, devices[:1]):
        with closing(MirroredStrategy(on, replicas=2, seed=0)) as strategy:
            task = tiny.Task(model=lambda: tiny.model(dropout=0.2), more={"callbacks": [Prints()]})
            trainer = tiny.train(task, Trainer, replicas=2, strategy=strategy).trainer
            lines.append(capsys.readouterr().out.splitlines()[-1])
            assert lines[-1] == f"fingerprint {trainer.fingerprint()}"
    assert lines[0] == lines[1]


def test_a_training_that_prints_no_logs_prints_no_fingerprint(
    tiny: Any, split_cpu: Callable[[int], Any], capsys: pytest.CaptureFixture[str]
):
    with closing(MirroredStrategy(split_cpu(1), seed=0)) as strategy:
        tiny.train(tiny.Task(), Trainer, strategy=strategy)
    assert capsys.readouterr().out == ""
