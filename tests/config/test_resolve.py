from __future__ import annotations

import pytest
import torch

from lockstep.config import DeviceRegistry, LogicalDeviceConfiguration
from lockstep.config.request import resolve
from lockstep.errors import ConfigError


@pytest.fixture
def split_gpu(two_gpus):
    """gpu:0 to gpu:3 on the first GPU, gpu:4 the whole second one."""
    share = LogicalDeviceConfiguration(memory_limit=2048)
    two_gpus.configure(two_gpus.physical_devices("GPU")[0], [share] * 4)
    return two_gpus


def names(devices):
    return [device.name for device in devices]


@pytest.mark.parametrize(
    "written",
    ["gpu:1", "GPU:1", "cuda:1", "/gpu:1", "/GPU:1", "/device:GPU:1", torch.device("cuda:1"), torch.device("cuda", 1)],
)
def test_the_ways_to_write_a_gpu(split_gpu, written):
    (device,) = resolve(split_gpu, [written])
    assert (device.name, device.memory_limit) == ("gpu:1", 2048)


@pytest.mark.parametrize("written", ["cpu:0", "CPU:0", "/cpu:0", "cpu", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_ways_to_write_the_cpu(two_gpus, written):
    assert names(resolve(two_gpus, [written])) == ["cpu:0"]


def test_a_logical_device_is_itself(split_gpu):
    device = split_gpu.logical_devices("GPU")[3]
    assert resolve(split_gpu, [device]) == (device,)


def test_the_order_is_the_one_given(split_gpu):
    assert names(resolve(split_gpu, ("gpu:4", "cuda:2", "/gpu:0"))) == ["gpu:4", "gpu:2", "gpu:0"]


def test_none_is_every_gpu_else_every_cpu_device(two_gpus):
    assert names(resolve(two_gpus, None)) == ["gpu:0", "gpu:1"]
    only_cpu = DeviceRegistry(two_gpus.physical_devices("CPU"))
    only_cpu.configure(only_cpu.physical_devices()[0], [LogicalDeviceConfiguration()] * 3)
    assert names(resolve(only_cpu, None)) == ["cpu:0", "cpu:1", "cpu:2"]


@pytest.mark.parametrize(
    "written", ["gpu:2", "cpu:1", "tpu:0", "gpu:x", "gpu:-1", "gpu:1 ", "", 0, None, torch.device("meta")]
)
def test_an_unknown_device_lists_the_known(two_gpus, written):
    with pytest.raises(ValueError, match=r"unknown device '.*'; known: cpu:0, gpu:0, gpu:1; choose among them") as info:
        resolve(two_gpus, ["cpu:0", written])
    assert str(written) in str(info.value)


def test_a_logical_device_from_before_a_split_is_unknown(two_gpus):
    old = two_gpus.logical_devices("GPU")[0]
    two_gpus.configure(old.physical, [LogicalDeviceConfiguration(memory_limit=100)] * 2)
    with pytest.raises(ValueError, match=r"unknown device gpu:0; known: cpu:0, gpu:0, gpu:1, gpu:2"):
        resolve(two_gpus, [old])


@pytest.mark.parametrize("second", ["gpu:1", "/GPU:1", "cuda:1", torch.device("cuda:1")])
def test_a_device_named_twice_is_refused(two_gpus, second):
    with pytest.raises(ValueError, match=r"gpu:1 is named twice in \['gpu:1', 'gpu:0', '.*'\]; name each device once"):
        resolve(two_gpus, ["gpu:1", "gpu:0", second])


def test_a_name_without_a_number_must_be_the_only_one(two_gpus):
    with pytest.raises(ConfigError, match=r"device 'cuda' has no number, and there are gpu:0, gpu:1; name one of them"):
        resolve(two_gpus, [torch.device("cuda")])


@pytest.mark.parametrize("devices", ["cpu:0", torch.device("cpu"), 2, {"cpu:0"}])
def test_devices_is_a_list(two_gpus, devices):
    with pytest.raises(ConfigError, match=r"is not a list; write a list of devices such as \['cpu:0', 'cpu:1'\]"):
        resolve(two_gpus, devices)


def test_an_empty_list_is_refused(two_gpus):
    with pytest.raises(ConfigError, match="devices is an empty list; name at least one"):
        resolve(two_gpus, [])
