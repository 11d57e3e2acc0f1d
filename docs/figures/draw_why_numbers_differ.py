"""Measures and draws the plots of concepts/why-numbers-differ.md, from real runs, in half a minute on two cores.

Each cause is a small training on one device in plain PyTorch, the same as it is usually written for four devices, and
the same with Lockstep. Compared are the weights after every update: the length of the difference, divided by the length
of the weights on one device. All is in float64, so that rounding hides nothing, except where rounding is the cause.

    python docs/figures/draw_why_numbers_differ.py          prints the last distances and draws the plots
    python docs/figures/draw_why_numbers_differ.py --json   prints the same as JSON and draws nothing
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep as ls

REPLICAS, BATCH, EPOCHS, RATE = 4, 32, 10, 0.1
DEVICES = [f"cpu:{number}" for number in range(REPLICAS)]
FOLDER = Path(__file__).parent / "why-numbers-differ"
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)

Batch = tuple[Tensor, ...]
"""The inputs of the module, and the labels."""
Loss = Callable[[nn.Module, Batch], Tensor]
Weights = list[Tensor]
"""All weights in one vector, after each update."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a plot: how far a program is from its reference after each update.

    Args:
        kind: "usual" is how programs for several devices are often written, "cured" is Lockstep as the page says, and
            "other" is for comparison.
        reference: one device, unless the name says something else.
    """

    name: str
    kind: Literal["usual", "cured", "other"]
    distances: list[float]


def line(name: str, kind: Literal["usual", "cured", "other"], weights: Weights, reference: Weights) -> Line:
    pairs = zip(weights, reference, strict=True)
    return Line(name=name, kind=kind, distances=[((a - b).norm() / b.norm()).item() for a, b in pairs])


# Networks and data.


def network(*hidden: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Eight numbers to three classes, with these layers between the two linear ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *hidden, nn.ReLU(), nn.Linear(16, 3)).to(dtype)


class Masked(nn.Module):
    """The same network with dropout, whose mask is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _, self.outer = network()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.outer(torch.relu(self.inner(x) * mask / 0.5))
        return scores


def tagger() -> nn.Module:
    """Tokens to a class for each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 5)).double()


def examples(rows: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x.to(dtype), x[:, :3].argmax(dim=1))


def sentences() -> TensorDataset:
    """96 rows of 20 tokens with a label each; the last 0 to 18 labels of a row are padding, -100."""
    chosen = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (96, 20), generator=chosen)
    padding = torch.arange(20) >= torch.randint(2, 21, (96, 1), generator=chosen)
    return TensorDataset(tokens, (tokens % 5).masked_fill(padding, -100))


def with_masks(data: Iterable[Batch]) -> list[Batch]:
    chosen = torch.Generator().manual_seed(2)
    return [(x, torch.rand(len(x), 16, generator=chosen).round().double(), labels) for x, labels in data]


def batches(data: TensorDataset, size: int = BATCH) -> list[Batch]:
    return [tuple(batch) for batch in DataLoader(data, batch_size=size)] * EPOCHS


def shards(whole: Iterable[Batch], rank: int) -> list[Batch]:
    """The rows of each batch that a process takes, in order; the numbers of rows differ by at most one."""
    return [tuple(column.tensor_split(REPLICAS)[rank] for column in batch) for batch in whole]


# Losses: of one device and of DDP, and of replicas.


def mean(model: nn.Module, batch: Batch) -> Tensor:
    *inputs, labels = batch
    return cross_entropy(model(*inputs), labels)


def mean_of_all(model: nn.Module, batch: Batch) -> Tensor:
    *inputs, labels = batch
    return ls.compute_average_loss(cross_entropy(model(*inputs), labels, reduction="none"))


def token_mean(model: nn.Module, batch: Batch) -> Tensor:
    tokens, labels = batch
    return cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def token_mean_of_all(model: nn.Module, batch: Batch) -> Tensor:
    tokens, labels = batch
    kept = labels != -100
    return ls.compute_average_loss(cross_entropy(model(tokens)[kept], labels[kept], reduction="none"))


def weighted_mean(model: nn.Module, batch: Batch) -> Tensor:
    x, labels = batch
    return cross_entropy(model(x), labels, weight=CLASS_WEIGHTS)


# Programs.


def flat(module: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters()]).clone()


def linear_decay(optimizer: Any, updates: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda update: max(0.0, 1 - update / updates))


def train(model: nn.Module, data: Sequence[Batch], loss: Loss = mean, *, schedule_steps: int = 0) -> Weights:
    """A loop in plain PyTorch, on one device or in a process of DDP.

    Args:
        schedule_steps: how often the schedule is stepped after an update; 0 for a constant rate.
    """
    optimizer = SGD(model.parameters(), RATE)
    schedule = linear_decay(optimizer, len(data))
    weights = []
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(schedule_steps):
            schedule.step()
        weights.append(flat(model))
    return weights


def train_on_replicas(
    module: nn.Module,
    data: Iterable[Batch],
    loss: Loss = mean_of_all,
    *,
    decay_over: int = 0,
    devices: Sequence[str] = DEVICES,
    replicas: int | None = None,
    sync_batchnorm: bool = False,
) -> Weights:
    """The same loop with Lockstep.

    Args:
        decay_over: the number of updates in which the rate falls to 0; 0 for a constant rate.
    """
    strategy = ls.MirroredStrategy(list(devices), replicas=replicas, seed=0)
    model = strategy.mirror(module, sync_batchnorm=sync_batchnorm)
    optimizer = strategy.mirror(SGD(module.parameters(), RATE))
    schedule = linear_decay(optimizer, decay_over) if decay_over else None

    def step(batch: Batch) -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    weights = []
    for batch in strategy.distribute_dataset(data):
        strategy.run(step, (batch,))
        if schedule is not None:
            schedule.step()
        weights.append(flat(module))
    strategy.close()
    return weights


def fit_on_replicas(module: nn.Module, epoch: Sequence[Batch], loss: nn.Module, *, accumulate: int = 1) -> Weights:
    """The same by ``ls.Model``. An epoch whose last batches are fewer than ``accumulate`` ends with an update."""
    weights = []

    def keep(step: int, logs: object) -> None:
        if (step + 1) % accumulate == 0:
            weights.append(flat(module))

    def keep_last(epoch_number: int, logs: object) -> None:
        if len(epoch) % accumulate:
            weights.append(flat(module))

    strategy = ls.MirroredStrategy(DEVICES, seed=0)
    with strategy.scope():
        model = ls.Model(module)
        model.compile(optimizer=SGD(module.parameters(), RATE), loss=loss, accumulate=accumulate)
    callback = ls.LambdaCallback(on_train_batch_end=keep, on_epoch_end=keep_last)
    model.fit(epoch, epochs=EPOCHS, callbacks=[callback], verbose=0)
    strategy.close()
    return weights


def accumulate_by_hand(epoch: Sequence[Batch], every: int) -> Weights:
    """The usual loop on one device, which divides each loss by the number of batches in an update."""
    model = network()
    optimizer = SGD(model.parameters(), RATE)
    weights = []
    for _ in range(EPOCHS):
        for number, batch in enumerate(epoch, start=1):
            (mean(model, batch) / every).backward()
            if number % every == 0 or number == len(epoch):
                optimizer.step()
                optimizer.zero_grad()
                weights.append(flat(model))
    return weights


# DDP, in four processes.


def ddp_programs(rank: int) -> dict[str, Weights]:
    """Every program as it is usually written for DDP, in the process of that rank."""
    odd, even = examples(90), shards(batches(examples(96)), rank)
    sampler: DistributedSampler[Batch] = DistributedSampler(odd, shuffle=False)
    sampled = list(DataLoader(odd, batch_size=BATCH // REPLICAS, sampler=sampler)) * EPOCHS
    return {
        "mean": train(DistributedDataParallel(network()), shards(batches(odd), rank)),
        "tokens": train(DistributedDataParallel(tagger()), shards(batches(sentences()), rank), token_mean),
        "weights": train(DistributedDataParallel(network()), even, weighted_mean),
        "padding": train(DistributedDataParallel(network()), sampled),
        "batch norm": train(DistributedDataParallel(network(nn.BatchNorm1d(16))), even),
        "dropout": train(DistributedDataParallel(network(nn.Dropout(0.5))), even),
        "schedule": train(DistributedDataParallel(network()), even, schedule_steps=REPLICAS),
    }


def ddp_process(rank: int, meeting: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=REPLICAS)
    try:
        weights = ddp_programs(rank)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(weights, result)


def run_ddp() -> dict[str, Weights]:
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/weights"
        torch.multiprocessing.spawn(ddp_process, (f"{folder}/meeting", result), nprocs=REPLICAS)
        weights: dict[str, Weights] = torch.load(result)
        return weights


# Causes.


def shard_means(ddp: Weights) -> list[Line]:
    """The last batch of an epoch has 26 rows, which four devices share as 7, 7, 6 and 6."""
    data = batches(examples(90))
    reference = train(network(), data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Lockstep warns that the loss is a mean over the shard
        wrong = train_on_replicas(network(), data, mean)
    return [
        line("Lockstep, the mean of each shard (it warns)", "other", wrong, reference),
        line("DDP, the mean of each shard", "usual", ddp, reference),
        line("Lockstep, compute_average_loss", "cured", train_on_replicas(network(), data), reference),
    ]


def token_means(tokens: Weights, weights: Weights) -> list[Line]:
    """All shards have 8 rows, but not equally many tokens, nor equal sums of weights."""
    text, rows = batches(sentences()), batches(examples(96))
    by_tokens, by_weights = train(tagger(), text, token_mean), train(network(), rows, weighted_mean)
    ours = fit_on_replicas(network(), rows[: len(rows) // EPOCHS], nn.CrossEntropyLoss(weight=CLASS_WEIGHTS))
    return [
        line("DDP, class weights", "usual", weights, by_weights),
        line("DDP, padded tokens", "usual", tokens, by_tokens),
        line("Lockstep, class weights", "cured", ours, by_weights),
        line("Lockstep, padded tokens", "cured", train_on_replicas(tagger(), text, token_mean_of_all), by_tokens),
    ]


def accumulation() -> list[Line]:
    """Updates of 32 rows from four batches of 8; an epoch of 85 rows ends with batches of 8, 8 and 5."""
    epoch, reference = list(DataLoader(examples(85), batch_size=8)), train(network(), batches(examples(85)))
    ours = fit_on_replicas(network(), epoch, nn.CrossEntropyLoss(), accumulate=4)
    return [
        line("one device, loss / 4", "usual", accumulate_by_hand(epoch, 4), reference),
        line("Lockstep, compile(accumulate=4)", "cured", ours, reference),
    ]


def padding(ddp: Weights) -> list[Line]:
    """90 rows are not a multiple of four, so the sampler repeats the first two."""
    data = batches(examples(90))
    reference = train(network(), data)
    return [
        line("DDP, DistributedSampler", "usual", ddp, reference),
        line("Lockstep, distribute_dataset", "cured", train_on_replicas(network(), data), reference),
    ]


def repeated_rows() -> dict[str, tuple[int, int]]:
    """How many rows one trained model classifies correctly, and of how many, with and without the repeated ones."""
    data, model = examples(90), network()
    train(model, batches(data))
    right = (model(data.tensors[0]).argmax(dim=1) == data.tensors[1]).tolist()
    samplers = [DistributedSampler(data, REPLICAS, rank, shuffle=False) for rank in range(REPLICAS)]
    given: list[int] = [row for sampler in samplers for row in sampler]
    return {
        "one device": (sum(right), len(right)),
        "DistributedSampler": (sum(right[row] for row in given), len(given)),
    }


def batch_norm(ddp: Weights) -> list[Line]:
    data = batches(examples(96))
    reference = train(network(nn.BatchNorm1d(16)), data)
    default = train_on_replicas(network(nn.BatchNorm1d(16)), data)
    synced = train_on_replicas(network(nn.BatchNorm1d(16)), data, sync_batchnorm=True)
    return [
        line("DDP", "usual", ddp, reference),
        line("Lockstep without sync_batchnorm", "other", default, reference),
        line("Lockstep, sync_batchnorm=True", "cured", synced, reference),
    ]


def same_bits(module: Callable[[], nn.Module], data: Sequence[Batch]) -> Line:
    """Four replicas on four devices, compared with four replicas on one device."""
    one, four = (train_on_replicas(module(), data, devices=devices, replicas=4) for devices in (DEVICES[:1], DEVICES))
    return line("Lockstep, replicas=4 on 4 devices and on 1", "cured", four, one)


def random_masks(ddp: Weights) -> list[Line]:
    def module() -> nn.Module:
        return network(nn.Dropout(0.5))

    data, other = batches(examples(96)), module()
    masked = with_masks(data)
    reference = train(module(), data)
    torch.manual_seed(1)
    return [
        line("one device, another seed", "other", train(other, data), reference),
        line("DDP", "usual", ddp, reference),
        line("Lockstep, masks in the batch", "cured", train_on_replicas(Masked(), masked), train(Masked(), masked)),
        same_bits(module, data),
    ]


def schedules(ddp: Weights) -> list[Line]:
    data = batches(examples(96))
    reference = train(network(), data, schedule_steps=1)
    ours = train_on_replicas(network(), data, decay_over=len(data))
    return [
        line("DDP, four steps of the schedule an update", "usual", ddp, reference),
        line("Lockstep, one step an update", "cured", ours, reference),
    ]


def rounding() -> list[Line]:
    def module() -> nn.Module:
        return network(dtype=torch.float32)

    data, double = batches(examples(90, torch.float32)), batches(examples(90))
    reference = train(module(), data)
    backwards = [tuple(column.flip(0) for column in batch) for batch in data]
    return [
        line("one device, rows of a batch backwards, float32", "other", train(module(), backwards), reference),
        line("Lockstep, float32", "other", train_on_replicas(module(), data), reference),
        line("Lockstep, float64", "cured", train_on_replicas(network(), double), train(network(), double)),
        same_bits(module, data),
    ]


def measure() -> dict[str, list[Line]]:
    """The lines of every plot, by its name."""
    cpu = ls.config.list_physical_devices("CPU")[0]
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * REPLICAS)
    torch.set_num_threads(1)
    ddp = run_ddp()
    return {
        "mean": shard_means(ddp["mean"]),
        "tokens": token_means(ddp["tokens"], ddp["weights"]),
        "accumulation": accumulation(),
        "padding": padding(ddp["padding"]),
        "batch-norm": batch_norm(ddp["batch norm"]),
        "dropout": random_masks(ddp["dropout"]),
        "schedule": schedules(ddp["schedule"]),
        "rounding": rounding(),
    }


# Drawing.

INK = "#78818c"  # legible on white and on black
COLOURS = {"usual": "#d9822b", "cured": "#3d8bd4", "other": "#98a1ab"}
DASHES = {"usual": ("solid", (0, (4, 2))), "cured": ("solid", (0, (4, 2))), "other": ((0, (6, 4)), (0, (1, 2)))}
ZERO = 1e-19  # where a logarithmic axis shows 0


def draw(lines: Sequence[Line], path: Path) -> None:
    from matplotlib import rc_context  # here, since each process of DDP imports this file
    from matplotlib.figure import Figure

    inked = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    look: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 9, **inked}
    with rc_context(look):
        figure = Figure(figsize=(5.4, 2.0 + 0.19 * len(lines)), layout="constrained")
        axes = figure.subplots()
        drawn: dict[str, int] = {}
        for each in lines:
            nth = drawn[each.kind] = drawn.get(each.kind, -1) + 1
            shown = [max(distance, ZERO) for distance in each.distances]
            updates = range(1, len(shown) + 1)
            dash = DASHES[each.kind][nth]
            axes.plot(updates, shown, color=COLOURS[each.kind], linestyle=dash, linewidth=1.6, label=each.name)
        ticks = {1e0: "1", 1e-4: "1e-4", 1e-8: "1e-8", 1e-12: "1e-12", 1e-16: "1e-16", ZERO: "0"}
        axes.set(yscale="log", ylim=(ZERO / 3, 3), xlabel="update", ylabel="distance")
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.yaxis.minorticks_off()
        axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper left", frameon=False, borderaxespad=0.2, labelspacing=0.25)
        figure.savefig(path, metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    measured, counted = measure(), repeated_rows()
    if "--json" in sys.argv:
        causes = {cause: [asdict(each) for each in lines] for cause, lines in measured.items()}
        sys.stdout.write(json.dumps({"causes": causes, "repeated rows": counted}))
    else:
        FOLDER.mkdir(exist_ok=True)
        for cause, lines in measured.items():
            draw(lines, FOLDER / f"{cause}.svg")
            sys.stdout.writelines(f"{cause:13} {each.name:47} {each.distances[-1]:.1e}\n" for each in lines)
        for rows, (right, total) in counted.items():
            sys.stdout.write(f"repeated rows {rows:47} {right} of {total} = {right / total:.4f}\n")
