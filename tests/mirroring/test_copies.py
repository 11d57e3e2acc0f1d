from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import nn

from lockstep.config import LogicalDevice, PhysicalDevice
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.module.copies import Copying, storage_groups, uses_channels_last

CPU = torch.device("cpu")


def copy_module(module: nn.Module, device: torch.device, *, alias: bool) -> nn.Module:
    duplicate: nn.Module = Copying(CPU, device, alias=alias).of(module, type(module).__name__)
    return duplicate


def device(name: str, physical: str, memory_limit: int | None = None) -> LogicalDevice:
    of = PhysicalDevice(name=physical, kind="GPU", memory=None, torch_device=CPU)
    return LogicalDevice(name=name, kind="GPU", physical=of, memory_limit=memory_limit, torch_device=CPU)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([device("cpu:0", "cpu:0"), device("cpu:1", "cpu:0")], ((0, 1),)),
        ([device("gpu:0", "gpu:0"), device("gpu:1", "gpu:1")], ((0,), (1,))),
        ([device("gpu:0", "gpu:0", 512), device("gpu:1", "gpu:0", 512)], ((0,), (1,))),
        ([device("a", "gpu:0"), device("b", "gpu:1"), device("c", "gpu:0")], ((0, 2), (1,))),
    ],
)
def test_replicas_of_one_device_share_unless_their_memory_is_limited(
    devices: list[LogicalDevice], expected: tuple[tuple[int, ...], ...]
):
    assert storage_groups(devices) == expected


@pytest.mark.parametrize("alias", [True, False])
def test_a_copy_shares_or_owns_its_weights_and_always_owns_buffers_and_gradients(alias: bool):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    duplicate = copy_module(module, CPU, alias=alias)
    module(torch.randn(4, 2)).sum().backward()

    for mine, other in zip(module.parameters(), duplicate.parameters(), strict=True):
        assert mine is not other
        assert (mine.data_ptr() == other.data_ptr()) == alias
        assert other.grad is None
    for mine_buffer, other_buffer in zip(module.buffers(), duplicate.buffers(), strict=True):
        assert mine_buffer.data_ptr() != other_buffer.data_ptr()


@pytest.mark.parametrize("alias", [True, False])
def test_tied_weights_stay_tied(alias: bool):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    duplicate = copy_module(module, CPU, alias=alias)
    assert duplicate[0].weight is duplicate[1].weight  # type: ignore[index]
    assert len(list(duplicate.parameters())) == 3


def test_a_module_that_cannot_be_copied_says_so(make_strategy: MakeStrategy):
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"Linear cannot be copied for every replica .*copy\.deepcopy can copy"):
        make_strategy(2).mirror(module)


def test_a_lazy_module_says_what_to_do(make_strategy: MakeStrategy):
    with pytest.raises(UsageError, match="lazy parameters without a shape; call it once on a batch before mirroring"):
        make_strategy(2).mirror(nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("module", "expected"),
    [(nn.Conv2d(1, 1, 1), True), (nn.Sequential(nn.ConvTranspose2d(1, 1, 1)), True), (nn.Conv1d(1, 1, 1), False)],
)
def test_channels_last_is_for_2d_convolutions(module: nn.Module, expected: bool):
    assert uses_channels_last(module) is expected


@pytest.mark.parametrize(
    ("memory_format", "expected"),
    [("auto", True), (torch.channels_last, True), ("preserve", False), (torch.contiguous_format, False)],
)
def test_the_memory_format_of_all_copies(
    memory_format: torch.memory_format, expected: bool, make_strategy: MakeStrategy
):
    mirrored = make_strategy(2).mirror(nn.Conv2d(3, 4, 3), memory_format=memory_format)
    for duplicate in mirrored.copies:
        weight = next(duplicate.parameters())
        assert weight.is_contiguous(memory_format=torch.channels_last) is expected


def test_an_unknown_memory_format_lists_the_known(make_strategy: MakeStrategy):
    with pytest.raises(ConfigError, match='memory_format=\'best\' is unknown; choose "auto", "preserve"'):
        make_strategy(2).mirror(nn.Conv2d(3, 4, 3), memory_format="best")  # type: ignore[call-overload]


def test_channels_last_gives_the_numbers_of_the_default_format(make_strategy: MakeStrategy):
    images = torch.randn(8, 3, 10, 10, dtype=torch.float64)
    strategy = make_strategy(2)
    outputs, gradients = [], []
    for memory_format in ("auto", "preserve"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
        mirrored = strategy.mirror(module, memory_format=memory_format)
        optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))

        def step(x: torch.Tensor, mirrored: nn.Module = mirrored, optimizer: torch.optim.Optimizer = optimizer):
            loss = mirrored(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for (batch,) in strategy.distribute_dataset([(images,), (images[:5],)]):
            outputs.append(strategy.reduce("sum", strategy.run(step, (batch,))))
        gradients.append([parameter.grad for parameter in module.parameters()])

    torch.testing.assert_close(outputs[:2], outputs[2:])
    torch.testing.assert_close(*gradients)


def test_a_frozen_or_tagged_parameter_stays_so():
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    module.weight.tag = "kept"  # type: ignore[attr-defined]
    duplicate = copy_module(module, replace(device("gpu:1", "gpu:0")).torch_device, alias=True)
    assert not duplicate.weight.requires_grad
    assert duplicate.weight.tag == "kept"  # type: ignore[union-attr]


class _Coded(nn.Parameter):
    """A weight of a kind of its own, as bitsandbytes' are: int8 numbers, and beside them what they mean."""

    scale: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor, scale: torch.Tensor) -> _Coded:
        made: _Coded = torch.Tensor._make_subclass(cls, numbers, False)
        made.scale = scale
        return made

    def __deepcopy__(self, memo: object) -> _Coded:
        return _Coded.of(self.data.clone(), self.scale.clone())

    def to(self, *args: object, **kwargs: object) -> _Coded:  # type: ignore[override]
        return _Coded.of(self.data.to(*args, **kwargs), self.scale)  # type: ignore[call-overload]


@pytest.mark.parametrize("alias", [True, False])
def test_a_quantised_weight_keeps_its_class_and_what_it_means(alias: bool):
    module = nn.Linear(2, 2)
    module.weight = _Coded.of(torch.ones(2, 2, dtype=torch.int8), torch.tensor(0.5))
    duplicate = copy_module(module, CPU, alias=alias)

    mine, other = module.weight, duplicate.weight
    assert isinstance(other, _Coded)
    assert other is not mine
    assert torch.equal(other, mine)
    assert (other.data_ptr() == mine.data_ptr()) is alias
    assert other.scale == mine.scale
    assert (other.scale.data_ptr() == mine.scale.data_ptr()) is alias


def test_a_quantised_weight_that_is_packed_anew_is_left_to_its_copy(make_strategy: MakeStrategy):
    module = nn.Linear(2, 2)
    module.weight = _Coded.of(torch.ones(2, 2, dtype=torch.int8), torch.tensor(0.5))
    mirrored = make_strategy(2).mirror(module)
    module.weight.data = module.weight.data * 3
    mirrored.align()
    assert [int(own.weight[0, 0]) for own in mirrored.copies] == [3, 1]
