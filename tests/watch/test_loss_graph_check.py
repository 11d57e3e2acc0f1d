"""Losses whose gradients add up to something else than one device's are told of in the first run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 4, generator=GENERATOR), torch.randint(3, (8,), generator=GENERATOR)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def per_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def exact(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ls.compute_average_loss(per_row(model, x, y), global_batch_size=8)


def squares(model: nn.Module) -> Tensor:
    return torch.stack([weight.square().sum() for weight in model.parameters()]).sum()


def replicas() -> int:
    context = ls.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def spread(loss: Loss, make_strategy: MakeStrategy, count: int) -> tuple[nn.Module, list[str]]:
    """Trains on replicas; gives the module, and what was warned of."""
    strategy, module = make_strategy(count), net()
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.5))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(mirrored, x, y).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x, y in strategy.distribute_dataset([(X, Y)]):
            strategy.run(step, (x, y))
    return module, [str(each.message) for each in told if each.filename == __file__]


def alone(loss: Loss) -> nn.Module:
    """The same in plain PyTorch."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    loss(module, X, Y).backward()
    optimizer.step()
    return module


def differ(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return any(not torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in pairs)


MEANS: dict[str, Loss] = {
    "cross entropy": lambda model, x, y: F.cross_entropy(model(x), y),
    "of a module, scaled": lambda model, x, y: nn.MSELoss()(model(x), F.one_hot(y, 3).float()) * 0.5,
    "by hand": lambda model, x, y: per_row(model, x, y).sum() / len(x),
    "of a method": lambda model, x, y: per_row(model, x, y).mean(),
    "of the rows that a mask leaves": lambda model, x, y: per_row(model, x, y)[x[:, 0] > 0].mean(),
    "by a mask's count": lambda model, x, y: (per_row(model, x, y) * (x[:, 2] > 0)).sum() / (x[:, 2] > 0).sum(),
    "one of two": lambda model, x, y: exact(model, x, y) + 0.1 * model(x).abs().mean(),
    "over the replicas, of shards that differ": lambda model, x, y: per_row(model, x, y).mean() / replicas(),
}


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_a_mean_over_a_shard_is_told_of(make_strategy: MakeStrategy, loss: Loss):
    module, told = spread(loss, make_strategy, 3)

    assert differ(module, alone(loss))
    assert len(told) == 1
    assert "compute_average_loss" in told[0]


def test_a_mean_over_labels_that_count_is_no_share_of_the_replicas(make_strategy: MakeStrategy):
    ignored = next(label for label in range(3) if (Y[:4] == label).sum() != (Y[4:] == label).sum())

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, ignore_index=ignored) / replicas()

    module, told = spread(loss, make_strategy, 2)

    assert differ(module, alone(loss))
    assert len(told) == 1
    assert "compute_average_loss" in told[0]


PENALTIES: dict[str, Loss] = {
    "squares": lambda model, x, y: exact(model, x, y) + 0.1 * squares(model),
    "norm": lambda model, x, y: exact(model, x, y) + 0.1 * next(model.parameters()).norm(),
    "a weight itself": lambda model, x, y: exact(model, x, y) + 0.1 * next(model.parameters()).sum(),
    "orthogonality": lambda model, x, y: (
        exact(model, x, y) + ((w := next(model.parameters())).T @ w - torch.eye(4)).square().sum()
    ),
}


@pytest.mark.parametrize("loss", PENALTIES.values(), ids=PENALTIES)
def test_a_penalty_that_each_replica_adds_is_told_of(make_strategy: MakeStrategy, loss: Loss):
    module, told = spread(loss, make_strategy, 2)

    assert differ(module, alone(loss))
    assert len(told) == 1
    assert "scale_regularization_loss" in told[0]


def of_a_sum(model: nn.Module, x: Tensor, y: Tensor, *, summed: bool) -> Tensor:
    loss, context = exact(model, x, y), ls.get_replica_context()
    gradients: Any = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    if summed and context is not None:
        gradients = [context.all_reduce("sum", each) for each in gradients]
    penalty = torch.stack([each.square().sum() for each in gradients]).sum()
    return loss + penalty / (replicas() if summed else 1)


def test_gradients_of_a_shard_that_are_not_summed_are_told_of(make_strategy: MakeStrategy):
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return of_a_sum(model, x, y, summed=False)

    module, told = spread(loss, make_strategy, 2)

    assert differ(module, alone(loss))
    assert len(told) == 1
    assert "test_loss_graph_check.py" in told[0]
    assert "all_reduce" in told[0]


class Cubed(torch.autograd.Function):
    """Keeps a name of its own, as a function of Python's may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.name = "cubed"
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3 * ctx.saved_tensors[0] ** 2


def alike(model: nn.Module, x: Tensor) -> Tensor:
    features = F.normalize(model(x), dim=1)
    return features @ features.T


def whitened(model: nn.Module, x: Tensor) -> Tensor:
    features = model(x)
    return (features - features.mean(0)) / (features.std(0, correction=0) + 0.1)


def dice(model: nn.Module, x: Tensor, y: Tensor, *dims: int) -> Tensor:
    chances, labels = model(x).softmax(1), F.one_hot(y, 3)
    loss: Tensor = 1 - 2 * (chances * labels).sum(*dims) / (chances.sum(*dims) + labels.sum(*dims))
    return loss.sum()


def prototypes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    labels = F.one_hot(y, 3).float()
    return model(x) @ (labels.T @ model(x)).T


OVER_ROWS: dict[str, Loss] = {
    "contrastive": lambda model, x, y: alike(model, x).exp().sum(1).log().sum() / 8,
    "whitened": lambda model, x, y: F.cross_entropy(whitened(model, x), y, reduction="sum") / 8,
    "largest": lambda model, x, y: per_row(model, x, y).topk(2).values.sum() / 8,
    "softmax over the rows": lambda model, x, y: (model(x).softmax(0) * F.one_hot(y, 3)).sum() / 8,
    "correlation": lambda model, x, y: ((z := model(x)).T @ z / 8).square().sum(),
    "dice": dice,
    "dice of each class": lambda model, x, y: dice(model, x, y, 0),
    "prototypes": lambda model, x, y: F.cross_entropy(prototypes(model, x, y), y, reduction="sum") / 8,
    "normalised advantages": lambda model, x, y: (per_row(model, x, y) * (x[:, 0] / x[:, 0].std())).sum() / 8,
    "mixed with its neighbours": lambda model, x, y: per_row(model, 0.7 * x + 0.3 * x.flip(0), y).sum() / 8,
    "weights by labels": lambda model, x, y: (
        F.cross_entropy(model(x), y, torch.bincount(y, minlength=3) + 1.0, reduction="sum") / 8
    ),
    "root of a mean": lambda model, x, y: model(x).square().mean().sqrt(),
}


@pytest.mark.parametrize("loss", OVER_ROWS.values(), ids=OVER_ROWS)
@pytest.mark.parametrize("count", [2, 3])
def test_a_loss_that_compares_the_rows_of_a_shard_is_told_of(make_strategy: MakeStrategy, loss: Loss, count: int):
    module, told = spread(loss, make_strategy, count)

    assert differ(module, alone(loss))
    assert len(told) == 1
    assert "gather_rows" in told[0]


def gathered(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    features, context = F.normalize(model(x), dim=1), ls.get_replica_context()
    everyone = features if context is None else context.all_gather(features, axis=0)
    total: Tensor = (features @ everyone.T).exp().sum(1).log().sum() / 8
    return total


RIGHT: dict[str, Loss] = {
    "average": exact,
    "a part of a mean": lambda model, x, y: per_row(model, x, y).mean() * len(x) / 8,
    "a share of a mean": lambda model, x, y: per_row(model, x, y).mean() * (len(x) / 8),
    "a sum": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum"),
    "a mean over what a row has": lambda model, x, y: exact(model, x, y) + model(x).square().mean(1).sum() / 8,
    "a divided penalty of three items": lambda model, x, y: (
        exact(model, x, y) + list(model.parameters())[-1].square().sum() / replicas()
    ),
    "a divided penalty": lambda model, x, y: exact(model, x, y) + squares(model) / replicas(),
    "gathered": gathered,
    "by the sum of all masks": lambda model, x, y: (per_row(model, x, y) * (x[:, 0] > 0)).sum() / (X[:, 0] > 0).sum(),
    "by a sum along each row": lambda model, x, y: (model(x).exp() / model(x).exp().sum(1, keepdim=True)).sum() / 8,
    "a function of Python's": lambda model, x, y: Cubed.apply(model(x)).square().sum() / 8,
    "a spread of each row": lambda model, x, y: per_row(model, x / x.std(1, correction=0)[:, None], y).sum() / 8,
    "summed gradients": lambda model, x, y: of_a_sum(model, x, y, summed=True),
    "one loss a row": lambda model, x, y: sum(
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))
    ),
}


@pytest.mark.parametrize("loss", RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_not_told_of(make_strategy: MakeStrategy, loss: Loss):
    module, told = spread(loss, make_strategy, 3)

    assert not differ(module, alone(loss))
    assert told == []


def test_a_mean_of_equal_shards_over_the_replicas_is_right(make_strategy: MakeStrategy):
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return per_row(model, x, y).mean() / replicas()

    module, told = spread(loss, make_strategy, 2)

    assert not differ(module, alone(loss))
    assert told == []


def accumulated(make_strategy: MakeStrategy, *, divisor: int, cycle: int, parts: int = 1) -> list[str]:
    """What is told of means over shards that are divided and added up over ``cycle`` runs of ``parts`` losses each."""
    strategy = make_strategy(2)
    mirrored = strategy.mirror(net())
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.5))

    def step(x: Tensor, y: Tensor, due: bool) -> None:
        for some_x, some_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(mirrored(some_x), some_y) / divisor).backward()
        if due:
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number, (x, y) in enumerate(strategy.distribute_dataset([(X, Y)] * 4), start=1):
            strategy.run(step, (x, y, number % cycle == 0))
    return [str(each.message) for each in told if each.filename == __file__]


@pytest.mark.parametrize(("divisor", "cycle", "parts"), [(2, 1, 1), (4, 2, 1), (8, 4, 1), (8, 2, 2), (4, 1, 2)])
def test_a_mean_that_accumulation_divides_too_is_right(
    make_strategy: MakeStrategy, divisor: int, cycle: int, parts: int
):
    assert accumulated(make_strategy, divisor=divisor, cycle=cycle, parts=parts) == []


@pytest.mark.parametrize(("divisor", "cycle"), [(1, 1), (4, 4), (4, 1)])
def test_a_mean_is_judged_by_the_runs_that_are_accumulated(make_strategy: MakeStrategy, divisor: int, cycle: int):
    (told,) = accumulated(make_strategy, divisor=divisor, cycle=cycle)

    assert "back-propagates a mean" in told


def told_in(make_strategy: MakeStrategy, loss: Callable[..., Tensor], sizes: Sequence[int]) -> dict[int, str]:
    """What is told of on two replicas in which of several steps, counted from 1, of batches of so many rows."""
    strategy = make_strategy(2)
    mirrored = strategy.mirror(net())
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))

    def step(x: Tensor, y: Tensor, number: int) -> None:
        optimizer.zero_grad()
        loss(mirrored, x, y, number).backward()
        optimizer.step()

    found = {}
    for number, (x, y) in enumerate(strategy.distribute_dataset([(X[:size], Y[:size]) for size in sizes]), start=1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.run(step, (x, y, number))
        found.update((number, str(warning.message)) for warning in caught if warning.filename == __file__)
    return found


@pytest.mark.parametrize("sizes", [(8, 8, 7), (8, 8, 3), (8,) * 20 + (5,)])
def test_a_mean_over_the_replicas_is_told_of_when_the_first_uneven_batch_comes(
    make_strategy: MakeStrategy, sizes: Sequence[int]
):
    def loss(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
        return per_row(model, x, y).mean() / 2

    (told,) = told_in(make_strategy, loss, sizes).items()

    assert told[0] == len(sizes)
    assert "back-propagates a mean" in told[1]


def test_uneven_batches_of_a_right_loss_are_not_told_of(make_strategy: MakeStrategy):
    def loss(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Tensor:
        return ls.compute_average_loss(per_row(model, x, y), global_batch_size=8 if number < 3 else 7)

    assert told_in(make_strategy, loss, (8, 8, 7, 7)) == {}


def test_a_penalty_that_begins_in_a_later_step_is_told_of_then(make_strategy: MakeStrategy):
    def loss(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Tensor:
        return exact(model, x, y) + (0.01 * squares(model) if number >= 3 else 0)

    (told,) = told_in(make_strategy, loss, (8,) * 5).items()

    assert told[0] == 3
    assert "scale_regularization_loss" in told[1]


def test_a_count_of_the_batch_that_is_that_of_a_shards_rows_is_right(make_strategy: MakeStrategy):
    def loss(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
        counts = torch.tensor([1.0, 0.0, 1.0, 0.0])  # half of the rows, in each shard
        context = ls.get_replica_context()
        assert context is not None
        return (per_row(model, x, y) * counts).sum() / context.all_reduce("sum", counts.sum())

    assert told_in(make_strategy, loss, (8,) * 3) == {}


def penalty(gradient_of: Callable[[Tensor], Tensor], shape: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A loss with a penalty on the gradients of rows, of ``shape`` of a gradient."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
        points = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(gradient_of(model(points)), points, create_graph=True)
        return exact(model, x, y) + ls.compute_average_loss(shape(gradient).square().sum(1), global_batch_size=8)

    return loss


@pytest.mark.parametrize(
    ("loss", "is_told"),
    [
        (penalty(torch.sum, lambda gradient: gradient), False),
        (penalty(torch.mean, lambda gradient: gradient), True),
        (penalty(torch.mean, lambda gradient: F.normalize(gradient)), False),
        (penalty(torch.sum, lambda gradient: 1 + gradient / gradient.norm()), True),
    ],
    ids=["of a sum", "of a mean", "of a mean, each of length 1", "by the norm of all rows"],
)
def test_gradients_of_rows_are_told_of_where_they_depend_on_the_shard(
    make_strategy: MakeStrategy, loss: Callable[..., Tensor], is_told: bool
):
    told = told_in(make_strategy, loss, (8,) * 2)

    assert list(told) == ([1] if is_told else [])
    assert all("compares or combines the rows" in message for message in told.values())


def by_itself(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
    loss = exact(model, x, y)
    return loss / loss.detach()


def balanced(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
    first, second = exact(model, x, y), ls.compute_average_loss(model(x).square().sum(1), global_batch_size=8)
    with torch.no_grad():
        ratio = first / second
    return first + ratio * second


def added(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
    loss = exact(model, x, y)
    return loss + loss.detach()


def to_targets(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
    scores = model(x)
    return ls.compute_average_loss((scores - scores.softmax(1).detach()).square().sum(1), global_batch_size=8)


@pytest.mark.parametrize(
    ("loss", "is_told"), [(by_itself, True), (balanced, True), (added, False), (to_targets, False)]
)
def test_a_constant_of_the_shard_that_multiplies_rows_is_told_of(
    make_strategy: MakeStrategy, loss: Callable[..., Tensor], is_told: bool
):
    assert list(told_in(make_strategy, loss, (8,) * 2)) == ([1] if is_told else [])


@pytest.mark.parametrize("level", [0.01, 10.0])
def test_a_sum_that_is_bent_is_told_of_on_both_sides_of_the_kink(make_strategy: MakeStrategy, level: float):
    def flooded(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
        return (exact(model, x, y) - level).abs() + level

    def of_each_row(model: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
        return ls.compute_average_loss((per_row(model, x, y) - level).abs() + level, global_batch_size=8)

    (told,) = told_in(make_strategy, flooded, (8,) * 2).values()
    assert "to a sum over the rows of its shard (abs (test_loss_graph_check.py:" in told
    assert told_in(make_strategy, of_each_row, (8,) * 2) == {}
