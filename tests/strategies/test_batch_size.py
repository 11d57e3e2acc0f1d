"""find_batch_size on the CPU: real allocations inside an explicit budget, real conditions, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import lockstep as ls
from lockstep.errors import ConfigError, DataError, DeviceMemoryError, UsageError
from lockstep.strategies.base import DefaultStrategy

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

MB = 2**20


def make_batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 3, 4, 4), torch.zeros(rows, dtype=torch.int64)


def rows_of(shard: tuple[Tensor, Tensor]) -> int:
    return len(shard[0])


def together() -> None:
    """What the replicas hold here, they hold at the same time."""
    context = ls.get_replica_context()
    assert context is not None
    context.all_reduce("sum", 1.0)


def full_above(most: int, *, replica: int | None = None, seen: list[int] | None = None) -> Callable[[Any], None]:
    """A step that runs out of memory where a shard, or that of one replica, has more than ``most`` rows."""

    def step(shard: tuple[Tensor, Tensor]) -> None:
        context = ls.get_replica_context()
        assert context is not None
        if seen is not None:
            seen.append(rows_of(shard))
        if rows_of(shard) > most and replica in (None, context.replica_id_in_sync_group):
            raise torch.OutOfMemoryError(f"no room for {rows_of(shard)} rows")
        together()

    return step


@pytest.mark.parametrize(
    ("replica", "start", "multiple_of"), [(None, 8, None), (0, 4096, None), (1, 8, None), (0, 7, 1)]
)
def test_one_replica_that_runs_out_of_memory_decides_for_all(
    replica: int | None, start: int, multiple_of: int | None, make_strategy: MakeStrategy
):
    found = make_strategy(2).find_batch_size(
        full_above(100, replica=replica), make_batch, start, multiple_of=multiple_of, limit=10**4
    )

    assert found == 200


def test_rows_that_do_not_divide_are_with_the_first_replicas(make_strategy: MakeStrategy):
    """201 rows are 101 and 100: the second replica, whose limit is 100, can hold its part of them."""
    step = full_above(100, replica=1)

    assert make_strategy(2).find_batch_size(step, make_batch, 180, limit=10**4, multiple_of=1) == 201


def test_it_is_the_same_again(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    runs = []
    for _ in range(2):
        seen: list[int] = []
        found = strategy.find_batch_size(full_above(57, seen=seen), make_batch, 10, limit=400)
        runs.append((found, sorted(seen)))

    assert runs[0] == runs[1]
    assert runs[0][0] == 171


def test_the_limit_is_the_largest_tried(make_strategy: MakeStrategy):
    seen: list[int] = []

    assert make_strategy(2).find_batch_size(full_above(10**6, seen=seen), make_batch, 8, limit=51) == 50
    assert max(seen) == 25
    assert seen.count(25) == 2 * 2  # two steps in each of two replicas: the second has the optimizer's state beside it


@pytest.mark.parametrize(
    "error", [RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"), MemoryError()]
)
def test_the_cpu_s_own_ways_to_be_out_of_memory_count(error: Exception, make_strategy: MakeStrategy):
    def step(shard: tuple[Tensor, Tensor]) -> None:
        if rows_of(shard) > 20:
            raise error

    assert make_strategy(2).find_batch_size(step, make_batch, 8, limit=512) == 40


def test_an_allocation_that_no_machine_can_make_counts(make_strategy: MakeStrategy):
    def step(shard: tuple[Tensor, Tensor]) -> None:
        if rows_of(shard) > 20:
            torch.empty(2**60, dtype=torch.uint8)

    assert make_strategy(2).find_batch_size(step, make_batch, 8, limit=512) == 40


def test_where_nothing_fits_the_error_says_what_was_in_the_way(make_strategy: MakeStrategy):
    with pytest.raises(
        DeviceMemoryError,
        match=r"a global batch of 2, the smallest to try, does not fit MirroredStrategy\(\[cpu:0, cpu:1\]\): "
        r"a batch of 2 ended in no room for 1 rows raised in replica \d \(cpu:\d\); use shorter or smaller examples",
    ):
        make_strategy(2).find_batch_size(full_above(0), make_batch, 64)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.classes = nn.Linear(32, 5)

    def forward(self, pictures: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.features(pictures).flatten(1))
        return logits


class Training:
    """A network, an optimizer and a variable in training, and everything about them that can be compared."""

    def __init__(self, strategy: MirroredStrategy) -> None:
        torch.manual_seed(0)
        self.strategy = strategy
        self.network = Network()
        self.model = strategy.mirror(self.network)
        self.optimizer = strategy.mirror(torch.optim.Adam(self.network.parameters(), 1e-2))
        self.steps = strategy.variable(0.0)

    def step(self, shard: tuple[Tensor, Tensor]) -> Tensor:
        x, y = shard
        x = x + torch.rand_like(x)
        loss = ls.compute_average_loss(F.cross_entropy(self.model(x), y, reduction="none"))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.assign_add(1.0)
        return loss.detach()

    def train(self, steps: int) -> None:
        for shards in self.strategy.distribute_dataset([make_batch(8)] * steps):
            self.strategy.run(self.step, (shards,))

    def everything(self) -> list[Any]:
        return copy.deepcopy(
            [
                [list(each.named_parameters()) for each in self.model.copies],
                [list(each.named_buffers()) for each in self.model.copies],
                [[parameter.grad for parameter in each.parameters()] for each in self.model.copies],
                [part.training for part in self.model.modules()],
                sorted(self.optimizer.state_dict()["state"].items()),  # made by the replicas, in any order
                self.optimizer.state_dict()["param_groups"],
                self.steps.values,
                torch.get_rng_state(),
                random.getstate(),
            ]
        )


def assert_same(after: Any, before: Any) -> None:
    for ours, theirs in zip(tree_leaves(after), tree_leaves(before), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


def noisy_batch(rows: int) -> tuple[Tensor, Tensor]:
    random.random()
    return torch.randn(rows, 3, 4, 4), torch.randint(5, (rows,))


@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "in training"])
@pytest.mark.parametrize("weights", ["shared", "own"])
def test_everything_is_as_before_to_the_last_bit(
    trained: int, weights: str, make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
):
    if weights == "own":  # as on as many real devices
        for user in ("mirroring.registry", "mirroring.module.module"):
            monkeypatch.setattr(f"lockstep.{user}.storage_groups", lambda devices: ((0,), (1,))[: len(devices)])
    training, undisturbed = Training(make_strategy(2)), Training(make_strategy(2))
    training.train(trained)
    undisturbed.train(trained)
    before = training.everything()

    found = training.strategy.find_batch_size(training.step, noisy_batch, 16, limit=64)

    assert found == 64
    assert_same(training.everything(), before)
    training.train(2)  # dropout's next masks and the optimizer's next update, too
    undisturbed.train(2)
    assert_same(training.everything()[:-2], undisturbed.everything()[:-2])


def test_gradients_that_wait_for_an_update_are_still_there(make_strategy: MakeStrategy):
    training = Training(make_strategy(2))
    for replica, duplicate in enumerate(training.model.copies):
        for parameter in duplicate.parameters():
            parameter.grad = torch.full_like(parameter, replica + 1.0)
    before = training.everything()

    training.strategy.find_batch_size(training.step, noisy_batch, 8, limit=16)

    assert_same(training.everything(), before)


def test_another_error_passes_unchanged_with_everything_put_back(make_strategy: MakeStrategy):
    training = Training(make_strategy(2))
    training.train(1)
    before = training.everything()
    mistake = RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    def step(shard: tuple[Tensor, Tensor]) -> None:
        training.step(shard)
        if rows_of(shard) > 8:
            raise mistake

    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        training.strategy.find_batch_size(step, noisy_batch, 8, limit=64)

    assert raised.value is mistake
    assert_same(training.everything(), before)


def test_an_update_cut_short_by_a_lack_of_memory_is_put_back(make_strategy: MakeStrategy):
    training = Training(make_strategy(2))
    training.train(1)
    before = training.everything()

    def step(shard: tuple[Tensor, Tensor]) -> None:
        loss = training.step(shard)
        context = ls.get_replica_context()
        if rows_of(shard) > 8 and context is not None and context.replica_id_in_sync_group == 1:
            training.model(shard[0]).sum().backward()  # leaves gradients
            raise torch.OutOfMemoryError(f"no room after a loss of {loss}")

    assert training.strategy.find_batch_size(step, noisy_batch, 8, limit=64) == 16
    assert_same(training.everything(), before)


def test_no_batch_activation_or_result_stays_referenced(make_strategy: MakeStrategy):
    held: list[weakref.ref[Tensor]] = []

    def remembered(tensor: Tensor) -> Tensor:
        held.append(weakref.ref(tensor))
        return tensor

    def step(shard: tuple[Tensor, Tensor]) -> Tensor:
        activation = remembered(shard[0] + 1)
        together()
        if len(activation) > 8:
            raise torch.OutOfMemoryError("no room")
        return remembered(activation * 2)

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        assert [reference for reference in held if reference() is not None] == []  # nor from one size to the next
        x, y = make_batch(rows)
        return remembered(x), y

    strategy = make_strategy(2)
    assert strategy.find_batch_size(step, batch, 8, limit=64) == 16

    gc.collect()
    assert len(held) > 10
    assert [reference for reference in held if reference() is not None] == []
    assert float(strategy.reduce("sum", strategy.run(lambda: torch.ones(())))) == 2  # and it runs on


def test_the_default_strategy_searches_too():
    strategy = DefaultStrategy()
    torch.manual_seed(3)
    before = torch.get_rng_state()

    def step(shard: tuple[Tensor, Tensor]) -> None:
        torch.rand(3)
        if rows_of(shard) > 100:
            raise torch.OutOfMemoryError("no room")

    assert strategy.find_batch_size(step, make_batch, 8, limit=512) == 100
    assert torch.equal(torch.get_rng_state(), before)


def test_inside_a_replica_it_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    with pytest.raises(UsageError, match="find_batch_size is for all replicas together and was called inside one"):
        strategy.run(lambda: strategy.find_batch_size(full_above(1), make_batch, 8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": 0}, "start=0 is no number of examples"),
        ({"start": 8, "limit": 1}, "limit=1 is below multiple_of=2"),
        ({"start": 8, "memory_mb": 1}, r"memory_mb=1 leaves nothing for a step: the process has \d+ MB resident"),
    ],
)
def test_numbers_that_cannot_be_are_refused(settings: dict[str, Any], message: str, make_strategy: MakeStrategy):
    with pytest.raises(ConfigError, match=message):
        make_strategy(2).find_batch_size(full_above(1), make_batch, **settings)


def test_a_batch_of_another_size_than_asked_for_is_refused(make_strategy: MakeStrategy):
    with pytest.raises(
        DataError, match=r"make_batch\(64\) gave 50 rows, expected 64; give as many as asked for, or lim"
    ):
        make_strategy(2).find_batch_size(full_above(10**6), lambda rows: make_batch(min(rows, 50)), 32)


def test_the_step_that_follows_is_issued_as_if_there_had_been_no_trials(make_strategy: MakeStrategy):
    """How replicas are issued is measured; short trial steps must not decide it for the step of the training."""
    strategy = make_strategy(2)
    step = full_above(10**6)
    strategy.find_batch_size(step, make_batch, 2, limit=2**12)

    (policy,) = strategy._runner._policies.values()
    assert len(policy._trials) == 0
