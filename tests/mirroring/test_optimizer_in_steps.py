"""What a step, a scheduler, a scaler or a failure does with a mirrored optimizer, beside a plain one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import oracle
from tests.conftest import MakeStrategy, here
from torch import nn

import lockstep as ls
from lockstep.errors import UsageError
from lockstep.strategies.mirrored import MirroredStrategy

GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [(batch := torch.randn(rows, 4, generator=GENERATOR), batch.sum(1, keepdim=True)) for rows in (9, 9, 7, 9)]


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def mirrored_pair(strategy: MirroredStrategy) -> tuple[Any, Any]:
    mirrored = strategy.mirror(make_net())
    return mirrored, strategy.mirror(oracle.sgd(mirrored.parameters()))


def loss_of(mirrored: nn.Module, batch: Any) -> torch.Tensor:
    return ls.compute_average_loss(F.mse_loss(mirrored(batch[0]), batch[1], reduction="none")[:, 0])


def assert_trained_on(mirrored: Any, batches: list[Any], loss: Any = F.mse_loss, *, accumulate: int = 1) -> None:
    """The weights are those of one device after these batches."""
    expected = oracle.train(make_net(), batches, oracle.sgd, loss, accumulate=accumulate).module
    torch.testing.assert_close(mirrored.module.state_dict(), expected.state_dict())


@pytest.mark.parametrize("over_plain", [True, False])
def test_a_scheduler_in_the_step_is_refused_and_works_after_it(make_strategy: MakeStrategy, over_plain: bool):
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    def halving(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    strategy = make_strategy(3)
    mirrored = strategy.mirror(make_net())
    under = make(mirrored.parameters())
    optimizer = strategy.mirror(under)
    scheduler = halving(under if over_plain else optimizer)

    def step(batch: Any) -> None:
        loss_of(mirrored, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def scheduled(batch: Any) -> None:
        step(batch)
        scheduler.step()

    data = strategy.distribute_dataset(BATCHES)
    for at, batch in enumerate(data):
        strategy.run(step, (batch,))
        scheduler.step()
        if at == 1:  # a loaded state has groups of its own
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    expected = oracle.train(make_net(), BATCHES, make, F.mse_loss, scheduler=halving)
    torch.testing.assert_close(mirrored.module.state_dict(), expected.module.state_dict())
    with pytest.raises(UsageError, match=r"'lr'.*scheduler\.step\(\)"):
        strategy.run(scheduled, (next(iter(data)),))


def test_groups_are_copied_and_pickled_as_plain_dicts(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored, optimizer = mirrored_pair(strategy)
    assert len(optimizer.param_groups[0]["params"]) == len(list(mirrored.parameters()))

    file = io.BytesIO()
    torch.save(optimizer.param_groups, file)
    file.seek(0)

    assert type(torch.load(file, weights_only=False)[0]) is dict
    assert copy.deepcopy(optimizer.param_groups)[0]["lr"] == 0.1
    assert type(copy.deepcopy(optimizer.param_groups)[0]) is dict


class RecordedScaler(torch.amp.GradScaler):
    """Notes whether it made its scale in a replica."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.in_replica: list[bool] = []

    def _lazy_init_scale_growth_tracker(self, device: torch.device) -> None:
        self.in_replica.append(ls.get_replica_context() is not None)
        super()._lazy_init_scale_growth_tracker(device)


@pytest.mark.parametrize("place", ["closure", "object", "partial"])
def test_a_scaler_makes_its_scale_before_replicas_could_do_so_at_once(make_strategy: MakeStrategy, place: str):
    strategy, scaler = make_strategy(2), RecordedScaler()
    mirrored, optimizer = mirrored_pair(strategy)

    def scaled(loss_scaler: torch.amp.GradScaler, batch: Any) -> None:
        loss_scaler.scale(loss_of(mirrored, batch)).backward()
        optimizer.sum_gradients()

    class Loop:
        def __init__(self) -> None:
            self.scaler = scaler

        def step(self, batch: Any) -> None:
            scaled(self.scaler, batch)

    steps = {"closure": lambda batch: scaled(scaler, batch), "object": Loop().step, "partial": partial(scaled, scaler)}
    strategy.run(steps[place], (next(iter(strategy.distribute_dataset(BATCHES))),))

    assert scaler.in_replica == [False]


@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_a_scaler_in_the_step_is_refused(make_strategy: MakeStrategy, call: str):
    strategy = make_strategy(2)
    mirrored, optimizer = mirrored_pair(strategy)
    scaler = torch.amp.GradScaler("cpu")

    def step(batch: Any) -> None:
        scaler.scale(loss_of(mirrored, batch)).backward()
        getattr(scaler, call)(optimizer)

    with pytest.raises(UsageError, match=r"GradScaler.*sum_gradients"):
        strategy.run(step, (next(iter(strategy.distribute_dataset(BATCHES))),))


def test_a_scaler_after_the_step_is_that_of_one_device(make_strategy: MakeStrategy):
    expected, theirs = make_net(), torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
    plain = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9)
    for x, y in BATCHES * 3:  # the scale overflows at first, and those steps are skipped
        theirs.scale(F.mse_loss(expected(x), y) * 1e6).backward()
        theirs.step(plain)
        theirs.update()
        plain.zero_grad()
    strategy, ours = make_strategy(3), torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
    mirrored, optimizer = mirrored_pair(strategy)

    def step(batch: Any) -> None:
        ours.scale(loss_of(mirrored, batch) * 1e6).backward()
        optimizer.sum_gradients()

    for batch in strategy.distribute_dataset(BATCHES * 3):
        strategy.run(step, (batch,))
        ours.step(optimizer)
        ours.update()
        optimizer.zero_grad()

    assert ours.get_scale() == theirs.get_scale()
    torch.testing.assert_close(mirrored.module.state_dict(), expected.state_dict())


def test_a_step_that_failed_in_one_replica_leaves_no_gradients(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored, optimizer = mirrored_pair(strategy)

    def step(batch: Any, fails: bool) -> None:
        loss = loss_of(mirrored, batch)
        if fails and ls.get_replica_context().replica_id_in_sync_group == 1:  # type: ignore[union-attr]
            raise ValueError("a bad row")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for at, batch in enumerate(strategy.distribute_dataset(BATCHES[:3])):
        if at == 1:
            with pytest.raises(ValueError, match="a bad row"):
                strategy.run(step, (batch, True))
        else:
            strategy.run(step, (batch, False))

    assert_trained_on(mirrored, [BATCHES[0], BATCHES[2]])


def test_an_accumulation_in_which_a_step_failed_begins_again(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored, optimizer = mirrored_pair(strategy)

    def backward(batch: Any, fails: bool) -> None:
        loss_of(mirrored, batch).backward()
        if fails and ls.get_replica_context().replica_id_in_sync_group == 1:  # type: ignore[union-attr]
            raise ValueError("a bad row")

    first, second, *rest = strategy.distribute_dataset(BATCHES)
    strategy.run(backward, (first, False))
    with pytest.raises(ValueError, match="a bad row"):
        strategy.run(backward, (second, True))
    with pytest.raises(UsageError, match="zero_grad"):
        optimizer.step()
    with pytest.raises(UsageError, match="zero_grad"):
        strategy.run(optimizer.step)
    optimizer.zero_grad()
    for batch in rest:
        strategy.run(backward, (batch, False))
    optimizer.step()

    # The sum of two means is not divided by two.
    assert_trained_on(mirrored, BATCHES[2:], lambda outputs, y: (F.mse_loss(outputs, y), 0.5), accumulate=2)


def test_a_run_that_failed_without_a_backward_pass_leaves_an_accumulation_alone(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored, optimizer = mirrored_pair(strategy)

    def evaluate() -> None:
        raise ValueError("no such metric")

    (batch,) = strategy.distribute_dataset(BATCHES[:1])
    strategy.run(lambda each: loss_of(mirrored, each).backward(), (batch,))
    with pytest.raises(ValueError, match="no such metric"):
        strategy.run(evaluate)
    optimizer.step()

    assert_trained_on(mirrored, BATCHES[:1])


def test_the_hooks_of_the_state_are_called(make_strategy: MakeStrategy):
    _, optimizer = mirrored_pair(make_strategy(2))
    called = []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("pre"))
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"note": called.append("post")})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: called.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))

    state = optimizer.state_dict()
    assert "note" in state
    del state["note"]
    optimizer.load_state_dict(state)

    assert called == ["pre", "post", "load", "loaded"]


def test_a_refused_group_leaves_the_optimizer_as_it_was(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored, optimizer = mirrored_pair(strategy)
    with pytest.raises(UsageError, match="mirrored"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})

    def step(batch: Any) -> None:
        loss_of(mirrored, batch).backward()
        optimizer.step()

    strategy.run(step, (next(iter(strategy.distribute_dataset(BATCHES))),))

    assert len(optimizer.param_groups) == 1
    assert_trained_on(mirrored, BATCHES[:1])


def test_gradients_are_zeroed_in_place_where_asked(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored, optimizer = mirrored_pair(strategy)
    (batch,) = strategy.distribute_dataset(BATCHES[:1])
    strategy.run(lambda each: loss_of(mirrored, each).backward(), (batch,))
    before = [each.grad for each in mirrored.parameters()]

    optimizer.zero_grad(set_to_none=False)

    for gradient, each in zip(before, mirrored.parameters(), strict=True):
        assert each.grad is gradient
        assert not gradient.any()


class Sam(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al. 2021): the gradient is taken uphill from the weights."""

    @torch.no_grad()
    def first_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            self.state[each]["uphill"] = each.grad * 0.05
            each.add_(self.state[each]["uphill"])

    @torch.no_grad()
    def second_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            each.sub_(self.state[each]["uphill"])
        super().step()

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "a closure is needed"
        self.first_step()
        self.zero_grad()
        closure()
        self.second_step()


def test_an_optimizer_of_two_halves_is_stepped_between_runs(make_strategy: MakeStrategy):
    expected = make_net()
    plain = Sam(expected.parameters(), 0.1)
    for x, y in BATCHES:
        F.mse_loss(expected(x), y).backward()
        plain.first_step()
        plain.zero_grad()
        F.mse_loss(expected(x), y).backward()
        plain.second_step()
        plain.zero_grad()
    strategy = make_strategy(3)
    mirrored = strategy.mirror(make_net())
    optimizer = strategy.mirror(Sam(mirrored.parameters(), 0.1))

    def backward(batch: Any) -> None:
        loss_of(mirrored, batch).backward()

    for batch in strategy.distribute_dataset(BATCHES):
        strategy.run(backward, (batch,))
        optimizer.first_step()
        optimizer.zero_grad()
        strategy.run(backward, (batch,))
        optimizer.second_step()
        optimizer.zero_grad()

    torch.testing.assert_close(mirrored.module.state_dict(), expected.state_dict())


def test_an_optimizer_that_wants_a_closure_says_how_it_is_stepped(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(make_net())
    optimizer = strategy.mirror(Sam(mirrored.parameters(), 0.1))

    def step(batch: Any) -> None:
        loss_of(mirrored, batch).backward()
        optimizer.step(lambda: loss_of(mirrored, batch).backward())

    with pytest.raises(AssertionError, match="a closure is needed") as caught:
        strategy.run(step, (next(iter(strategy.distribute_dataset(BATCHES))),))
    assert any("first_step" in note for note in caught.value.__notes__)


def added_in_the_step(gradients: list[torch.Tensor], context: ls.ReplicaContext) -> Any:
    return context.all_reduce("sum", gradients)


def added_in_a_merge_call(gradients: list[torch.Tensor], context: ls.ReplicaContext) -> Any:
    return context.merge_call(lambda strategy, given: strategy.reduce("sum", given), (gradients,))


def added_outside(gradients: list[torch.Tensor], context: ls.ReplicaContext) -> Any:
    return gradients


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("way", [added_in_the_step, added_in_a_merge_call, added_outside])
def test_gradients_that_were_read_are_not_added_up_once_more(
    make_strategy: MakeStrategy, way: Callable[..., Any], with_optimizer: bool
):
    strategy = make_strategy(3)
    mirrored = strategy.mirror(make_net())
    if with_optimizer:
        strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))

    def step(batch: Any) -> Any:
        loss_of(mirrored, batch).backward()
        return way([each.grad for each in mirrored.parameters()], here())

    with pytest.raises(UsageError, match=r"\.grad of shape .* sum over all replicas already"):
        strategy.reduce("sum", strategy.run(step, (next(iter(strategy.distribute_dataset(BATCHES))),)))


def test_gradients_of_a_replica_itself_are_added_up(make_strategy: MakeStrategy):
    expected = make_net()
    F.mse_loss(expected(BATCHES[0][0]), BATCHES[0][1]).backward()
    strategy = make_strategy(3)
    mirrored = strategy.mirror(make_net())

    def step(batch: Any) -> Any:
        own = torch.autograd.grad(loss_of(mirrored, batch), list(mirrored.parameters()))
        return here().all_reduce("sum", own)

    found = strategy.local_results(strategy.run(step, (next(iter(strategy.distribute_dataset(BATCHES))),)))
    for gradients in found:
        for gradient, parameter in zip(gradients, expected.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_one_replica_may_add_up_its_gradients(make_strategy: MakeStrategy):
    strategy = make_strategy(1)
    mirrored = strategy.mirror(make_net())

    def step(batch: Any) -> Any:
        loss_of(mirrored, batch).backward()
        return [(each.grad, here().all_reduce("sum", each.grad)) for each in mirrored.parameters()]

    for gradient, total in strategy.run(step, (BATCHES[0],)):
        assert torch.equal(gradient, total)
