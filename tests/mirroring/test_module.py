from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.strategies.mirrored import MirroredStrategy


def replica() -> int:
    return here().replica_id_in_sync_group


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def mirrored_net(strategy: MirroredStrategy) -> MirroredModule:
    """Trained one step, so that each replica has batch-norm statistics of its own."""
    mirrored = strategy.mirror(net())
    random = torch.Generator().manual_seed(1)
    shards = [torch.randn(4, 3, generator=random) + 10 * n for n in range(strategy.num_replicas_in_sync)]
    strategy.run(mirrored, (PerReplica(shards),))
    return mirrored


def test_inside_a_replica_everything_is_that_replica_s(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = mirrored_net(strategy)

    def step() -> None:
        mine = mirrored.copies[replica()]
        assert [*map(id, mirrored.parameters())] == [*map(id, mine.parameters())]
        assert [*map(id, mirrored.buffers())] == [*map(id, mine.buffers())]
        assert [*map(id, mirrored.modules())] == [*map(id, mine.modules())]
        assert mirrored.get_submodule("1") is mine.get_submodule("1")
        assert mirrored.state_dict().keys() == mine.state_dict().keys()

    strategy.run(step)


def test_outside_it_is_the_user_s_own_module(make_strategy: MakeStrategy):
    module = net()
    module.note = "mine"  # type: ignore[assignment]
    mirrored = make_strategy(3).mirror(module)

    assert mirrored.module is module is mirrored.copies[0]
    assert [*map(id, mirrored.parameters())] == [*map(id, module.parameters())]
    assert mirrored.note == "mine"
    x = torch.ones(2, 3)
    mirrored.eval()
    assert torch.equal(mirrored(x), module(x))
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = mirrored.absent


def test_mirroring_twice_gives_the_same(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(net())
    assert strategy.mirror(mirrored.module) is mirrored
    assert strategy.mirror(mirrored) is mirrored
    with pytest.raises(UsageError, match="mirrored by another strategy; mirror the plain module"):
        make_strategy(2).mirror(mirrored)


def test_another_strategy_cannot_run_it(make_strategy: MakeStrategy):
    mirrored = make_strategy(2).mirror(net())
    with pytest.raises(UsageError, match="mirrored by another strategy than the one that runs this replica"):
        make_strategy(2).run(mirrored, (torch.ones(2, 3),))


def test_neither_module_nor_optimizer(make_strategy: MakeStrategy):
    with pytest.raises(TypeError, match=r"mirror takes a torch.nn.Module or a torch.optim.Optimizer, got list"):
        make_strategy(2).mirror([])  # type: ignore[call-overload]


def test_names_are_the_plain_module_s(make_strategy: MakeStrategy):
    plain, mirrored = net(), make_strategy(3).mirror(net())
    assert [*mirrored.state_dict()] == [*plain.state_dict()]
    assert [name for name, _ in mirrored.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in mirrored.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert [name for name, _ in mirrored.named_children()] == [name for name, _ in plain.named_children()]


def test_buffers_are_per_replica_and_averaged_when_read_outside(make_strategy: MakeStrategy):
    mirrored = mirrored_net(make_strategy(3))
    means = [duplicate.get_buffer("1.running_mean") for duplicate in mirrored.copies]
    average = torch.stack(means).mean(0)

    assert not torch.equal(means[0], means[1])
    torch.testing.assert_close(mirrored.state_dict()["1.running_mean"], average)
    torch.testing.assert_close(dict(mirrored.named_buffers())["1.running_mean"], average)
    assert int(mirrored.state_dict()["1.num_batches_tracked"]) == 1
    assert not torch.equal(mirrored.copies[0].get_buffer("1.running_mean"), average)  # reading changed nothing

    mirrored.sync_buffers()
    for duplicate in mirrored.copies:
        torch.testing.assert_close(duplicate.get_buffer("1.running_mean"), average)


def test_going_to_evaluation_averages_so_that_replicas_agree(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = mirrored_net(strategy)
    mirrored.eval()
    outputs = strategy.run(mirrored, (torch.ones(2, 3),))
    assert not any(duplicate.training for duplicate in mirrored.copies)
    assert all(torch.equal(outputs[0], output) for output in outputs)


def test_a_saved_state_loads_everywhere(layout: str, make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    trained, fresh = mirrored_net(strategy), strategy.mirror(net())
    with torch.no_grad():
        trained.module[0].weight.fill_(7.0)  # type: ignore[index]
    saved = copy.deepcopy(trained.state_dict())

    result = fresh.load_state_dict(saved)

    assert result.missing_keys == result.unexpected_keys == []
    for duplicate in fresh.copies:
        torch.testing.assert_close(duplicate.state_dict(), saved)
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict({})
    with pytest.raises(UsageError, match="assign=True"):
        fresh.load_state_dict(saved, assign=True)


def test_mode_and_freezing_of_the_user_s_module_reach_all_copies(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = strategy.mirror(net())
    mirrored.module.eval()
    mirrored.module[0].requires_grad_(False)  # type: ignore[index]
    seen: list[Any] = []

    def step() -> None:
        here = mirrored.copies[replica()]
        mirrored(torch.ones(4, 3)).sum().backward()
        gradients = [parameter.grad is None for parameter in mirrored.parameters()]
        seen.append(([part.training for part in here.modules()], gradients))

    strategy.run(step)
    assert seen == [([False] * 5, [True, True, False, False, False, False])] * 3
    mirrored.train()
    mirrored.requires_grad_(True)
    mirrored.zero_grad()
    seen.clear()
    strategy.run(step)
    assert seen == [([True] * 5, [False] * 6)] * 3


def test_train_inside_a_replica_is_that_replica_s(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = strategy.mirror(net())
    strategy.run(lambda: mirrored.train(replica() != 1))
    assert [duplicate.training for duplicate in mirrored.copies] == [True, False, True]


def test_apply_and_zero_grad_outside_reach_all(layout: str, make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = strategy.mirror(nn.Linear(2, 1))
    strategy.run(lambda: mirrored(torch.ones(1, 2)).sum().backward())
    with mirrored.no_sync():
        strategy.run(lambda: mirrored(torch.ones(1, 2)).sum().backward())
    assert mirrored.weight.grad.tolist() == [[4, 4]]  # three of the first run, one of its own of the second
    mirrored.zero_grad()
    assert all(duplicate.weight.grad is None for duplicate in mirrored.copies)

    def fill(module: nn.Module) -> None:
        nn.init.constant_(module.get_parameter("weight"), 3.0)

    mirrored.apply(fill)
    assert all(bool((duplicate.get_parameter("weight") == 3.0).all()) for duplicate in mirrored.copies)


@pytest.mark.parametrize("method", ["sync_buffers", "load_state_dict", "apply"])
def test_what_reaches_all_replicas_is_for_outside(method: str, make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(net())
    arguments = {"load_state_dict": (mirrored.state_dict(),), "apply": (print,)}.get(method, ())
    with pytest.raises(UsageError, match=f"{method} .*outside strategy.run"):
        strategy.run(lambda: getattr(mirrored, method)(*arguments))


def test_conversions_and_copies_are_refused(make_strategy: MakeStrategy):
    mirrored = make_strategy(2).mirror(net())
    for convert in (mirrored.half, mirrored.cpu, lambda: mirrored.to(torch.float64)):
        with pytest.raises(UsageError, match="convert the module before mirroring it"):
            convert()
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"mirrored.module"):
            duplicate(mirrored)


def test_converting_to_what_it_is_already_does_nothing(make_strategy: MakeStrategy):
    mirrored = make_strategy(2).mirror(net())
    dtype = next(mirrored.parameters()).dtype
    assert mirrored.to("cpu") is mirrored.to(dtype) is mirrored.to(device="cpu", dtype=dtype) is mirrored


def test_collected_modules_are_forgotten(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored: Tensor | MirroredModule | None = strategy.mirror(net())
    assert len(strategy.mirrored_modules) == 1
    mirrored = None
    assert mirrored is None
    assert len(strategy.mirrored_modules) == 0


def test_weights_that_the_user_exchanges_reach_every_replica_of_the_device(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    module = nn.Linear(3, 1)
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.5))

    def step(x: Tensor) -> Tensor:
        loss = mirrored(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    strategy.run(step, (torch.ones(1, 3),))
    module.weight.data, module.bias.data = torch.zeros(1, 3), torch.zeros(1)
    losses = [strategy.run(step, (torch.ones(1, 3),)) for _ in range(2)]

    assert [[float(loss) for loss in pair] for pair in losses] == [[0.0, 0.0], [-4.0, -4.0]]
    assert torch.equal(module.weight, torch.full((1, 3), -2.0))


def test_it_has_items_as_the_plain_module_has(make_strategy: MakeStrategy):
    strategy, plain = make_strategy(3), net()
    mirrored = strategy.mirror(plain)

    assert len(mirrored) == 4
    assert mirrored[0] is plain[0]
    assert mirrored[-1] is plain[3]
    assert [*mirrored] == [*plain]
    assert [*mirrored[1:3]] == [*plain[1:3]]
    assert plain[2] in [*mirrored]
    plain.note = "mine"  # type: ignore[assignment]
    assert "note" in dir(mirrored)
    seen = strategy.local_results(strategy.run(lambda: (mirrored[3] is mirrored.copies[replica()][3], len(mirrored))))  # type: ignore[index]
    assert seen == ((True, 4),) * 3
    named = strategy.mirror(nn.ModuleDict({"a": nn.Linear(1, 1)}))
    assert "a" in named
    assert "b" not in named
    assert [*named] == ["a"]
    assert named["a"] is named.module["a"]  # type: ignore[index]


def test_without_items_it_says_so_as_the_plain_module_does(make_strategy: MakeStrategy):
    mirrored = make_strategy(2).mirror(nn.Linear(1, 1))
    assert mirrored
    for wrong in (lambda: len(mirrored), lambda: mirrored[0], lambda: [*mirrored], lambda: 1 in mirrored):
        with pytest.raises(TypeError, match="Linear"):
            wrong()


def test_items_may_be_set(make_strategy: MakeStrategy):
    strategy, plain = make_strategy(2), net()
    mirrored = strategy.mirror(plain)
    mirrored[2] = nn.Identity()
    del mirrored[1]
    assert [type(part) for part in plain] == [nn.Linear, nn.Identity, nn.Linear]
    strategy.run(lambda: mirrored(torch.ones(2, 3)))
    assert [[type(part) for part in duplicate] for duplicate in mirrored.copies] == [[*map(type, plain)]] * 2  # type: ignore[arg-type, call-overload]


def test_torch_s_functional_call_takes_it(make_strategy: MakeStrategy):
    strategy, plain = make_strategy(3), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    mirrored = strategy.mirror(plain)
    x = torch.ones(2, 3)
    doubled = {name: value.detach() * 2 for name, value in plain.named_parameters()}
    expected = torch.func.functional_call(plain, doubled, (x,))

    def step() -> Tensor:
        own = {name: value * 2 for name, value in mirrored.named_parameters()}
        return torch.func.functional_call(mirrored, own, (x,))

    for output in (torch.func.functional_call(mirrored, doubled, (x,)), *strategy.local_results(strategy.run(step))):
        torch.testing.assert_close(output, expected)
    single = strategy.mirror(nn.Linear(3, 1))
    weights = {name: torch.zeros_like(value) for name, value in single.named_parameters()}
    assert torch.func.functional_call(single, weights, (x,)).eq(0).all()
    assert not single.weight.eq(0).any()


class Compared(nn.Linear):
    """Is compared by elements, as torchrl's modules that hold a TensorDict are, or not at all."""

    def __init__(self, answer: torch.Tensor | None) -> None:
        super().__init__(2, 2)
        self.answer = answer

    def __eq__(self, other: object) -> Any:
        if self.answer is None:
            raise NotImplementedError
        return self.answer

    __hash__ = nn.Module.__hash__


@pytest.mark.parametrize("answer", [None, torch.tensor([True, False]), torch.tensor(True)])
def test_a_module_whose_equality_says_something_else_is_mirrored(
    make_strategy: MakeStrategy, answer: torch.Tensor | None
):
    strategy = make_strategy(2)
    net = nn.Sequential(Compared(answer), Compared(answer))
    mirrored = strategy.mirror(net)

    def step(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = mirrored(x)
        return result

    for rows in strategy.distribute_dataset([torch.ones(4, 2)]):
        strategy.run(step, (rows,))
        net[0].bias.data = torch.ones(2)
        net[1].scale = 2.0
        outputs = strategy.run(step, (rows,))

    assert torch.equal(torch.cat(outputs.values), net(torch.ones(4, 2)))
    assert all(copy[1].scale == 2.0 for copy in mirrored.copies)
