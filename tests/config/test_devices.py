"""Devices are found, divided and listed; and what cannot be divided is refused."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from lockstep.config import DeviceRegistry, LogicalDeviceConfiguration, PhysicalDevice
from lockstep.config.devices import discover_physical_devices, parse_kind
from lockstep.errors import ConfigError, UsageError


def test_the_machine_has_one_cpu_with_all_its_cores():
    cpu, *gpus = discover_physical_devices()
    assert (cpu.name, cpu.kind, cpu.memory, cpu.torch_device) == ("cpu:0", "CPU", None, torch.device("cpu"))
    assert [gpu.name for gpu in gpus] == [f"gpu:{number}" for number in range(torch.cuda.device_count())]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_knows_its_memory_in_mb():
    gpu = discover_physical_devices()[1]
    assert (gpu.name, gpu.kind, gpu.torch_device) == ("gpu:0", "GPU", torch.device("cuda:0"))
    assert gpu.memory == torch.cuda.get_device_properties(0).total_memory // 2**20


@pytest.mark.parametrize("limit", [0, -1, 1.5, "2048", True])
def test_a_memory_limit_is_a_whole_number_of_mb(limit):
    with pytest.raises(ConfigError, match=r"memory_limit=.* give a whole number of MB, or None"):
        LogicalDeviceConfiguration(memory_limit=limit)


def test_a_configuration_is_frozen_and_equal_by_value():
    share = LogicalDeviceConfiguration(memory_limit=2048)
    assert share == LogicalDeviceConfiguration(memory_limit=2048) != LogicalDeviceConfiguration()
    with pytest.raises(dataclasses.FrozenInstanceError):
        share.memory_limit = 1


@pytest.mark.parametrize(("written", "kind"), [("CPU", "CPU"), ("cpu", "CPU"), ("Gpu", "GPU")])
def test_a_kind_is_written_in_any_case(written, kind):
    assert parse_kind(written) == kind


@pytest.mark.parametrize("written", ["TPU", "", 3])
def test_an_unknown_kind_is_refused(written):
    with pytest.raises(ValueError, match=r"unknown device kind .* choose 'CPU' or 'GPU'"):
        parse_kind(written)


def shares(*limits):
    return [LogicalDeviceConfiguration(memory_limit=limit) for limit in limits]


def names(devices):
    return [device.name for device in devices]


def test_without_a_split_there_is_one_logical_device_per_physical_one(two_gpus):
    assert names(two_gpus.logical_devices()) == ["cpu:0", "gpu:0", "gpu:1"]
    for physical, logical in zip(two_gpus.physical_devices(), two_gpus.logical_devices(), strict=True):
        assert logical.physical == physical
        assert (logical.kind, logical.torch_device) == (physical.kind, physical.torch_device)
        assert logical.memory_limit is None


def test_devices_are_listed_by_kind(two_gpus):
    assert names(two_gpus.physical_devices("GPU")) == ["gpu:0", "gpu:1"]
    assert names(two_gpus.logical_devices("CPU")) == ["cpu:0"]


def test_logical_gpus_are_numbered_over_all_physical_ones(two_gpus):
    first, second = two_gpus.physical_devices("GPU")
    two_gpus.configure(first, shares(2048, 1024, 1024))
    found = two_gpus.logical_devices("GPU")
    assert names(found) == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    assert [device.memory_limit for device in found] == [2048, 1024, 1024, None]
    assert [device.physical for device in found] == [first, first, first, second]
    assert [device.torch_device for device in found] == [torch.device("cuda:0")] * 3 + [torch.device("cuda:1")]


def test_configuration_is_none_until_it_is_set(two_gpus):
    cpu, gpu, _ = two_gpus.physical_devices()
    assert two_gpus.configuration(cpu) is None
    two_gpus.configure(cpu, shares(None, None))
    assert two_gpus.configuration(cpu) == tuple(shares(None, None))
    assert two_gpus.configuration(gpu) is None


def test_a_gpu_share_needs_a_limit(two_gpus):
    gpu = two_gpus.physical_devices("GPU")[0]
    with pytest.raises(ValueError, match=r"a share of gpu:0 was given no memory_limit; a GPU's shares need one"):
        two_gpus.configure(gpu, shares(2048, None))


def test_a_cpu_share_has_no_limit(two_gpus):
    cpu = two_gpus.physical_devices("CPU")[0]
    with pytest.raises(ValueError, match=r"a share of cpu:0 was given memory_limit=512; a CPU's shares have none"):
        two_gpus.configure(cpu, shares(None, 512))


def test_limits_may_add_up_to_all_of_the_memory_but_not_to_more(two_gpus):
    gpu = two_gpus.physical_devices("GPU")[0]
    two_gpus.configure(gpu, shares(4096, 4096))
    with pytest.raises(ValueError, match=r"4096 \+ 4097 = 8193 MB, but it has 8192 MB; with 2 .* at most 4096 MB"):
        two_gpus.configure(gpu, shares(4096, 4097))
    assert two_gpus.configuration(gpu) == tuple(shares(4096, 4096))


@pytest.mark.parametrize("given", [[], None, 3])
def test_no_shares_are_refused(two_gpus, given):
    with pytest.raises(ConfigError, match=r"cpu:0 was given the shares .*; give a list of LogicalDeviceConfiguration"):
        two_gpus.configure(two_gpus.physical_devices("CPU")[0], given)


def test_a_share_is_a_configuration(two_gpus):
    with pytest.raises(ConfigError, match=r"gpu:0 was given the shares .*2048.*; give a list"):
        two_gpus.configure(two_gpus.physical_devices("GPU")[0], [2048])


def test_a_device_of_another_machine_is_refused(two_gpus):
    gpu = PhysicalDevice(name="gpu:7", kind="GPU", memory=1, torch_device=torch.device("cuda:7"))
    for question in (two_gpus.configuration, lambda device: two_gpus.configure(device, shares(1))):
        with pytest.raises(ConfigError, match=r"received gpu:7, expected a physical device of this machine \(cpu:0, "):
            question(gpu)
    with pytest.raises(ConfigError, match=r"received a str, expected a physical device .*list_physical_devices"):
        two_gpus.configuration("cpu:0")


def test_before_it_is_in_use_a_device_is_divided_anew_at_will(two_gpus):
    cpu = two_gpus.physical_devices("CPU")[0]
    two_gpus.configure(cpu, shares(None, None))
    two_gpus.configure(cpu, shares(None, None, None))
    assert names(two_gpus.logical_devices("CPU")) == ["cpu:0", "cpu:1", "cpu:2"]


def test_in_use_the_same_configuration_is_accepted_and_another_refused(two_gpus):
    gpu = two_gpus.physical_devices("GPU")[0]
    two_gpus.configure(gpu, shares(2048, 2048))
    two_gpus.mark_in_use(two_gpus.logical_devices("GPU")[1:2])
    two_gpus.configure(gpu, shares(2048, 2048))
    for other in (shares(2048, 1024), shares(2048), shares(2048, 2048, 2048)):
        with pytest.raises(RuntimeError, match=r"gpu:0 cannot be divided again: gpu:0 is in use .*close"):
            two_gpus.configure(gpu, other)
    assert two_gpus.configuration(gpu) == tuple(shares(2048, 2048))


def test_a_bad_split_of_a_device_in_use_is_a_bad_split(two_gpus):
    two_gpus.mark_in_use(two_gpus.logical_devices())
    with pytest.raises(ValueError, match="a CPU's shares have none"):
        two_gpus.configure(two_gpus.physical_devices("CPU")[0], shares(1))


def test_one_share_is_the_same_as_the_undivided_cpu(two_gpus):
    two_gpus.mark_in_use(two_gpus.logical_devices("CPU"))
    two_gpus.configure(two_gpus.physical_devices("CPU")[0], shares(None))


def test_a_device_in_use_leaves_the_others_free(two_gpus):
    first, second = two_gpus.physical_devices("GPU")
    two_gpus.mark_in_use(two_gpus.logical_devices("GPU")[:1])
    two_gpus.configure(second, shares(1024, 1024))
    two_gpus.configure(two_gpus.physical_devices("CPU")[0], shares(None, None))
    with pytest.raises(UsageError, match="gpu:0 cannot be divided again"):
        two_gpus.configure(first, shares(1024))


def test_a_split_that_would_rename_a_device_in_use_is_refused(two_gpus):
    first, _ = two_gpus.physical_devices("GPU")
    two_gpus.mark_in_use(two_gpus.logical_devices("GPU")[1:])
    with pytest.raises(UsageError, match=r"gpu:0 cannot be divided again: gpu:1"):
        two_gpus.configure(first, shares(1024, 1024))
    two_gpus.configure(first, shares(1024))


def test_a_registry_finds_this_machine_when_it_is_first_asked(monkeypatch, two_gpus):
    asked = []

    def discover():
        asked.append(1)
        return two_gpus.physical_devices()

    monkeypatch.setattr("lockstep.config.devices.discover_physical_devices", discover)
    registry = DeviceRegistry()
    assert asked == []
    assert names(registry.logical_devices()) == ["cpu:0", "gpu:0", "gpu:1"]
    assert names(registry.physical_devices()) == ["cpu:0", "gpu:0", "gpu:1"]
    assert asked == [1]


def test_of_many_threads_that_divide_a_device_in_use_at_once_none_succeeds(two_gpus):
    two_gpus.mark_in_use(two_gpus.logical_devices())
    refused = []

    def divide(count):
        try:
            two_gpus.configure(two_gpus.physical_devices("CPU")[0], shares(*[None] * count))
        except UsageError:
            refused.append(count)

    threads = [threading.Thread(target=divide, args=(count,)) for count in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(refused) == list(range(2, 10))
