"""Fingerprints: one bit changes them, and what is no state of the training does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import Tensor, nn

import lockstep as ls
from lockstep.checkpoint.fingerprint import element_sum
from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.strategies.mirrored import MirroredStrategy


@dataclass
class Training:
    """A custom loop on two replicas, after two steps with dropout and a batch norm."""

    strategy: MirroredStrategy
    net: MirroredModule
    optimizer: MirroredOptimizer

    def step(self) -> None:
        def step(x: Tensor) -> None:
            losses = self.net(x).square().mean(1)
            ls.compute_average_loss(losses, global_batch_size=8).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        random = torch.Generator().manual_seed(1)
        for batch in self.strategy.distribute_dataset([torch.randn(8, 3, generator=random)]):
            self.strategy.run(step, (batch,))

    def fingerprint(self) -> str:
        return ls.fingerprint(self.net, self.optimizer)


def begin(strategy: MirroredStrategy, **settings: Any) -> Training:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 4, 2, padding=1), nn.BatchNorm2d(4), nn.Dropout())
    net.append(nn.Flatten())
    replicated = strategy.mirror(net, memory_format="preserve")
    training = Training(strategy, replicated, strategy.mirror(torch.optim.Adam(net.parameters(), 0.01, **settings)))
    for _ in range(2):
        training.step()
    return training


@pytest.fixture
def training(make_strategy: MakeStrategy) -> Training:
    return begin(make_strategy(2))


def flip_bit(tensor: Tensor, index: int = 0) -> None:
    """Changes the lowest bit of one element, and again back."""
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[index] ^= 1


def test_it_is_16_hex_digits_that_reading_does_not_change(training: Training):
    found = training.fingerprint()
    assert len(found) == 16
    assert int(found, 16) >= 0
    assert training.fingerprint() == found


def test_one_bit_of_a_weight_a_buffer_of_any_replica_a_moment_or_a_generator_changes_it(training: Training):
    first, second = training.net.copies
    moments = training.optimizer.state[training.net.module[1].weight]
    places = [first[1].weight.detach(), first[2].running_mean, second[2].running_mean, moments["exp_avg"]]
    seen = [training.fingerprint()]
    for tensor in places:
        flip_bit(tensor)
        seen.append(training.fingerprint())
        flip_bit(tensor)
    training.strategy.run(lambda: torch.rand(1) if ls.get_replica_context().replica_id_in_sync_group == 1 else None)
    seen.append(training.fingerprint())

    assert len(set(seen)) == len(places) + 2


def test_a_setting_of_the_optimizer_changes_it_and_the_choice_of_its_kernels_does_not(make_strategy: MakeStrategy):
    plain, other = begin(make_strategy(2)), begin(make_strategy(2), foreach=False)
    before = plain.fingerprint()
    plain.optimizer.param_groups[0]["lr"] = 0.02
    assert other.fingerprint() == before
    assert plain.fingerprint() != before


def test_strides_and_names_of_devices_do_not_change_it(split_cpu: Callable[[int], Any], training: Training):
    devices = split_cpu(4)
    with closing(MirroredStrategy([devices[3], devices[1]], seed=0)) as strategy:
        elsewhere = begin(strategy).fingerprint()
    before = training.fingerprint()
    for copy in training.net.copies:
        copy.to(memory_format=torch.channels_last)
    assert elsewhere == before
    assert training.fingerprint() == before


def test_given_replicas_have_the_same_after_a_move_to_other_devices(
    split_cpu: Callable[[int], Any], one_core: None, tmp_path: Path
):
    devices = split_cpu(3)
    with closing(MirroredStrategy(devices, replicas=3, seed=0)) as strategy:
        saved = begin(strategy)
        ls.CheckpointManager(ls.Checkpoint(net=saved.net, optimizer=saved.optimizer), tmp_path).save(2)
        expected = [saved.fingerprint()]
        saved.step()
        expected.append(saved.fingerprint())
    with closing(MirroredStrategy(devices[:1], replicas=3, seed=0)) as strategy:
        moved = begin(strategy)
        moved.step()
        ls.Checkpoint(net=moved.net, optimizer=moved.optimizer).restore(tmp_path)
        found = [moved.fingerprint()]
        moved.step()
        found.append(moved.fingerprint())

    assert found == expected


def test_signs_of_zeros_and_kinds_of_nan_are_bits_too(training: Training):
    weight, seen = training.net.module[1].weight, []
    for bits in (0, -(2**31), 0x7FC00000, 0x7FC00001):
        with torch.no_grad():
            weight.view(-1).view(torch.int32)[0] = bits
        seen.append(training.fingerprint())
    assert len(set(seen)) == 4


def test_a_plain_loop_has_one_too():
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    seen = [ls.fingerprint(net, optimizer, scheduler)]
    assert ls.fingerprint(net, optimizer, scheduler) == seen[0]

    torch.rand(1)  # without replicas the random numbers are torch's own
    seen.append(ls.fingerprint(net, optimizer, scheduler))
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    seen.append(ls.fingerprint(net, optimizer, scheduler))
    scheduler.step()
    seen.append(ls.fingerprint(net, optimizer, scheduler))

    assert len(set(seen)) == 4


def test_the_order_of_a_dict_does_not_change_it():
    assert ls.fingerprint({"a": 1, 2: 2.5, "c": [None]}) == ls.fingerprint({"c": [None], 2: 2.5, "a": 1})
    assert ls.fingerprint({"a": 1}) != ls.fingerprint({"a": 1.0})
    assert ls.fingerprint({"a": 0.0}) != ls.fingerprint({"a": -0.0})


def test_what_has_no_state_is_refused_by_name(training: Training):
    with pytest.raises(ConfigError, match="nothing"):
        ls.fingerprint()
    with pytest.raises(ConfigError, match="3"):
        ls.fingerprint(3)
    with pytest.raises(ConfigError, match="Model, Linear"):
        ls.fingerprint(ls.Model(nn.Linear(1, 1)), nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="object"):
        ls.fingerprint({"what": object()})
    with pytest.raises(UsageError, match="fingerprint"):
        training.strategy.run(lambda: ls.fingerprint(training.net))


# ---- the sum over elements

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.complex64]


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)


def whole_sum(tensor: Tensor) -> int:
    return element_sum(tensor, (0,) * tensor.ndim, tuple(tensor.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sums_of_boxes_add_up_to_that_of_the_tensor(dtype: torch.dtype, axis: int):
    tensor = some(dtype, 7, 5, 9)
    total = 0
    for begin, end in pairwise([0, 2, 3, tensor.shape[axis]]):
        box = tensor.narrow(axis, begin, end - begin)
        total += element_sum(box, tuple(begin if each == axis else 0 for each in range(3)), tuple(tensor.shape))
    assert total % 2**64 == whole_sum(tensor)


def test_a_tensor_that_is_looked_at_in_several_steps_has_the_same_sum(monkeypatch: pytest.MonkeyPatch):
    tensor = some(torch.float32, 300, 11)
    sums = [whole_sum(tensor), element_sum(tensor[:, 4:], (0, 4), (300, 11))]
    monkeypatch.setattr("lockstep.checkpoint.fingerprint._AT_ONCE", {"cpu": 64})
    assert [whole_sum(tensor), element_sum(tensor[:, 4:], (0, 4), (300, 11))] == sums


def test_elements_that_change_places_change_the_sum():
    tensor = some(torch.float32, 40)
    swapped = tensor.clone()
    swapped[[3, 30]] = tensor[[30, 3]]
    assert whole_sum(swapped) != whole_sum(tensor)
    assert whole_sum(torch.tensor(1.5)) != whole_sum(torch.tensor(2.5))
    assert whole_sum(torch.empty(0, 3)) == 0


def test_single_bits_change_about_half_of_the_bits_of_a_sum():
    tensor = some(torch.float32, 64)
    before, counts = whole_sum(tensor), []
    for bit in range(32):
        other = tensor.clone()
        other.view(torch.int32)[17] ^= -(2**31) if bit == 31 else 1 << bit
        counts.append(((whole_sum(other) - before) % 2**64).bit_count())
    assert 24 < sum(counts) / len(counts) < 40
