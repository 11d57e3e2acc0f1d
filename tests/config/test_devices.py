from __future__ import annotations

import dataclasses

import pytest
import torch

from lockstep.config.devices import LogicalDeviceConfiguration, discover_physical_devices, parse_kind
from lockstep.errors import ConfigError


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
