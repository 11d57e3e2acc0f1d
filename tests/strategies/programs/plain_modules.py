"""Plain modules in double precision, and one program that trains each on any layout; and the same by hand."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object

SIZES = (9, 8, 1, 5)  # the small ones leave microbatches, and whole replicas, without rows
CLASSES = 5


class Vit(nn.Module):
    """A vision transformer: weights of its own beside its modules, and one list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True) for _ in range(4)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patches(x).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.first.expand(hidden.shape[0], -1, -1), hidden], 1) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden)[:, 0])
        return scores


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if mask.any():  # a branch on data, in a module that is not traced
            hidden = hidden + self.down(F.gelu(self.up(hidden))) * mask[..., None]
        return hidden, mask


class TwoInputs(nn.Module):
    """Takes words and numbers, and gives a dict; of its weights two modules have one, two use one, all blocks one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 12)
        self.numbers = nn.Linear(3, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(12)
        self.again = nn.Linear(12, 7, bias=False)
        self.again.weight = self.words.weight
        self.head = nn.Linear(12, CLASSES)

    def forward(self, words: Tensor, numbers: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        hidden = self.words(words) + self.numbers(numbers)[:, None]
        mask = words != 0 if mask is None else mask
        for block in self.blocks:
            hidden, mask = block(self.norm(hidden), mask)
        mean = hidden.sum(1) / words.shape[1]
        return {"scores": self.head(mean) + self.again(mean)[:, :CLASSES], "mean": mean @ self.numbers.weight}


class UNet(nn.Module):
    """Two skip connections, of which one passes over the middle stage."""

    def __init__(self) -> None:
        super().__init__()
        self.down_0, self.down_1 = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 6, 3, 2, 1)
        self.norm = nn.GroupNorm(2, 6)
        self.middle = nn.Conv2d(6, 6, 3, 1, 1)
        self.up_1, self.up_0 = nn.ConvTranspose2d(12, 4, 2, 2), nn.ConvTranspose2d(8, CLASSES, 2, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        large = self.relu(self.down_0(x))
        small = self.relu(self.norm(self.down_1(large)))
        middle = self.relu(self.middle(small))
        up = self.up_1(torch.cat([middle, small], 1))
        height, width = large.shape[2:]
        up = F.interpolate(up, size=(height, width))
        scores: Tensor = self.up_0(torch.cat([up, large], 1)).mean((2, 3))
        return scores


def mlp() -> nn.Module:
    layers = [nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1),
        nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, CLASSES),
    )  # fmt: skip


Build = Callable[[], nn.Module]
BUILD: Mapping[str, Build] = {"mlp": mlp, "cnn": cnn, "vit": Vit, "two inputs": TwoInputs, "unet": UNet}
SPLITS: Mapping[str, Any] = {"unet": ["middle"], "two inputs": ["blocks.1"]}
"""The names given for two stages; the others are cut by themselves."""


def plans(name: str) -> dict[str, Any]:
    """What ``parallelize`` is given; a layout takes of it what it needs."""
    plans = {
        "mlp": {"0": ColwiseParallel(), "2": RowwiseParallel()},
        "vit": {"blocks.*.linear1": ColwiseParallel(), "blocks.*.linear2": RowwiseParallel()},
        "two inputs": {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
    }
    return {"tensor_plan": plans.get(name, "auto"), "pipeline_split": SPLITS.get(name, "auto")}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return BUILD[name]().double()


def batches(name: str, sizes: Sequence[int] = SIZES) -> list[tuple[Any, Tensor]]:
    random = torch.Generator().manual_seed(0)
    found = []
    for rows in sizes:
        words = torch.randint(0, 7, (rows, 4), generator=random)
        numbers = torch.randn(rows, 3, generator=random, dtype=torch.float64)
        images = torch.randn(rows, 3, 8, 8, generator=random, dtype=torch.float64)
        x: Any = {"mlp": images[:, :, :2, :2].flatten(1), "two inputs": (words, numbers)}.get(name, images)
        found.append((x, torch.randint(0, CLASSES, (rows,), generator=random)))
    return found


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """Of each row."""
    if isinstance(outputs, dict):
        return loss(outputs["scores"], targets) + outputs["mean"].square().mean(1)
    return F.cross_entropy(outputs, targets, reduction="none")


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.2, momentum=0.9)


def train(name: str, divide: Callable[[nn.Module], nn.Module] = lambda module: module) -> dict[str, Any]:
    """The program, which knows of no layout beyond what ``divide`` makes of the module."""
    model = ls.Model(divide(build(name)))
    model.compile(optimizer, loss, accumulate=2, clip_norm=0.5)
    history = model.fit(batches(name), validation_data=batches(name)[:2], epochs=2, verbose=0)
    return results_of(name, model, history.history)


def results_of(name: str, model: ls.Model, history: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "loss": history["loss"],
        "val_loss": history["val_loss"],
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "evaluate": model.evaluate(batches(name), verbose=0)["loss"],
        "predict": model.predict(batches(name)),
    }


def run_jobs(experiments: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The program on one layout after another."""
    torch.set_num_threads(1)
    return [run_job(name, grid) for name, grid in experiments]


def run_job(name: str, grid: dict[str, Any]) -> dict[str, Any]:
    strategy = ls.ParallelStrategy(seed=7, communication=ls.CommunicationOptions(lost_after_s=60), **grid)

    with strategy.scope():
        results = train(name, lambda module: strategy.parallelize(module, **plans(name)))
        digest = hashlib.sha256()
        for leaf in torch.utils._pytree.tree_leaves([results["weights"], results["predict"]]):
            digest.update(leaf.contiguous().numpy().tobytes())
        results["digest"] = digest.hexdigest()
        alike = strategy.workers.processes.all_gather_numbers("alike", [int(results["digest"][:12], 16)])
        results["all alike"] = len(set(alike)) == 1
    strategy.close()
    gc.collect()
    return results


class Branch(nn.Module):
    """What cannot be cut: its own code looks at data, or one of its blocks gives what no worker can send."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Wrapped() if kind == "object" else nn.Linear(12, 12), nn.Linear(12, 12)])
        self.more = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, CLASSES)])
        self.unused = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[0](x)
        if self.kind == "branch" and hidden.sum() > 0:
            hidden = -hidden
        hidden = self.blocks[1](hidden.value if self.kind == "object" else hidden)
        scores: Tensor = self.more[1](self.more[0](hidden))
        return scores


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(value=self.linear(x))


def hooked() -> nn.Module:
    module = mlp()
    module.register_forward_hook(lambda *_: None)
    return module


BAD: Mapping[str, tuple[Build, dict[str, Any]]] = {
    "unknown name": (Vit, {"pipeline_split": ["block.1", "blocks.2", "blocks.3"]}),
    "too few names": (Vit, {"pipeline_split": ["blocks.1"]}),
    "wrong order": (Vit, {"pipeline_split": ["blocks.2", "blocks.1", "blocks.3"]}),
    "not called": (lambda: Branch("none"), {"pipeline_split": ["blocks.1", "more.0", "unused"]}),
    "too few blocks": (lambda: nn.Sequential(nn.Linear(12, 8), nn.Linear(8, CLASSES)), {}),
    "two lists": (lambda: nn.Transformer(4, 2, 4, 4, 8), {}),
    "branch": (lambda: Branch("branch"), {"pipeline_split": ["blocks.1", "more.0", "more.1"]}),
    "hooks": (hooked, {}),
    "unknown in the plan": (mlp, {"tensor_plan": {"first": RowwiseParallel()}}),
    "no style": (mlp, {"tensor_plan": {"0": RowwiseParallel}}),
    "style of another kind": (cnn, {"tensor_plan": {"0": ColwiseParallel()}}),
    "stage without weights": (mlp, {"pipeline_split": ["0", "3", "4"]}),
    "no list": (Vit, {"pipeline_split": "blocks.1"}),
    "names and numbers": (Vit, {"pipeline_split": ["blocks.1", 2, 1]}),
}


def refusals() -> dict[str, list[Any]]:
    """The error of each bad input on each of two workers, and whether its weights are as they were."""
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {}
    strategy = ls.ParallelStrategy(seed=7, pipeline=2, schedule="interleaved", microbatches=2)
    workers = strategy.workers.processes

    def note(name: str, weights: Mapping[str, Tensor], before: Mapping[str, Tensor], error: str) -> None:
        kept = all(torch.equal(weights[each], before[each]) for each in weights)
        found[name] = all_gather_object(workers, "the refusal", (error, kept))

    with strategy.scope():
        for name, (make, given) in BAD.items():
            torch.manual_seed(workers.index)  # each worker has weights of its own, until the chief's are sent
            module = make()
            before = {each: value.clone() for each, value in module.state_dict().items()}
            try:
                strategy.parallelize(module, **given)
            except ls.errors.LockstepError as error:
                note(name, module.state_dict(), before, f"{type(error).__name__}: {error}")
            else:
                note(name, {}, {}, "")
        split = ["blocks.1", "more.0", "more.1"]
        module = strategy.parallelize(Branch("object").double(), pipeline_split=split)
        model, weights = ls.Model(module), list(module.parameters())
        before = {str(number): value.detach().clone() for number, value in enumerate(weights)}
        model.compile(optimizer, loss)
        try:
            model.fit(batches("mlp"), verbose=0)
        except ls.errors.LockstepError as error:  # which ends the job
            kept = all(torch.equal(value, before[str(number)]) for number, value in enumerate(weights))
            found["object"] = [(f"{type(error).__name__}: {error}", kept)]
    strategy.close()
    return found


def slopes() -> nn.Module:
    """Between the linear layers there is a weight that no tensor plan divides."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.PReLU(), nn.Linear(16, CLASSES)).double()


def train_slopes(*, gathered: bool) -> dict[str, Tensor]:
    """Trains it on two tensor ranks; ``gathered`` says whether that weight meets whole rows."""
    torch.set_num_threads(1)
    strategy = ls.ParallelStrategy(tensor=2)
    whole = {"output_layouts": Replicate()} if gathered else {}
    plan = {"0": ColwiseParallel(**whole), "2": RowwiseParallel(input_layouts=Replicate() if gathered else Shard(-1))}
    with strategy.scope():
        model = ls.Model(strategy.parallelize(slopes(), tensor_plan=plan))
    model.compile(optimizer, loss)
    model.fit(batches("mlp")[:2], verbose=0)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    strategy.close()
    return weights


def slopes_by_hand() -> dict[str, Tensor]:
    """The same on one device."""
    module = slopes()
    update = optimizer(module.parameters())
    for x, y in batches("mlp")[:2]:
        update.zero_grad()
        loss(module(x), y).mean().backward()
        update.step()
    return module.state_dict()


def one_device(name: str) -> dict[str, Any]:
    """The same as ``train``, by hand."""
    module = build(name)
    update = optimizer(module.parameters())
    found: dict[str, Any] = {"loss": [], "val_loss": []}
    for _ in range(2):
        total, count, cycle = 0.0, 0, 0
        for number, (x, y) in enumerate(batches(name)):
            values = loss(call(module, x), y)
            values.sum().backward()
            total, count, cycle = total + values.sum().item(), count + len(y), cycle + len(y)
            if number % 2:
                for parameter in module.parameters():
                    parameter.grad /= cycle  # type: ignore[operator]
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                update.step()
                update.zero_grad()
                cycle = 0
        found["loss"].append(total / count)
        found["val_loss"].append(mean_loss(module, batches(name)[:2]))
    outputs = [call(module, x) for x, _ in batches(name)]
    found["evaluate"] = mean_loss(module, batches(name))
    keys = outputs[0].keys() if isinstance(outputs[0], dict) else []
    found["predict"] = {key: torch.cat([each[key] for each in outputs]) for key in keys} or torch.cat(outputs)
    found["weights"] = dict(module.state_dict())
    return found


@torch.no_grad()
def mean_loss(module: nn.Module, data: Sequence[tuple[Any, Tensor]]) -> float:
    return torch.cat([loss(call(module, x), y) for x, y in data]).mean().item()


def call(module: nn.Module, x: Any) -> Any:
    return module(*x) if isinstance(x, tuple) else module(x)
