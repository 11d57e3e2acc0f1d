from __future__ import annotations

import pytest

from lockstep.config import DeviceRegistry, DeviceRequest, LogicalDeviceConfiguration
from lockstep.config.request import apply_request, parse_device_request
from lockstep.errors import ConfigError, UsageError

CPU_SHARE = LogicalDeviceConfiguration()
GPU_SHARE = LogicalDeviceConfiguration(memory_limit=2048)


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("cpu", DeviceRequest(kind="CPU")),
        ("GPU", DeviceRequest(kind="GPU")),
        ("cuda", DeviceRequest(kind="GPU")),
        ("cpu:1", DeviceRequest(splits={"cpu:0": (CPU_SHARE,)}, devices=("cpu:0",))),
        ("cpu:3", DeviceRequest(splits={"cpu:0": (CPU_SHARE,) * 3}, devices=("cpu:0", "cpu:1", "cpu:2"))),
        ("gpu:2x2048", DeviceRequest(splits={"gpu:0": (GPU_SHARE,) * 2}, devices=("gpu:0", "gpu:1"))),
        ("cpu:0", DeviceRequest(devices=("cpu:0",))),
        ("gpu:0", DeviceRequest(devices=("gpu:0",))),
        ("gpu:3", DeviceRequest(devices=("gpu:3",))),
        ("gpu:0,gpu:2", DeviceRequest(devices=("gpu:0", "gpu:2"))),
        (" cpu:0, CPU:1 ", DeviceRequest(devices=("cpu:0", "cpu:1"))),
        ("cuda:1,gpu:0", DeviceRequest(devices=("gpu:1", "gpu:0"))),
    ],
)
def test_the_notation(text, request_):
    assert parse_device_request(text) == request_


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"devices '' cannot be read at ''; write cpu, gpu, cpu:4"),
        ("tpu:4", r"devices 'tpu:4' cannot be read at 'tpu:4'"),
        ("cpu:four", "cannot be read at 'cpu:four'"),
        ("gpu:4x", "cannot be read at 'gpu:4x'"),
        ("gpu:0,", r"devices 'gpu:0,' cannot be read at ''"),
        ("cpu:4x512", r"gives the CPU's shares a memory limit; they have none: write cpu:4"),
        ("gpu:0x2048", "asks for 0 shares; ask for 1 to 1024"),
        ("cpu:1000000000", "asks for 1000000000 shares; ask for 1 to 1024"),
        ("gpu:2x0", "memory_limit=0 is not an amount of memory"),
        ("gpu:0,gpu", "a list has names of devices, but 'gpu' is none"),
        ("gpu:4x2048,gpu:5", "a list has names of devices, but 'gpu:4x2048' is none"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_device_request(text)


def names(devices):
    return [device.name for device in devices]


def test_a_split_is_made_and_taken(two_gpus):
    assert names(apply_request(two_gpus, parse_device_request("cpu:4"))) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    taken = apply_request(two_gpus, parse_device_request("gpu:4x2048"))
    assert names(taken) == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    assert {device.physical.name for device in taken} == {"gpu:0"}
    assert names(two_gpus.logical_devices("GPU")) == ["gpu:0", "gpu:1", "gpu:2", "gpu:3", "gpu:4"]


def test_names_are_picked_and_kinds_taken_whole(two_gpus):
    assert names(apply_request(two_gpus, parse_device_request("gpu:1"))) == ["gpu:1"]
    assert names(apply_request(two_gpus, parse_device_request("gpu:1,cpu:0"))) == ["gpu:1", "cpu:0"]
    assert names(apply_request(two_gpus, parse_device_request("gpu"))) == ["gpu:0", "gpu:1"]


def test_applying_puts_nothing_in_use(two_gpus):
    apply_request(two_gpus, parse_device_request("cpu:4"))
    assert len(apply_request(two_gpus, parse_device_request("cpu:2"))) == 2


def test_what_the_machine_lacks_is_said(two_gpus):
    only_cpu = DeviceRegistry(two_gpus.physical_devices("CPU"))
    with pytest.raises(ConfigError, match="gpu:0 cannot be divided: this machine has cpu:0; divide one of those"):
        apply_request(only_cpu, parse_device_request("gpu:4x2048"))
    with pytest.raises(ConfigError, match=r"this machine has no GPU; choose cpu, or cpu:4"):
        apply_request(only_cpu, parse_device_request("gpu"))
    with pytest.raises(ConfigError, match=r"unknown device 'gpu:2'; known: cpu:0"):
        apply_request(only_cpu, parse_device_request("gpu:2"))


def test_a_gpu_that_is_too_small_is_said(two_gpus):
    with pytest.raises(ConfigError, match=r"the shares of gpu:0 add up to .* = 10240 MB, but it has 8192 MB"):
        apply_request(two_gpus, parse_device_request("gpu:5x2048"))


def test_another_split_of_devices_in_use_is_refused(two_gpus):
    two_gpus.mark_in_use(apply_request(two_gpus, parse_device_request("cpu:4")))
    assert len(apply_request(two_gpus, parse_device_request("cpu:4"))) == 4
    with pytest.raises(UsageError, match="cpu:0 cannot be divided again"):
        apply_request(two_gpus, parse_device_request("cpu:2"))
