"""``lockstep.config`` as a user sees it: the functions over the process's one registry."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from contextlib import closing

import pytest
import torch

import lockstep as ls
from lockstep import config
from lockstep.config import LogicalDeviceConfiguration

pytestmark = pytest.mark.usefixtures("fresh_devices")


@pytest.fixture
def cpu():
    return config.list_physical_devices("CPU")[0]


def test_listing(cpu):
    assert config.list_physical_devices("cpu") == [cpu]
    assert config.list_physical_devices()[0] == cpu
    (logical,) = config.list_logical_devices("Cpu")
    assert (logical.name, logical.physical, logical.memory_limit) == ("cpu:0", cpu, None)
    assert logical.torch_device == torch.device("cpu")
    with pytest.raises(ValueError, match="unknown device kind 'TPU'"):
        config.list_logical_devices("TPU")


def test_a_split_and_its_configuration(cpu):
    assert config.get_logical_device_configuration(cpu) is None
    config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 2)
    assert config.get_logical_device_configuration(cpu) == [LogicalDeviceConfiguration()] * 2
    assert [device.name for device in config.list_logical_devices("CPU")] == ["cpu:0", "cpu:1"]


def test_listing_devices_does_not_use_them(cpu):
    config.list_logical_devices()
    config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 2)


def test_resolving_devices_uses_them(cpu):
    config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 2)
    assert [device.name for device in config.resolve_devices(["cpu:1"])] == ["cpu:1"]
    config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 2)
    with pytest.raises(RuntimeError, match="cpu:0 cannot be divided again"):
        config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 3)


def test_devices_are_divided_again_when_every_strategy_on_them_is_closed(cpu):
    config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 2)
    first, second = ls.MirroredStrategy(["cpu:1"]), ls.MirroredStrategy(replicas=3)
    for strategy in (first, first):
        strategy.close()
        with pytest.raises(RuntimeError, match="cpu:0 cannot be divided again"):
            config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 3)
    second.close()

    config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 3)

    third = ls.MirroredStrategy()
    assert [device.name for device in third.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    third.close()


def test_a_model_without_a_scope_lets_go_of_its_device_and_goes_on(cpu):
    ls.get_strategy().close()  # another test may have used it
    model, row = ls.Model(torch.nn.Linear(2, 1)), torch.ones(1, 2)
    expected = model(row)
    with pytest.raises(RuntimeError, match=r"cpu:0 cannot be divided again: .*model\.strategy\.close"):
        config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 3)
    for _ in range(2):
        model.strategy.close()

    config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 3)

    assert torch.equal(model(row), expected)
    model.strategy.close()


@pytest.mark.parametrize(
    ("owner", "name", "hint"),
    [
        (config, "experimental", "set_logical_device_configuration"),
        (config, "list_logical_device", "no attribute"),
        (ls.get_strategy(), "experimental_run_v2", "strategy.run"),
        (ls.get_strategy(), "experimental_distribute_dataset", "strategy.distribute_dataset"),
        (ls.get_strategy(), "nonsense", "no attribute"),
        (ls, "experimental", "MultiWorkerMirroredStrategy"),
        (ls, "distribute", "ls.MirroredStrategy"),
        (ls, "OneDeviceStrategy", "MirroredStrategy"),
        (ls, "Nonsense", "no attribute"),
    ],
)
def test_names_of_tensorflow_lead_to_ours(owner, name: str, hint: str):
    with pytest.raises(AttributeError, match=hint):
        getattr(owner, name)


class Failing(ls.MirroredStrategy):
    @property
    def grid(self) -> str:
        return self.nonsense_inside  # type: ignore[attr-defined, no-any-return]


def test_an_error_inside_a_property_of_a_strategy_is_its_own(cpu):
    with closing(Failing()) as strategy, pytest.raises(AttributeError, match="nonsense_inside"):
        _ = strategy.grid


def test_devices_that_could_not_be_resolved_are_not_in_use(cpu):
    with pytest.raises(ValueError, match="unknown device"):
        config.resolve_devices(["cpu:0", "cpu:1"])
    config.set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 2)


def test_the_notation_of_the_command_line_reaches_the_registry():
    assert config.list_logical_devices("CPU")[1:] == []
    assert config.request_devices("cpu:4") == tuple(config.list_logical_devices("CPU"))
    assert len(config.resolve_devices(["cpu:3", "cpu:0"])) == 2


def test_importing_looks_for_no_devices():
    script = (
        "import torch\n"
        "def fail(*_): raise SystemExit('the import looked for devices')\n"
        "torch.cuda.device_count = torch.cuda.get_device_properties = fail\n"
        "import lockstep\n"
        "[getattr(lockstep, name) for name in lockstep.__all__]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_wrong_flag_ends_in_one_line_of_argparse(
    fresh_devices: config.DeviceRegistry, capsys: pytest.CaptureFixture[str]
):
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--devices", type=config.request_devices)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--devices", "gpu:99"])
    assert re.fullmatch(r"usage: .*\ntrain\.py: error: .*'gpu:99'.*known: cpu:0.*\n", capsys.readouterr().err)
