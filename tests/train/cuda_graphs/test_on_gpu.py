"""Real CUDA graphs of whole steps: the bits of steps that are not recorded, on one replica and on four of a GPU."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from tests.train.cuda_graphs.conftest import Net, batches, halving
from torch import Tensor, nn

import lockstep as ls
from lockstep.config import DeviceRegistry
from lockstep.replicas.device.driver import DeviceGraph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(params=[1, 4])
def replicas(request: pytest.FixtureRequest, fresh_devices: DeviceRegistry) -> list[str]:
    (gpu, *_) = ls.config.list_physical_devices("GPU")
    if request.param > 1:
        ls.config.set_logical_device_configuration(
            gpu, [ls.config.LogicalDeviceConfiguration(memory_limit=1024)] * request.param
        )
    return [f"gpu:{number}" for number in range(request.param)]


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 2**-6)


def train(
    replicas: list[str],
    net: nn.Module,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adam,
    **settings: Any,
) -> dict[str, Tensor]:
    net = copy.deepcopy(net)
    with closing(ls.MirroredStrategy(replicas, seed=3)) as strategy:
        with strategy.scope():
            model = ls.Model(net)
        model.compile(
            optimizer=optimizer(net.parameters()),
            scheduler=halving,
            **({"loss": nn.CrossEntropyLoss(reduction="none")} | settings),
        )
        model.fit(batches(8 * 7 + 3), epochs=3, verbose=0)
        return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every replay."""
    replays: list[int] = []
    replay = DeviceGraph.replay

    def counted(self: DeviceGraph) -> None:
        replays.append(1)
        replay(self)

    monkeypatch.setattr(DeviceGraph, "replay", counted)
    return replays


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.5}, {"precision": "bf16"}], ids=str)
def test_replayed_steps_have_the_bits_of_others(
    replicas: list[str],
    settings: dict[str, Any],
    recorded: list[int],
    record_property: Callable[[str, object], None],
) -> None:
    torch.manual_seed(0)
    net = Net(dropout=0.25, norm=True)
    net.inner.bias.requires_grad_(False)  # before the norm its gradient is rounding, which Adam would make large
    plain = train(replicas, net, graphs=False, **settings)
    assert not recorded
    replayed = train(replicas, net, **settings)
    assert len(recorded) > 8
    again = train(replicas, net, **settings)
    for other, against in ((plain, "eager steps"), (again, "the same again")):
        differences = [(replayed[name].double() - value.double()).abs().max().item() for name, value in other.items()]
        record_property(f"largest difference to {against} (limit 0)", max(differences))
    assert all(torch.equal(replayed[name], value) for name, value in plain.items())
    assert all(torch.equal(replayed[name], value) for name, value in again.items())


def test_a_recording_that_fails_leaves_a_process_that_trains_on(
    replicas: list[str], recorded: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lockstep")
    torch.manual_seed(0)
    net = Net(dropout=0.25)

    def asking(outputs: Tensor, targets: Tensor) -> Tensor:
        torch.cuda.current_stream().query()  # what a stream that is recorded refuses
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    plain = train(replicas, net, graphs=False)
    failed = train(replicas, net, loss=asking)
    assert not recorded
    assert any("could not be captured" in record.getMessage() for record in caplog.records)
    assert all(torch.equal(plain[name], failed[name]) for name in plain)

    train(replicas, net)
    assert recorded


@pytest.fixture
def compiling_here() -> Iterator[None]:
    """Torch's pool of compilers has a thread that outlives the test."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.mark.usefixtures("compiling_here")
def test_compiled_modules_train_alike_and_are_not_recorded(replicas: list[str], recorded: list[int]) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    net = Net(norm=True)

    def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # Not Adam: the norm leaves the bias before it nothing but rounding for a gradient, which Adam would make large.
        return torch.optim.SGD(parameters, 2**-6)

    plain = train(replicas, net, sgd, graphs=False)
    compiled = train(replicas, net, sgd, compile_module=True)
    assert not recorded
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-4)

    dropping = Net(dropout=0.25)
    first, again = (train(replicas, dropping, compile_module=True) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
