"""Where torch has an accelerator that is no CUDA GPU, what takes the CPU without being asked for it says so, once."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.config.devices import unused_accelerator

# torch's own way to add a device: the backend of another package registers its name and its module.
REGISTERED = """
import types, warnings
import torch

torch.utils.rename_privateuse1_backend("npu")
npu = types.ModuleType("npu")
npu.is_available, npu.device_count = lambda: True, lambda: 1
torch._register_device_module("npu", npu)
"""
PROGRAM = REGISTERED + textwrap.dedent(
    """
    import lockstep as ls

    makers = {
        "named": lambda: ls.MirroredStrategy(devices=["cpu:0"]),
        "named on a worker": lambda: ls.MultiWorkerMirroredStrategy(devices=["cpu:0"]),
        "first": FIRST,
        "second": lambda: ls.MirroredStrategy(),
    }
    for name, make in makers.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy = make()
            strategy.devices
        print(name, "|".join(str(each.message) for each in caught if "accelerator" in str(each.message)), sep=": ")
        strategy.close()
    """
)


@pytest.mark.parametrize(
    "first",
    [
        "lambda: ls.MirroredStrategy()",
        "lambda: ls.MirroredStrategy(replicas=2)",
        "lambda: ls.MultiWorkerMirroredStrategy()",
        "lambda: ls.ParallelStrategy()",
        "lambda: ls.Model(torch.nn.Linear(1, 1)).strategy",
    ],
)
def test_the_first_that_takes_the_cpu_unasked_says_so(python: Callable[..., Any], first: str):
    program = python("-c", PROGRAM.replace("FIRST", first))
    printed, errors = program.communicate(60)
    told = dict(line.split(": ", 1) for line in printed.splitlines())
    assert program.returncode == 0, errors
    assert "'npu'" in told["first"]
    assert 'devices=["cpu:0"]' in told["first"]
    assert [told[name] for name in ("named", "named on a worker", "second")] == ["", "", ""]


def test_a_backend_without_a_module_is_none(python: Callable[..., Any]):
    code = "import torch; torch.utils.rename_privateuse1_backend('npu'); import lockstep as ls; ls.MirroredStrategy()"
    program = python("-c", code)
    _, errors = program.communicate(60)
    assert (program.returncode, errors) == (0, "")


def test_cuda_and_the_cpu_are_no_unused_accelerator():
    assert unused_accelerator() == ""
