"""A step that reaches past its replica's own copies is equal to one device, or is refused in its first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import UsageError
from lockstep.replicas.context import get_replica_context

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


def make_net() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 1)


def first_batch(strategy: MirroredStrategy) -> Any:
    return next(
        iter(
            strategy.distribute_dataset(
                [(X, Y)],
            )
        )
    )


def test_a_program_of_plain_objects_made_in_the_scope_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    with strategy.scope():
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(batch: Any) -> None:
        F.mse_loss(net(batch[0]), batch[1]).backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"mirror"):
        strategy.run(step, (first_batch(strategy),))


@pytest.mark.parametrize(
    "use",
    [
        lambda net, x: torch.func.functional_call(net, dict(net.named_parameters()), (x,)).sum(),
        lambda net, x: (x @ net.weight.T).sum(),
        lambda net, x: torch.cat([net.weight, net.weight]).sum() + x.sum(),
        lambda net, x: F.linear(x, weight=net.weight).sum(),
    ],
    ids=["functional_call", "attribute", "in a list", "by keyword"],
)
@pytest.mark.parametrize("mirrored", [False, True])
def test_weights_of_a_plain_module_get_no_gradient_in_a_step(
    make_strategy: MakeStrategy, use: Callable[..., torch.Tensor], mirrored: bool
):
    strategy, net = make_strategy(2), make_net()
    kept = strategy.mirror(net) if mirrored else None

    with pytest.raises(UsageError, match=r"strategy\.mirror\(module\)"):
        strategy.run(lambda x: use(net, x).backward(), (X,))
    del kept


def test_a_penalty_on_the_plain_modules_weights_is_refused_in_any_run(make_strategy: MakeStrategy):
    strategy, net = make_strategy(2), make_net()
    mirrored = strategy.mirror(net)

    def step(x: torch.Tensor, penalised: bool) -> None:
        loss = mirrored(x).sum()
        if penalised:
            loss = loss + sum(weight.square().sum() for weight in net.parameters())
        loss.backward()

    strategy.run(step, (X, False))
    with pytest.raises(UsageError, match="Linear"):
        strategy.run(step, (X, True))


def test_a_teacher_that_is_only_read_need_not_be_mirrored(make_strategy: MakeStrategy):
    strategy, teacher, net = make_strategy(2), make_net(), make_net()
    mirrored = strategy.mirror(net)

    strategy.run(lambda x: F.mse_loss(mirrored(x), teacher(x).detach()).backward(), (X,))

    assert teacher.weight.grad is None


def test_modules_and_parameters_made_in_the_step_are_the_replicas_own(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        own = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        own(x).sum().backward()
        optimizer.step()
        return own.weight.grad.sum()

    assert all(float(value) for value in strategy.local_results(strategy.run(step, (X,))))


def test_a_moving_average_by_hand_in_the_step_is_made_once(make_strategy: MakeStrategy):
    strategy, net, target = make_strategy(3), make_net(), make_net()
    with torch.no_grad():
        target.weight.mul_(2.0)
    expected = {
        name: 0.9 * old + 0.1 * new
        for (name, old), new in zip(target.state_dict().items(), net.state_dict().values(), strict=True)
    }
    live, averaged = strategy.mirror(net), strategy.mirror(target)

    def step() -> None:
        with torch.no_grad():
            for old, new in zip(averaged.parameters(), live.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)

    strategy.run(step)

    for copy in averaged.copies:
        torch.testing.assert_close(copy.state_dict(), expected)


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        (lambda weight: weight.data.clamp_(-0.01, 0.01), lambda weight: weight.clamp(-0.01, 0.01)),
        (lambda weight: weight.data.mul_(2.0), lambda weight: weight * 2),
        (lambda weight: torch._foreach_mul_([weight.data], 2.0), lambda weight: weight * 2),
        (lambda weight: torch.add(weight.data, 1.0, out=weight.data), lambda weight: weight + 1),
        (lambda weight: weight.data.view(-1)[:2].zero_(), lambda weight: weight * torch.tensor([0.0, 0, 1, 1])),
        (
            lambda weight: weight.data.__setitem__((0, 0), 7.0),
            lambda weight: torch.cat([torch.tensor([[7.0]]), weight[:, 1:]], 1),
        ),
        (
            lambda weight: weight.data.__setitem__((0, np.array([0, 1])), 7.0),
            lambda weight: torch.cat([torch.full((1, 2), 7.0), weight[:, 2:]], 1),
        ),
        (lambda weight: nn.init.constant_(weight, 5.0), lambda weight: torch.full_like(weight, 5)),
    ],
)
def test_a_change_of_weights_in_place_is_made_once(make_strategy: MakeStrategy, change: Any, plain: Any):
    strategy, net = make_strategy(3), make_net()
    expected = plain(net.weight.detach().clone())
    mirrored = strategy.mirror(net)

    def step() -> None:
        change(mirrored.weight)

    strategy.run(step)

    for copy in mirrored.copies:
        torch.testing.assert_close(copy.weight.detach(), expected)


def test_a_change_by_values_that_differ_between_replicas_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(make_net())

    def step(batch: Any) -> None:
        with torch.no_grad():
            mirrored.weight.add_(batch[0].sum())

    with pytest.raises(UsageError, match="all_reduce"):
        strategy.run(step, (first_batch(strategy),))


def test_random_numbers_into_weights_are_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(make_net())

    with pytest.raises(UsageError, match="random"):
        strategy.run(lambda: [mirrored.weight.data.normal_()])


def test_an_embedding_that_renormalises_its_weights_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.Embedding(5, 2, max_norm=1.0))

    with pytest.raises(UsageError, match="max_norm"):
        strategy.run(lambda: mirrored(torch.tensor([1, 2])))


def test_new_data_for_a_weight_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(make_net())

    def step() -> None:
        mirrored.weight.data = torch.zeros(1, 4)

    with pytest.raises(UsageError, match=r"weight\.data"):
        strategy.run(step)


def test_a_tensor_from_outside_that_all_replicas_change_is_refused(make_strategy: MakeStrategy):
    strategy, total = make_strategy(2), torch.zeros(1)

    with pytest.raises(UsageError, match=r"strategy\.reduce"):
        strategy.run(lambda: [total.add_(1)])


@pytest.mark.parametrize(
    "view",
    [
        lambda total: total[0],
        lambda total: total[1:],
        lambda total: total.view(-1),
        lambda total: total.data,
        lambda total: total.detach(),
    ],
    ids=["an item", "a slice", "view", "data", "detach"],
)
def test_a_view_of_a_tensor_from_outside_that_all_replicas_change_is_refused(
    make_strategy: MakeStrategy, view: Callable[[torch.Tensor], torch.Tensor]
):
    strategy, total = make_strategy(2), torch.zeros(4)

    with pytest.raises(UsageError, match=r"strategy\.reduce"):
        strategy.run(lambda: [view(total).add_(1)])


def test_replicas_may_change_rows_of_their_own_in_one_tensor(make_strategy: MakeStrategy):
    strategy, rows = make_strategy(3), torch.zeros(3, 2)

    def step() -> None:
        context = get_replica_context()
        assert context is not None
        number = context.replica_id_in_sync_group
        rows[number].add_(number)
        rows[number, 1:].mul_(2)

    strategy.run(step)
    strategy.run(step)

    expected = torch.zeros(3, 2)
    for _ in range(2):
        for number in range(3):
            expected[number] += number
            expected[number, 1:] *= 2
    assert torch.equal(rows, expected)


def test_a_replica_may_change_its_own_tensors_through_views(make_strategy: MakeStrategy):
    strategy, x = make_strategy(3), torch.arange(12.0).view(6, 2)

    def step(shard: torch.Tensor) -> torch.Tensor:
        own = shard.clone()
        own[0].mul_(2)
        own.view(-1).add_(1)
        return own.detach().sum().add_(1) - 1

    (batch,) = strategy.distribute_dataset([x])

    doubled = x.clone()
    doubled[::2] *= 2
    assert strategy.reduce("sum", strategy.run(step, (batch,))) == (doubled + 1).sum()


def test_a_generator_from_outside_is_refused(make_strategy: MakeStrategy):
    strategy, generator = make_strategy(2), torch.Generator()

    with pytest.raises(UsageError, match=r"torch\.Generator"):
        strategy.run(lambda: torch.rand(2, generator=generator))


def test_the_plain_modules_shape_and_device_may_be_read(make_strategy: MakeStrategy):
    strategy, net = make_strategy(2), make_net()
    strategy.mirror(net)

    strategy.run(lambda: (net.weight.device, net.weight.shape, len(net.weight), net.weight.detach().sum()))


def test_a_weight_s_data_multiplied_in_place_is_that_of_one_device(make_strategy: MakeStrategy):
    strategy, plain, given = make_strategy(3), nn.Linear(4, 2), nn.Linear(4, 2)
    given.load_state_dict(plain.state_dict())
    mirrored, mask = strategy.mirror(given), torch.tensor([[1.0], [0.5]])

    def step() -> None:
        mirrored.weight.data *= mask

    strategy.run(step)
    plain.weight.data *= mask

    assert torch.equal(given.weight, plain.weight)
