"""A machine with GPUs, made of values: its registry's rules hold where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from lockstep.config import DeviceRegistry, PhysicalDevice


@pytest.fixture
def two_gpus() -> DeviceRegistry:
    """One CPU and two GPUs of 8192 MB."""
    cpu = PhysicalDevice(name="cpu:0", kind="CPU", memory=None, torch_device=torch.device("cpu"))
    gpus = [
        PhysicalDevice(name=f"gpu:{n}", kind="GPU", memory=8192, torch_device=torch.device("cuda", n)) for n in (0, 1)
    ]
    return DeviceRegistry([cpu, *gpus])
