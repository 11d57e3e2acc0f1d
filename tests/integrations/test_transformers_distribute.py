"""``distribute`` of a subclass of the Trainer: arguments by place, what its methods see and log in replicas."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import nn

transformers = pytest.importorskip("transformers")

import lockstep as ls  # noqa: E402  what it needs is there
from lockstep.errors import ConfigError  # noqa: E402
from lockstep.integrations.transformers import Trainer, distribute  # noqa: E402

PROGRAM = str(Path(__file__).parent / "programs" / "tiny.py")


class Compared(transformers.Trainer):
    """Made as TRL's: a reference model before the arguments, refuses several GPUs, logs what processes gather."""

    def __init__(self, model: Any, reference: Any = None, args: Any = None, data_collator: Any = None, **named: Any):
        super().__init__(model, args, data_collator, **named)
        if self.args.n_gpu > 1:
            raise ValueError("does not support nn.DataParallel")
        self.batch_sizes = (self.args.per_device_train_batch_size, self.args.train_batch_size)
        self.reference = reference.eval().requires_grad_(False)
        self.scale = Scale(model)
        self.sums: dict[str, list[float]] = {"means": [], "rows": [], "tokens": [], "longest": []}
        self.steps = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert self.args.n_gpu <= 1
        assert self.model is model
        assert self.model_wrapped is model
        assert self.scale.model[0] is model.classifier
        self.steps += 1
        labels = inputs.pop("labels")
        logits = self.model(**inputs).logits
        with torch.no_grad():
            target = self.reference(**inputs).logits
        losses = nn.functional.cross_entropy(logits, labels, reduction="none") + ((logits - target) ** 2).mean(-1)
        losses = losses * self.scale(inputs)
        gathered = self.accelerator.gather_for_metrics(losses.detach().mean())
        self.sums["means"].append(gathered.mean().item())
        self.sums["rows"].append(self.accelerator.gather(losses).mean().item())
        self.sums["tokens"].append(self.accelerator.gather(inputs["attention_mask"].sum()).sum().item())
        self.sums["longest"].append(self.accelerator.reduce(inputs["attention_mask"].sum().float(), "sum").item())
        loss = losses.mean()
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss

    def log(self, logs, start_time=None):
        logs.update({name: sum(values) / len(values) for name, values in self.sums.items() if values})
        super().log(logs, start_time)
        for values in self.sums.values():
            values.clear()


class Scale(nn.Module):
    """A module of the trainer that holds the model, or a part of it, as losses of sentence-transformers do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = nn.ModuleList([model.classifier])

    def forward(self, inputs: Any) -> Any:
        return 1 + (self.model[0].weight ** 2).sum()


def compared(tiny: Any, **settings: Any) -> Any:
    def trainer(base: type) -> Any:
        return lambda *, model, args, data_collator, **named: base(model, tiny.model(), args, data_collator, **named)

    return tiny.Task(args={"eval_strategy": "epoch", **settings}, trainer=trainer)


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_a_subclass_computes_and_logs_is_that_of_one_device(
    tiny: Any, make_strategy: MakeStrategy, layout: str, replicas: int
) -> None:
    task = compared(tiny)
    theirs = tiny.train(task, Compared)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = tiny.train(task, distribute(Compared), replicas=replicas, strategy=make_strategy(replicas))
    tiny.assert_same(ours, theirs)
    assert ours.trainer.batch_sizes == theirs.trainer.batch_sizes == (8, 8)
    assert ours.trainer.steps == theirs.trainer.steps
    assert ours.trainer.args.per_device_train_batch_size == 8 // replicas
    assert ours.trainer.args.n_gpu == replicas


@pytest.mark.slow
def test_replicas_without_rows_meet_the_others(tiny: Any, make_strategy: MakeStrategy) -> None:
    task = few_rows(tiny)  # the last batches have two rows
    theirs = tiny.train(task, Compared)
    tiny.assert_same(tiny.train(task, distribute(Compared), replicas=4, strategy=make_strategy(4)), theirs)


def test_distribute_of_what_is_distributed_is_itself() -> None:
    ours = distribute(Compared)
    assert distribute(ours) is distribute(Compared) is ours
    assert issubclass(ours, Compared)
    assert issubclass(ours, Trainer)
    assert distribute(transformers.Trainer) is Trainer
    assert [*distribute(transformers.Seq2SeqTrainer).__signature__.parameters][-1] == "strategy"
    with pytest.raises(TypeError, match=r"a subclass of transformers\.Trainer"):
        distribute(nn.Module)  # type: ignore[type-var]


class Floats(transformers.Trainer):
    """Keeps numbers of its own rows, gathering nothing."""

    mean = 0.0

    def compute_loss(self, model, inputs, *args, **named):
        self.mean = float(inputs["labels"].float().mean())
        return super().compute_loss(model, inputs, *args, **named)


def test_a_float_that_differs_between_replicas_is_the_mean_over_rows(tiny: Any, make_strategy: MakeStrategy) -> None:
    task = tiny.Task(train=tiny.rows(7), batch=8)  # replicas have 4 rows and 3
    means = [
        tiny.train(task, Floats).trainer.mean,
        tiny.train(task, distribute(Floats), replicas=2, strategy=make_strategy(2)).trainer.mean,
    ]
    assert means[0] == pytest.approx(means[1])


class MultipleNegativesRankingLoss(nn.Module):
    """By its name one of sentence-transformers'."""


class Negatives(transformers.Trainer):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.losses = {"one": nn.Sequential(MultipleNegativesRankingLoss())}


def test_a_loss_that_compares_rows_is_refused(tiny: Any, make_strategy: MakeStrategy) -> None:
    with pytest.raises(ConfigError, match=r"the loss MultipleNegativesRankingLoss, which compares .* one replica"):
        tiny.train(tiny.Task(), distribute(Negatives), replicas=2, strategy=make_strategy(2))
    tiny.train(tiny.Task(), distribute(Negatives), strategy=make_strategy(1))


class Chatty(transformers.Trainer):
    def __init__(self, model: Any = None, args: Any = None) -> None:
        super().__init__(model, args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("tokenizer", r"processing_class since transformers 5; write processing_class=tokenizer"),
        ("learning_rate", r"an argument of TrainingArguments; write it there, as learning_rate="),
    ],
)
def test_an_argument_of_2024_is_answered(tiny: Any, tmp_path: Any, name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"got {name}=, which is .*{advice}"):
        distribute(Chatty)(tiny.model(), tiny.arguments(str(tmp_path), 2), **{name: 1})


def job(program: str) -> Any:
    """The same on two workers of two replicas, of which the second has no row in the last batches."""
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    tiny = SimpleNamespace(**runpy.run_path(program, run_name="tiny"))
    run = tiny.train(few_rows(tiny), distribute(Compared), replicas=4)
    run.trainer.strategy.close()
    return run.history, run.weights


def few_rows(tiny: Any) -> Any:
    task = compared(tiny)
    task.train, task.valid = tiny.rows(18), tiny.rows(10, seed=2)
    return task


@pytest.mark.workers
@pytest.mark.slow
def test_workers_gather_too(tiny: Any) -> None:
    theirs = tiny.train(few_rows(tiny), Compared)
    ours = tiny.Outcome(*ls.launch(job, workers=2, args=(PROGRAM,), timeout_s=120), None)
    tiny.assert_same(ours, theirs, far=1e-6)


class WithHead(transformers.Trainer):
    """Trains a module beside the model, whose gradients transformers does not clip."""

    def __init__(self, *args: Any, **named: Any):
        torch.manual_seed(3)
        self.head = nn.Linear(2, 2)
        super().__init__(*args, **named)

    def create_optimizer(self, *_: Any):
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.head.parameters()], 0.1)
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(self.head(outputs.logits[:, :2].to(self.head.weight.dtype)), labels % 2)
        return (loss, outputs) if return_outputs else loss


def test_the_gradients_of_a_module_beside_the_model_are_not_clipped(tiny: Any, make_strategy: MakeStrategy) -> None:
    task = tiny.Task(args={"max_grad_norm": 0.01})
    theirs = tiny.train(task, WithHead)
    ours = tiny.train(task, distribute(WithHead), replicas=2, strategy=make_strategy(2))
    tiny.assert_same(ours, theirs)
    torch.testing.assert_close(ours.trainer.head.weight, theirs.trainer.head.weight, rtol=1e-6, atol=1e-7)
