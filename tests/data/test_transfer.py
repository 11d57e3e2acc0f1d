from __future__ import annotations

import pytest
import torch

from lockstep.collectives.per_replica import PerReplica
from lockstep.config import LogicalDevice, PhysicalDevice
from lockstep.data.transfer import Transfer


def device(name, torch_device):
    physical = PhysicalDevice(name=name, kind="CPU", memory=None, torch_device=torch.device(torch_device))
    return LogicalDevice(
        name=name, kind="CPU", physical=physical, memory_limit=None, torch_device=physical.torch_device
    )


def test_on_the_cpu_nothing_is_copied():
    values = [torch.ones(2), torch.zeros(2)]
    moved = Transfer([device("cpu:0", "cpu"), device("cpu:1", "cpu")])({"x": PerReplica(values)})
    assert all(given is got for given, got in zip(values, moved["x"], strict=True))


def test_every_value_goes_to_its_own_replicas_device():
    batch = ({"x": PerReplica([torch.ones(2, 3)] * 2)}, PerReplica(["text", None]))
    moved = Transfer([device("cpu:0", "cpu"), device("cpu:1", "meta")])(batch)
    assert [value.device.type for value in moved[0]["x"]] == ["cpu", "meta"]
    assert moved[0]["x"][1].shape == (2, 3)
    assert moved[1].values == ("text", None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [False, True])
def test_what_reaches_a_gpu_is_complete_and_stays_while_it_is_read(pinned):
    transfer = Transfer([device("gpu:0", "cuda:0")])
    sums = []
    for number in range(50):
        rows = torch.full((1 << 20,), float(number))
        (moved,) = transfer(PerReplica([rows.pin_memory() if pinned else rows]))
        assert moved.device == torch.device("cuda:0")
        torch.cuda._sleep(1_000_000)  # the step still runs when its batch is dropped and the next one is copied
        sums.append(moved.sum())
        del moved
    assert [total.item() for total in sums] == [float(number << 20) for number in range(50)]
