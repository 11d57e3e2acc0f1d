from __future__ import annotations

import pytest
import torch

from lockstep.config import DeviceRegistry, DeviceRequest, LogicalDeviceConfiguration
from lockstep.config.request import apply_request, parse_device_request, resolve
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


@pytest.fixture
def split_gpu(two_gpus):
    """gpu:0 to gpu:3 on the first GPU, gpu:4 the whole second one."""
    share = LogicalDeviceConfiguration(memory_limit=2048)
    two_gpus.configure(two_gpus.physical_devices("GPU")[0], [share] * 4)
    return two_gpus


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
