"""A number of replicas laid on any number of devices: the same bits, which are those of a loop written by hand."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.config import LogicalDevice
from lockstep.errors import ClusterError, ConfigError
from lockstep.strategies.multi_worker import replicas_of_workers

REPLICAS = 7
BATCHES = [19, 21, 5]  # the last one leaves two replicas without rows


@pytest.fixture
def make(split_cpu: Callable[[int], tuple[LogicalDevice, ...]]) -> Iterator[Callable[..., ls.MirroredStrategy]]:
    """A function that makes a strategy on so many devices."""
    made: list[ls.MirroredStrategy] = []

    def strategy(devices: int, replicas: Any = REPLICAS) -> ls.MirroredStrategy:
        made.append(ls.MirroredStrategy(split_cpu(4)[:devices], replicas=replicas, seed=3))
        return made[-1]

    yield strategy
    for each in made:
        each.close()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for rows in BATCHES
    ]


def network(*, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    parts = [
        nn.Linear(6, 32),
        *([nn.BatchNorm1d(32)] if norm else []),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(32, 3),
    ]
    return nn.Sequential(*parts)


def bits(*states: Any) -> str:
    digest = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves(states):
        digest.update(leaf.detach().contiguous().numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())
    return digest.hexdigest()


def own_loop(strategy: ls.MirroredStrategy, module: nn.Module) -> tuple[str, list[float]]:
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.Adam(module.parameters(), 1e-2))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = ls.compute_average_loss(F.cross_entropy(mirrored(x), y, reduction="none"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [
        float(strategy.reduce("sum", strategy.run(step, (x, y)))) for x, y in strategy.distribute_dataset(batches())
    ]
    state = sorted(optimizer.state_dict()["state"].items())
    return bits(module.state_dict(), state, losses, strategy.generators.states()), losses


def by_hand(module: nn.Module) -> list[float]:
    """The same training without lockstep: a pass for each shard, and sums in pairs, level by level."""
    optimizer, losses = torch.optim.Adam(module.parameters(), 1e-2), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for x, y in batches():
        parts: list[tuple[list[Tensor], Tensor]] = []
        for rows in torch.arange(len(x)).tensor_split(REPLICAS):
            loss = F.cross_entropy(module(x[rows]), y[rows], reduction="none").sum() / len(x)
            parts.append((list(torch.autograd.grad(loss, list(module.parameters()))), loss.detach()))
        while len(parts) > 1:
            pairs = [
                ([one + other for one, other in zip(left[0], right[0], strict=True)], left[1] + right[1])
                for left, right in zip(parts[::2], parts[1::2], strict=False)
            ]
            parts = pairs + parts[2 * len(pairs) :]
        for parameter, gradient in zip(module.parameters(), parts[0][0], strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(float(parts[0][1]))
    torch.set_num_threads(threads)
    return losses


def test_the_bits_are_those_of_a_loop_by_hand(make: Callable[..., ls.MirroredStrategy]):
    expected = network()
    expected_losses = by_hand(expected)
    for devices in (1, 3):
        module = network()
        _, losses = own_loop(make(devices), module)
        assert losses == expected_losses
        assert bits(module.state_dict()) == bits(expected.state_dict())


def test_an_own_loop_has_the_same_bits_on_any_devices(make: Callable[..., ls.MirroredStrategy]):
    found = {own_loop(make(devices), network(dropout=0.3, norm=True))[0] for devices in (1, 2, 3, 4)}
    assert len(found) == 1
    assert own_loop(make(2, replicas=6), network(dropout=0.3, norm=True))[0] not in found


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_fit_has_the_same_bits_on_any_devices(make: Callable[..., ls.MirroredStrategy], options: dict[str, Any]):
    found = set()
    for devices in (1, 2, 4):
        strategy, module = make(devices), network(dropout=0.3, norm=True)
        with strategy.scope():
            model = ls.Model(module)
            model.compile(torch.optim.AdamW(module.parameters(), 1e-2), loss=nn.CrossEntropyLoss(), **options)
        history = model.fit(batches(), epochs=2, validation_data=batches(), verbose=0)
        found.add(bits(module.state_dict(), history.history, strategy.generators.states()))

    assert len(found) == 1


def test_sums_in_replicas_are_in_the_order_of_the_tree(make: Callable[..., ls.MirroredStrategy]):
    values = [torch.tensor(value) for value in (1.0, 2**-24, 2**-24, 2**-24, 2**-24, 2**-24, 2**-24)]
    v = values
    expected = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + v[6])
    assert expected != sum(values[1:], values[0])
    strategy = make(2)
    inside = strategy.run(lambda x: ls.get_replica_context().all_reduce("sum", x), (ls.PerReplica(values),))
    assert all(each == expected for each in strategy.local_results(inside))
    assert strategy.reduce("sum", ls.PerReplica(values)) == expected


def test_more_devices_than_replicas_leave_the_last_ones_idle(make: Callable[..., ls.MirroredStrategy]):
    strategy = make(3, replicas=2)
    assert [device.name for device in strategy.devices] == ["cpu:0", "cpu:1"]
    assert repr(make(2, replicas=5)) == "MirroredStrategy([cpu:0, cpu:1], 5 replicas)"


@pytest.mark.parametrize("replicas", [0, -1, True, 2.0, "8"])
def test_a_number_that_cannot_be_is_refused(make: Callable[..., ls.MirroredStrategy], replicas: Any):
    with pytest.raises(ConfigError, match=r"replicas=.*at least 1"), closing(make(1, replicas=replicas)):
        pass


def test_gradients_that_memory_cannot_hold_are_refused_before_the_first_step(
    make: Callable[..., ls.MirroredStrategy], monkeypatch: pytest.MonkeyPatch
):
    module = nn.Linear(1024, 1024)  # 4 MB of gradients for each replica
    strategy = make(2, replicas=6)
    mirrored = strategy.mirror(module)
    monkeypatch.setattr("lockstep.mirroring.registry.available_mb", lambda: 23.0)
    with pytest.raises(ConfigError, match=r"6 replicas.* 23 MB"):
        strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))


def test_threads_that_the_system_does_not_start_are_one_error_and_none_is_left(
    make: Callable[..., ls.MirroredStrategy], monkeypatch: pytest.MonkeyPatch
):
    started, start = [], threading.Thread.start

    def refuse_the_fourth(thread: threading.Thread) -> None:
        if thread.name.startswith("lockstep-replica"):
            if len(started) == 3:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_fourth)
    with pytest.raises(ConfigError, match=r"5 replicas.* 3 "):
        make(2, replicas=5)

    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize(
    ("devices", "replicas", "expected"),
    [
        ([1, 1], 4, (2, 2)),
        ([1, 1, 1], 8, (3, 3, 2)),
        ([2, 1, 1], 4, (2, 1, 1)),
        ([4], 1, (1,)),
        ([3, 1], 8, (6, 2)),
        ([7, 1, 1], 3, (1, 1, 1)),
        ([1, 1, 7], 4, (1, 1, 2)),
        ([2, 3], 0, (2, 3)),
    ],
)
def test_blocks_of_workers_follow_their_devices_and_none_is_empty(
    devices: list[int], replicas: int, expected: tuple[int, ...]
):
    found = replicas_of_workers(devices, [replicas] * len(devices))
    assert found == expected
    assert sum(found) == replicas or not replicas


def test_fewer_replicas_than_workers_and_workers_that_disagree_are_refused():
    with pytest.raises(ConfigError, match=r"replicas=2.*3 workers"):
        replicas_of_workers([1, 1, 1], [2, 2, 2])
    with pytest.raises(ClusterError, match="replicas"):
        replicas_of_workers([1, 1], [4, 0])


def test_what_is_rounded_between_workers_is_refused():
    with pytest.raises(ConfigError, match=r"replicas=4.*compression"):
        ls.MultiWorkerMirroredStrategy(replicas=4, communication=ls.CommunicationOptions(compression="bf16"))
