"""What is changed outside replicas in the user's module reaches all copies, with the numbers of the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn

from lockstep.mirroring.module.module import MirroredModule

ROWS = torch.randn(3, 6, 2, generator=torch.Generator().manual_seed(0)).double()


class Running(nn.Module):
    """Adds, to running sums, what it is called with; on one device and on replicas by a mean over equal shards."""

    total: Tensor
    calls: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, dtype=torch.double))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(1, dtype=torch.double))
        self.register_buffer("none", None)
        self.linear = nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += x.mean(0) * self.scale
            self.calls += 1
        return self.linear(x)  # type: ignore[no-any-return]


def fill(net: Running) -> None:
    net.total.fill_(5.0)
    net.calls.fill_(7)


def replace(net: Running) -> None:
    net.total = torch.full((2,), 5.0, dtype=torch.double)
    net.calls = torch.tensor(7)


def load(net: Running) -> None:
    state = net.state_dict()
    net.load_state_dict({**state, "total": torch.full((2,), 5.0), "calls": torch.tensor(7)})


def through_data(net: Running) -> None:
    net.total.data.fill_(5.0)
    net.calls.data = torch.tensor(7)


def an_element(net: Running) -> None:
    net.total[0], net.total[1] = 5.0, 6.0


def other_dtype(net: Running) -> None:
    net.total = torch.full((2,), 5.0)
    net.total = net.total.double()
    net.scale = torch.full((1,), 0.5)


CHANGES = [fill, replace, load, through_data, an_element, other_dtype]


@pytest.fixture
def nets(layout: str, make_strategy: MakeStrategy) -> tuple[Any, Running, Running, MirroredModule]:
    torch.manual_seed(0)
    strategy, plain = make_strategy(3), Running()
    net = copy.deepcopy(plain)
    return strategy, plain, net, strategy.mirror(net)


def steps(strategy: Any, plain: Running, mirrored: MirroredModule, batch: Tensor) -> None:
    plain(batch)
    for shards in strategy.distribute_dataset([batch]):
        strategy.run(mirrored, args=(shards,))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("runs", [0, 1, 2])
def test_a_buffer_set_outside_is_set_in_all_copies(change: Callable[[Running], None], runs: int, nets: Any):
    strategy, plain, net, mirrored = nets
    for number in range(runs):
        steps(strategy, plain, mirrored, ROWS[number])

    with torch.no_grad():
        change(plain)
        change(net)

    read = dict(mirrored.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(read[name], buffer)
    steps(strategy, plain, mirrored, ROWS[2])
    state, expected = mirrored.state_dict(), plain.state_dict()
    assert state["calls"] == expected["calls"]
    torch.testing.assert_close(state["total"], expected["total"], rtol=1e-12, atol=0)


def test_without_a_read_in_between_the_next_run_has_it(nets: Any):
    strategy, plain, net, mirrored = nets
    for number, batch in enumerate(ROWS):
        with torch.no_grad():
            plain.total.fill_(number)
            net.total.fill_(number)
        steps(strategy, plain, mirrored, batch)
        seen = strategy.run(lambda: mirrored.calls.clone())
        assert [int(each) for each in seen] == [number + 1] * 3

    torch.testing.assert_close(mirrored.state_dict()["total"], plain.total, rtol=1e-12, atol=0)


def test_what_is_written_into_buffers_read_outside_is_written(nets: Any):
    strategy, plain, _, mirrored = nets
    steps(strategy, plain, mirrored, ROWS[0])

    for module in (plain, mirrored):
        for buffer in module.buffers():
            buffer.zero_()
    steps(strategy, plain, mirrored, ROWS[1])
    for module in (plain, mirrored):
        module.state_dict()["total"].mul_(2)

    torch.testing.assert_close(mirrored.state_dict(), plain.state_dict(), rtol=1e-12, atol=0)


def test_a_buffer_read_as_an_attribute_is_the_average(nets: Any):
    strategy, plain, net, mirrored = nets
    steps(strategy, plain, mirrored, ROWS[0])
    torch.testing.assert_close(mirrored.total, plain.total, rtol=1e-12, atol=0)
    assert mirrored.calls is net.calls  # it counts, and is not averaged

    for module in (plain, mirrored):
        module.total.mul_(2)
        module.calls.fill_(5)
    steps(strategy, plain, mirrored, ROWS[1])
    plain.total += 1
    mirrored.total += 1
    steps(strategy, plain, mirrored, ROWS[2])

    torch.testing.assert_close(mirrored.state_dict(), plain.state_dict(), rtol=1e-12, atol=0)


def test_statistics_of_batch_norm_are_reset_in_all_copies(layout: str, make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    net = nn.BatchNorm1d(2).double()
    mirrored = strategy.mirror(net)
    for shards in strategy.distribute_dataset(list(ROWS)):
        strategy.run(mirrored, args=(shards,))
    net.reset_running_stats()

    fresh = nn.BatchNorm1d(2).double()
    for key, value in mirrored.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[key])
    assert all(int(copy.num_batches_tracked) == 0 for copy in mirrored.copies)  # type: ignore[call-overload]


def test_weights_changed_outside_in_place_are_changed_in_all_memories(nets: Any):
    strategy, plain, net, mirrored = nets
    steps(strategy, plain, mirrored, ROWS[0])
    for changed in (plain, net):
        with torch.no_grad():
            changed.linear.weight.clamp_(max=0.1)
            nn.init.ones_(changed.linear.bias)

    expected = plain(ROWS[1])
    outputs = [strategy.run(mirrored, args=(shards,)) for shards in strategy.distribute_dataset([ROWS[1]])]
    torch.testing.assert_close(strategy.gather(outputs[0], axis=0), expected, rtol=1e-12, atol=0)

    for changed in (plain, net):
        changed.linear.weight.data = torch.full((2, 2), 0.25, dtype=torch.double)
    expected = plain(ROWS[2])
    outputs = [strategy.run(mirrored, args=(shards,)) for shards in strategy.distribute_dataset([ROWS[2]])]
    torch.testing.assert_close(strategy.gather(outputs[0], axis=0), expected, rtol=1e-12, atol=0)


def test_a_merge_call_changes_all_copies(nets: Any):
    strategy, plain, net, mirrored = nets

    def reset(_: Any) -> None:
        net.total.fill_(3.0)
        with torch.no_grad():
            net.linear.bias.fill_(1.0)

    def step(shard: Tensor) -> Tensor:
        mirrored(shard)
        here().merge_call(reset)
        return mirrored(shard)  # type: ignore[no-any-return]

    plain(ROWS[0])
    with torch.no_grad():
        plain.total.fill_(3.0)
        plain.linear.bias.fill_(1.0)
    expected = plain(ROWS[0])
    outputs = [strategy.run(step, args=(shards,)) for shards in strategy.distribute_dataset([ROWS[0]])]

    torch.testing.assert_close(strategy.gather(outputs[0], axis=0), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(mirrored.state_dict(), plain.state_dict(), rtol=1e-12, atol=0)


def test_a_pass_outside_goes_on_with_what_all_replicas_have_counted(nets: Any):
    strategy, plain, _, mirrored = nets
    steps(strategy, plain, mirrored, ROWS[0])
    plain(ROWS[1])
    mirrored(ROWS[1])
    steps(strategy, plain, mirrored, ROWS[2])
    torch.testing.assert_close(mirrored.state_dict(), plain.state_dict(), rtol=1e-12, atol=0)


def test_what_replicas_change_themselves_stays_each_one_s_own(nets: Any):
    strategy, _, net, mirrored = nets

    def step() -> None:
        if here().replica_id_in_sync_group == 0:
            mirrored.total.fill_(3.0)
        raise_later()

    def raise_later() -> None:
        if fails:
            raise ValueError("the step failed")

    fails = True
    with pytest.raises(ValueError, match="failed"):
        strategy.run(step)
    fails = False
    strategy.run(step)
    strategy.run(lambda: None)

    assert [each.total.tolist() for each in mirrored.copies] == [[3, 3], [0, 0], [0, 0]]
    assert mirrored.state_dict()["total"].tolist() == [1, 1]
    assert net.total.tolist() == [3, 3]


def test_what_is_written_into_all_copies_stays_as_it_was_written(nets: Any):
    strategy, _, _, mirrored = nets
    with torch.no_grad():
        for number, each in enumerate(mirrored.copies):
            each.total.fill_(float(number))
    strategy.run(lambda: None)
    assert [each.total.tolist() for each in mirrored.copies] == [[0, 0], [1, 1], [2, 2]]


def test_a_part_that_was_replaced_is_looked_at_from_then_on(make_strategy: MakeStrategy):
    mirrored = make_strategy(2).mirror(nn.Sequential(nn.BatchNorm1d(2)))
    mirrored[0] = nn.BatchNorm1d(2)
    mirrored.copy_follower.bring_changes()
    copies: Any = mirrored.copies
    copies[0][0].running_mean.fill_(4.0)
    mirrored.copy_follower.bring_changes()
    assert copies[1][0].running_mean.tolist() == [4, 4]
