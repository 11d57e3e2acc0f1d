"""Small trainings whose whole state is noted after every step, and the processes that run them on one layout.

A training is a function of a strategy that returns its ``Records``. It says nothing about workers or devices, so that
every layout of the same replicas must come to the same records.
"""

from __future__ import annotations

import hashlib
import os
import random
import runpy
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError, Metric, SpearmanCorrCoef
from torchmetrics.classification import MulticlassCalibrationError, MulticlassF1Score

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object

TINY = Path(__file__).parents[2] / "integrations" / "programs" / "tiny.py"
SEED = 7
CLASSES = 7
FEATURES = 33  # a row of 132 bytes, so that shards begin at addresses of every alignment
VOCABULARY = 50
IGNORED = -100
SIZES = (16, 13, 3, 16, 2)  # uneven shards, and batches with fewer rows than there are replicas
NORMED_SIZES = (16, 13, 9, 16, 11)

Batch = tuple[Tensor, Tensor, Tensor]
State = dict[str, str]
"""After one step: a digest for each part of the state, by name. A part of one replica has its number in its name."""


class Records:
    """What the states were after the steps of one training."""

    def __init__(self, strategy: ls.Strategy, *, optimizer: Any = None) -> None:
        self.states: list[State] = []
        self.result: Any = None
        self._strategy = strategy
        self._optimizer = optimizer

    def note(self, **values: Any) -> None:
        """Notes the weights, the optimizer's state, all random numbers, the buffers of each replica, and ``values``."""
        strategy = self._strategy
        state = {name: digest(value) for name, value in values.items()}
        state["random numbers of torch"] = digest(torch.default_generator.get_state())
        if self._optimizer is not None:
            state["optimizer"] = digest(self._optimizer.state_dict())
        for number, generator in enumerate(strategy.generators.states(), strategy.workers.first_replica):
            state[f"random numbers of replica {number}"] = digest(generator)
        for module in strategy.mirrored_modules[-1:]:
            state["weights"] = digest(dict(module.module.named_parameters()))
            for number, own in enumerate(module.copies, strategy.workers.first_replica):
                state[f"weights of replica {number}"] = digest(dict(own.named_parameters()))
                state[f"buffers of replica {number}"] = digest(dict(own.named_buffers()))
        self.states.append(state)


def digest(value: Any) -> str:
    """16 hex digits of all bits in a structure of tensors, numbers and texts."""
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()[:16]


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            found.update(f"{key}:".encode())
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)} items".encode())
        for each in value:
            _add(found, each)
    else:
        found.update(struct.pack("<d", value) if isinstance(value, float) else repr(value).encode())


# Data and networks


def rows(sizes: Sequence[int] = SIZES, *, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Batches of rows of very different magnitudes, with a class and a weight for each row."""
    drawn = torch.Generator().manual_seed(0)
    made = []
    for size in sizes:
        magnitude = 10 ** torch.empty(size, 1, dtype=dtype).uniform_(-2, 0.7, generator=drawn)
        x = torch.randn(size, FEATURES, generator=drawn, dtype=dtype) * magnitude
        y = torch.randint(CLASSES, (size,), generator=drawn)
        made.append((x, y, torch.rand(size, generator=drawn, dtype=dtype) * 2))
    return made


def images(sizes: Sequence[int] = NORMED_SIZES, *, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """The same for images of 3 x 9 x 9."""
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.randn(len(y), 3, 9, 9, generator=drawn, dtype=dtype) * weight.view(-1, 1, 1, 1), y, weight)
        for _, y, weight in rows(sizes, dtype=dtype)
    ]


def tokens(sizes: Sequence[int] = SIZES) -> list[tuple[Tensor, Tensor]]:
    """Batches of sequences of 11 tokens, with a label for some of them: for each row another number, for some none."""
    drawn = torch.Generator().manual_seed(2)
    made = []
    for size in sizes:
        x = torch.randint(VOCABULARY, (size, 11), generator=drawn)
        kept = torch.rand(size, 11, generator=drawn) < torch.rand(size, 1, generator=drawn)
        made.append((x, torch.where(kept, x.roll(1, 1), IGNORED)))
    return made


def perceptron(
    *, dropout: float = 0.0, norm: bool = False, width: int = 96, dtype: torch.dtype = torch.float32
) -> nn.Module:
    torch.manual_seed(1)
    norms = [nn.BatchNorm1d(features) if norm else nn.Identity() for features in (width, 48)]
    return nn.Sequential(
        *(nn.Linear(FEATURES, width), norms[0], nn.Tanh(), nn.Dropout(dropout)),
        *(nn.Linear(width, 48), norms[1], nn.GELU(), nn.Dropout(dropout)),
        nn.Linear(48, CLASSES),
    ).to(dtype)


class Heads(nn.Module):
    """Uses one of two heads, by the values of the shard: the other gets no gradient in this replica."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.below = nn.Linear(FEATURES, 64)
        self.heads = nn.ModuleList(nn.Linear(64, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(x.sum() > 0)](self.below(x).tanh())


def convolutions(*, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2), nn.BatchNorm2d(16)),
        *(nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(144, CLASSES)),
    ).to(dtype)


class Recurrent(nn.Module):
    """Two GRU layers, and attention of three heads of an odd width over what they return."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.below = nn.GRU(3, 33, num_layers=2, dropout=0.1, batch_first=True)
        self.attention = nn.MultiheadAttention(33, 3, dropout=0.1, batch_first=True)
        self.above = nn.Linear(33, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = self.below(x.view(len(x), 11, 3))[0]
        attended: Tensor = self.attention(found, found, found)[0]
        return self.above(attended.mean(1))


def odd_sizes() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(
        *(nn.Linear(FEATURES, 77), nn.LayerNorm(77), nn.SiLU(), nn.Linear(77, 129), nn.Softplus()),
        *(nn.Unflatten(1, (3, 43)), nn.Conv1d(3, 5, 4), nn.Softmax(2), nn.MaxPool1d(3), nn.Flatten()),
        nn.Linear(65, CLASSES, bias=False),
    )


def separable() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.Hardswish()),
        *(nn.Conv2d(24, 24, 3, stride=2, groups=24), nn.BatchNorm2d(24), nn.ReLU6()),
        *(nn.Conv2d(24, 40, 1, bias=False), nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.AvgPool2d(2)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(160, CLASSES)),
    )


def encoder(*, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), layer, nn.Linear(32, VOCABULARY))


class Augmented(Dataset[Batch]):
    """Rows with noise that is drawn as they are loaded."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.columns = [torch.cat(column) for column in zip(*batches, strict=True)]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Batch:
        x, y, weight = (column[index] for column in self.columns)
        return x + random.random() * torch.randn_like(x) / 10, y, weight


class MeanEntropy(Metric):
    """Of the classes' probabilities: a sum of floats, whose last bits tell in which order it was added."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += torch.distributions.Categorical(logits=outputs.float()).entropy().sum()
        self.count += len(targets)

    def compute(self) -> Tensor:
        return self.total / self.count


def metrics() -> dict[str, Metric]:
    return {
        "f1": MulticlassF1Score(CLASSES),
        "calibration": MulticlassCalibrationError(CLASSES),
        "entropy": MeanEntropy(),
    }


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def per_token(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the labelled tokens, and their number."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return losses, (targets != IGNORED).sum()


# Trainings in an own loop


@dataclass(frozen=True, kw_only=True)
class OwnLoop:
    """A loop by hand: ``strategy.run`` on distributed batches, with a mirrored module and optimizer.

    Args:
        net, optimizer, data: make them.
        accumulate: global batches an update, the passes before the last of them under ``no_sync``.
        clip: the norm that gradients are clipped to in the step; 0 clips none.
        sync_batchnorm: whether batch norms take their statistics from the global batch.
        penalty: of the weights' norms, whose squares are summed by as many threads as a replica has.
        bf16: whether the forward pass runs under autocast to bfloat16.
        averaged: whether the averages of the buffers are read after every step.
    """

    net: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    data: Callable[[], list[Batch]] = rows
    accumulate: int = 1
    clip: float = 0.0
    sync_batchnorm: bool = False
    penalty: float = 0.0
    bf16: bool = False
    averaged: bool = False

    def __call__(self, strategy: ls.Strategy) -> Records:
        module, data = self.net(), self.data()
        mirrored = strategy.mirror(module, sync_batchnorm=self.sync_batchnorm)
        optimizer = strategy.mirror(self.optimizer(module.parameters()))
        records = Records(strategy, optimizer=optimizer)

        def step(batch: Batch, count: int, update: bool) -> tuple[Tensor, Tensor]:
            x, y, weight = batch
            with nullcontext() if update else mirrored.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                    losses = per_example(mirrored(x), y)
                loss = ls.compute_average_loss(losses, sample_weight=weight, global_batch_size=count)
                if self.penalty:
                    squares = torch.stack([each.square().sum() for each in mirrored.parameters()])
                    loss = loss + ls.scale_regularization_loss(self.penalty * squares.sqrt().sum())
                loss.backward()
            norm = torch.zeros(())
            if update:
                if self.clip:
                    norm = nn.utils.clip_grad_norm_(mirrored.parameters(), self.clip)
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach(), norm

        counts = [len(x) for x, _, _ in data]
        for index, batch in enumerate(strategy.distribute_dataset(data)):
            begin = index - index % self.accumulate
            count, update = sum(counts[begin : begin + self.accumulate]), (index + 1) % self.accumulate == 0
            losses, norms = strategy.run(step, (batch, count, update))
            values = {"loss": strategy.reduce("sum", losses), "norm": strategy.local_results(norms)[0]}
            if self.averaged:
                mirrored.exchange_buffers()
                values["averages"] = mirrored.state_dict()
            records.note(**values)
        mirrored.sync_buffers()
        records.result = {name: value.clone() for name, value in mirrored.state_dict().items()}
        records.note(result=records.result)
        return records


def by_tokens(strategy: ls.Strategy) -> Records:
    """An own loop that divides by the labelled tokens of all replicas, which the replicas count."""
    module = encoder()
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(adamw(module.parameters()))
    records = Records(strategy, optimizer=optimizer)

    def step(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        context = ls.get_replica_context()
        assert context is not None
        total, count = per_token(mirrored(batch[0]), batch[1])
        loss = total / context.all_reduce("sum", count)
        loss.backward()
        nn.utils.clip_grad_norm_(mirrored.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return total.detach(), loss.detach()

    for batch in strategy.distribute_dataset(tokens()):
        totals, losses = strategy.run(step, (batch,))
        records.note(total=strategy.reduce("sum", totals), loss=strategy.reduce("sum", losses))
    return records


def collectives(strategy: ls.Strategy) -> Records:
    """Reductions, gathers, variables and metrics in steps and outside, with gradients through them."""
    records = Records(strategy)
    summed = strategy.variable(torch.zeros(500), aggregation="sum")
    averaged = strategy.variable(torch.ones(500), aggregation="mean")
    counter = strategy.variable(torch.zeros(500), aggregation="sum", synchronization="on_read")
    means = strategy.variable(torch.zeros(500), aggregation="mean", synchronization="on_read")
    error, ranks = strategy.mirror(MeanSquaredError()), strategy.mirror(SpearmanCorrCoef())
    # So many that the thread outside replicas divides their sums among its intra-op threads.
    many = torch.randn(2, 160_001, generator=torch.Generator().manual_seed(6))
    for pair in strategy.distribute_dataset([(many[0], many.sum(0))]):
        strategy.run(ranks.update, pair)
        records.note(ranks=ranks.compute(), squares=strategy.reduce("sum", strategy.run(torch.mul, pair), axis=0))

    def step(batch: Batch) -> dict[str, Any]:
        context = ls.get_replica_context()
        assert context is not None
        x, _, weight = batch
        drawn = torch.randn(500).requires_grad_()
        scaled = drawn * (1.0 + 10.0**-context.replica_id_in_sync_group)
        total = context.all_reduce("sum", scaled)
        mean = context.all_reduce("mean", scaled.sin())
        gathered = context.all_gather(x.sum(1) * weight + drawn[0], 0)
        (total.square().sum() + (mean * drawn).sum() + gathered.square().sum()).backward()
        summed.assign_add(scaled.detach())
        averaged.assign(scaled.detach())
        counter.assign_add(scaled.detach())
        means.assign_sub(scaled.detach())
        error.update(x.flatten(), x.flatten().cos())
        numbers: dict[str, Any] = {"same number": 0.1, "same values": torch.full((500,), 0.1)}
        numbers |= {"number": float(drawn[1].detach()), "gradient": drawn.grad, "error": error.compute()}
        return numbers | {"total": total.detach(), "mean": mean.detach(), "gathered": gathered.detach(), "x": x}

    for batch in strategy.distribute_dataset(rows()):
        found = strategy.run(step, (batch,))
        x = found.pop("x")
        reduced = {
            f"{op} of {name}": strategy.reduce(op, value)
            for name, value in found.items()
            if name != "gathered"
            for op in ("sum", "mean")
        }
        records.note(
            **reduced,
            gathered=strategy.local_results(found["gathered"])[0],
            rows=strategy.gather(x, 0),
            by_axis=[strategy.reduce(op, x, axis=0) for op in ("sum", "mean")],
            variables=[each.read_value() for each in (summed, averaged, counter, means)],
            of_variables=[strategy.reduce(op, each) for op in ("sum", "mean") for each in (counter, means)],
            metric=error.compute(),
        )
    return records


# Trainings with Model.fit


@dataclass(frozen=True, kw_only=True)
class Fit:
    """``Model.fit`` for two epochs with validation, then ``evaluate`` and ``predict``.

    Args:
        net, optimizer, data: make them.
        loss: of ``Model.compile``.
        metrics: makes those of ``Model.compile``. Without them a training takes half the time, and what they come to
            depends on replicas and rows, not on the network: three trainings have them.
        settings: the other arguments of ``Model.compile``.
        sync_batchnorm: of ``ls.Model``.
        loaded: whether a DataLoader shuffles the rows, of which each worker reads its own.
        processes: of the DataLoader.
        backup: the folder of a ``BackupAndRestore``, if there is to be one; a copy of what it holds in the middle of
            the first epoch is kept beside it, in "kept".
    """

    net: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    data: Callable[[], list[Any]] = rows
    loss: Callable[[Tensor, Tensor], Any] = per_example
    metrics: Callable[[], dict[str, Metric]] = dict
    settings: Mapping[str, Any] | None = None
    sync_batchnorm: bool = False
    loaded: bool = False
    processes: int = 0
    backup: str = ""

    def __call__(self, strategy: ls.Strategy) -> Records:
        data = training = self.data()
        if self.loaded:
            training = DataLoader(Augmented(data), batch_size=13, shuffle=True, num_workers=self.processes)
        given = {"metrics": self.metrics(), **(self.settings or {})}
        with strategy.scope():
            module = self.net()
            model = ls.Model(module, sync_batchnorm=self.sync_batchnorm)
            model.compile(self.optimizer(module.parameters()), self.loss, **given)
            records = Records(strategy, optimizer=model.optimizer)
            callbacks = [ls.LambdaCallback(on_train_batch_end=lambda batch, logs: records.note(logs=dict(logs)))]
            if self.backup:
                callbacks += [ls.BackupAndRestore(self.backup, save_freq=3), self._keeping(strategy)]
            history = model.fit(training, validation_data=data[1:3], epochs=2, verbose=0, callbacks=callbacks)
            records.result = {
                "history": history.history,
                "evaluate": model.evaluate(data, verbose=0),
                "predict": model.predict([batch[0] for batch in data]),
                "weights": {name: value.clone() for name, value in model.state_dict().items()},
            }
            records.note(**records.result, fingerprint=ls.fingerprint(model))
        return records

    def _keeping(self, strategy: ls.Strategy) -> ls.Callback:
        def keep(batch: int, logs: Any) -> None:
            kept = Path(self.backup).with_name("kept")
            if batch == 4 and strategy.workers.is_chief and not kept.exists():
                shutil.copytree(self.backup, kept)

        return ls.LambdaCallback(on_train_batch_end=keep)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


# Trainings with the Trainer of the Transformers integration


@dataclass(frozen=True, kw_only=True)
class WithTrainer:
    """The Trainer on a tiny BERT.

    Args:
        kind: of the model.
        labels: of the data.
        args: arguments of the training.
    """

    kind: str
    labels: str
    args: Mapping[str, Any]

    def __call__(self, strategy: ls.Strategy) -> Records:
        import transformers

        from lockstep.integrations.transformers import Trainer

        tiny = SimpleNamespace(**runpy.run_path(str(TINY), run_name="tiny"))
        records = Records(strategy)

        class Notes(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
                records._optimizer = optimizer
                records.note()

        given = {"num_train_epochs": 2, "eval_strategy": "epoch", **self.args}
        with tempfile.TemporaryDirectory() as folder:
            args = tiny.arguments(folder, 8 // strategy.num_replicas_in_sync, **given)
            trainer = Trainer(
                tiny.model(self.kind, dropout=0.2).float(),
                args,
                data_collator=tiny.collate,
                train_dataset=tiny.rows(21, self.labels),
                eval_dataset=tiny.rows(9, self.labels, seed=2, labelled=True),
                callbacks=[Notes()],
                strategy=strategy,
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
            predicted = trainer.predict(tiny.rows(7, self.labels, seed=5, labelled=True))
        result = tiny.outcome(trainer)
        chiefs = result.history if strategy.workers.is_chief else None  # the chief alone logs
        records.result = all_gather_object(strategy.workers, "logs", chiefs)[0]
        records.note(
            history=records.result,
            weights_by_name=result.weights,
            predicted=[torch.from_numpy(predicted.predictions), predicted.metrics["test_loss"]],
        )
        return records


# The control: gradients that plain torch.distributed sums


def summed_by(how: str, strategy: ls.Strategy) -> Records:
    """A loop by hand in which nothing but the order of the sums depends on the layout.

    Args:
        how: "tree" adds all replicas' gradients in a balanced tree; "all_reduce" adds those of this worker's replicas,
            and then those of the workers with torch's own all-reduce.
        strategy: which replicas are this worker's; it computes nothing.
    """
    workers = strategy.workers
    own = range(workers.first_replica, workers.first_replica + workers.replicas[workers.index])
    module, records = perceptron(), Records(strategy)
    optimizer = sgd(module.parameters())
    for x, y, _ in rows((16, 12, 16)):
        gradients = []
        for replica in own:
            module.zero_grad()
            part = slice(replica * len(x) // workers.num_replicas, (replica + 1) * len(x) // workers.num_replicas)
            per_example(module(x[part].clone()), y[part]).sum().backward()
            gradients.append(torch.cat([each.grad.flatten() for each in module.parameters()]))
        total = _in_a_tree(strategy, gradients) if how == "tree" else _all_reduced(gradients)
        parameters = list(module.parameters())
        for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = (part / len(x)).view_as(parameter)
        optimizer.step()
        records.note(by_hand=[*module.parameters()], state=optimizer.state_dict())
    return records


def _in_a_tree(strategy: ls.Strategy, gradients: list[Tensor]) -> Tensor:
    nodes = [each for worker in all_gather_object(strategy.workers, "gradients", gradients) for each in worker]
    while len(nodes) > 1:
        nodes = [nodes[at] + nodes[at + 1] for at in range(0, len(nodes), 2)]
    return nodes[0]


def _all_reduced(gradients: list[Tensor]) -> Tensor:
    total = sum(gradients[1:], gradients[0].clone())
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total


OWN_LOOPS: dict[str, Callable[[ls.Strategy], Records]] = {
    "momentum": OwnLoop(net=perceptron, optimizer=sgd),
    "dropout, AdamW, clipping": OwnLoop(net=partial(perceptron, dropout=0.3), optimizer=adamw, clip=0.05),
    "accumulation, clipping": OwnLoop(
        net=partial(perceptron, dropout=0.2), optimizer=adam, accumulate=2, clip=0.1, data=partial(rows, (16, 13, 3, 9))
    ),
    "batch norm": OwnLoop(
        net=partial(perceptron, norm=True), optimizer=adam, data=partial(rows, NORMED_SIZES), averaged=True
    ),
    "synchronised batch norm": OwnLoop(
        net=partial(convolutions, dropout=0.2), optimizer=sgd, data=images, sync_batchnorm=True, clip=1.0
    ),
    "bf16": OwnLoop(net=partial(perceptron, dropout=0.2), optimizer=adamw, bf16=True),
    "unused heads": OwnLoop(net=Heads, optimizer=adamw, clip=0.1),
    "wide": OwnLoop(
        net=partial(perceptron, dropout=0.1, width=4096), optimizer=adamw, data=partial(rows, (64, 62)), penalty=0.01
    ),
    "tokens": by_tokens,
    "collectives": collectives,
}
EXACT = "double precision"
"""The own loop, and the fit, that are compared with a loop on one device."""
OWN_LOOPS[EXACT] = OwnLoop(
    net=partial(convolutions, dtype=torch.float64),
    optimizer=adamw,
    data=partial(images, dtype=torch.float64),
    sync_batchnorm=True,
    clip=0.5,
)
FITS: dict[str, Callable[[ls.Strategy], Records]] = {
    "fit: dropout, AdamW, clipping, accumulation, schedule": Fit(
        net=partial(perceptron, dropout=0.3),
        optimizer=adamw,
        metrics=metrics,
        settings={"clip_norm": 0.05, "accumulate": 2, "scheduler": decay},
    ),
    "fit: batch norm, a DataLoader": Fit(
        net=partial(perceptron, norm=True), optimizer=sgd, data=partial(rows, NORMED_SIZES), loaded=True
    ),
    "fit: synchronised batch norm": Fit(
        net=partial(convolutions, dropout=0.2), optimizer=adam, data=images, sync_batchnorm=True
    ),
    "fit: tokens, bf16": Fit(net=encoder, optimizer=adamw, data=tokens, loss=per_token, settings={"precision": "bf16"}),
    f"fit: {EXACT}": Fit(
        net=partial(perceptron, dtype=torch.float64),
        optimizer=sgd,
        data=partial(rows, dtype=torch.float64),
        metrics=metrics,
        settings={"clip_norm": 0.5, "accumulate": 2},
    ),
}
BACKED_UP = Fit(
    net=partial(perceptron, dropout=0.3, norm=True),
    optimizer=adamw,
    data=partial(rows, NORMED_SIZES),
    metrics=metrics,
    settings={"clip_norm": 0.05, "accumulate": 2, "scheduler": decay},
    loaded=True,
)
CONTROLS: dict[str, Callable[[ls.Strategy], Records]] = {
    "control: tree": partial(summed_by, "tree"),
    "control: all_reduce": partial(summed_by, "all_reduce"),
}


KERNELS: dict[str, Callable[[ls.Strategy], Records]] = {
    "recurrence and attention": OwnLoop(net=Recurrent, optimizer=adamw),
    "odd sizes": OwnLoop(net=odd_sizes, optimizer=adam),
    "separable convolutions": OwnLoop(net=separable, optimizer=sgd, data=partial(images, (64, 61))),
    "fit: recurrence and attention, a DataLoader": Fit(net=Recurrent, optimizer=adam, loaded=True),
    "fit: odd sizes, bf16, loaded by processes": Fit(
        net=odd_sizes, optimizer=sgd, loaded=True, processes=2, settings={"precision": "bf16"}
    ),
}
TRAINERS: dict[str, Callable[[ls.Strategy], Records]] = {
    "Trainer: tokens, accumulation, clipping": WithTrainer(
        kind="CausalLM", labels="tokens", args={"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    ),
    "Trainer: classes, bf16": WithTrainer(kind="SequenceClassification", labels="class", args={"bf16": True}),
}
KINDS = {
    "loops": {**OWN_LOOPS, **FITS, **CONTROLS},
    "kernels": KERNELS,
    "kernels and trainers": KERNELS | TRAINERS,
    "few": {name: each for name, each in (OWN_LOOPS | FITS).items() if "dropout" in name or name == "collectives"},
}


# One layout


def run_layout(kind: str, replicas: int, devices: Sequence[int], backup: str = "") -> dict[str, Any]:
    """Runs all trainings of a kind in this worker; what all workers noted, and their replicas.

    ``devices`` has the number of devices of each worker, ``backup`` the folder of a training that is backed up beside.
    """
    chosen = KINDS[kind] | ({"backed up": replace(BACKED_UP, backup=backup)} if backup else {})
    own = devices[int(os.environ.get("RANK", "0"))]
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * own)
    # What a worker has drawn, and how many threads torch has there, must not matter.
    torch.manual_seed(100 + own)
    random.seed(100 + own)
    torch.set_num_threads(8 if len(devices) == 1 else 1)
    names = [f"cpu:{number}" for number in range(own)]
    strategy: ls.Strategy
    if len(devices) == 1:
        torch.manual_seed(100)
        strategy = ls.MirroredStrategy(names, replicas=replicas, seed=SEED)
    else:
        torch.distributed.init_process_group("gloo")
        options = ls.CommunicationOptions(bucket_mb=0.01)
        strategy = ls.MultiWorkerMirroredStrategy(names, replicas=replicas, seed=SEED, communication=options)
    found: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for name, training in chosen.items():
        torch.manual_seed(3)
        strategy.generators.begin(SEED, strategy.workers.first_replica)
        records = training(strategy)
        found[name], results[name] = records.states, records.result
    noted = all_gather_object(strategy.workers, "what was noted", found)
    dealt = strategy.workers.replicas
    strategy.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return {"noted": noted, "results": results, "replicas": dealt}
