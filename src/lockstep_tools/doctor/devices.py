"""Devices, and what workers exchange numbers with.

``python -m lockstep_tools.doctor.devices`` prints the section as JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep import config
from lockstep._torch_compat import TESTED, HashStore, gloo_group
from lockstep.replicas.conditions import processor_name
from lockstep.replicas.device.driver import gpu_driver
from lockstep.replicas.device.memory import MB
from lockstep_tools.doctor.section import Fact, Section, Trouble

_FREE_SHARE = 0.5
"""A GPU of whose memory less is free is used by other programs."""


def examine_devices() -> Section:
    """The probe."""
    physical = config.list_physical_devices()
    logical = ", ".join(device.name for device in config.default_devices())
    facts = [
        Fact("processor", processor_name()),
        *(_physical_fact(device) for device in physical),
        Fact("used by default", f"{logical}; lockstep devices --devices cpu:4 shows a division"),
        Fact("torch for CUDA", torch.version.cuda or "no"),
        Fact("gloo", _gloo()),
        Fact("NCCL", _nccl()),
    ]
    return Section(title="devices", facts=facts, troubles=tuple(_troubles(physical)))


def _physical_fact(device: config.PhysicalDevice) -> Fact:
    driver = gpu_driver(device)
    if driver is None:
        return Fact(device.name, f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads in torch")
    free, total = driver.free_and_total(device.torch_device)
    product = driver.product(device.torch_device)
    return Fact(device.name, f"{product}, {total // MB} MB, {free // MB} MB free")


def _gloo() -> str:
    """Makes a group of one over gloo, as workers do."""
    if not dist.is_gloo_available():
        return "not in this build of torch"
    try:
        # Made and not only asked for: gloo fails where it can open no socket, as in some sandboxes.
        gloo_group(HashStore(), 0, 1, address="127.0.0.1", timeout=timedelta(seconds=5))
    except (RuntimeError, ValueError) as error:
        return f"cannot be used: {error}"
    return "works"


def _nccl() -> str:
    if not dist.is_nccl_available():
        return "not in this build of torch"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _troubles(physical: list[config.PhysicalDevice]) -> Iterator[Trouble]:
    version = torch.__version__
    if not version.startswith(TESTED):
        yield Trouble(f"torch {version} is installed; Lockstep was tested with {' and '.join(TESTED)}.")
    gpus = [device for device in physical if device.kind == "GPU"]
    # Read from files: a torch without CUDA cannot ask the driver.
    has_driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
    if torch.version.cuda is None and has_driver:
        yield Trouble(
            "This machine has an NVIDIA driver, and torch is built without CUDA: GPUs are not used. Install torch from "
            "https://pytorch.org/get-started/locally/ with CUDA."
        )
    if torch.version.cuda is not None and not gpus:
        yield Trouble(f"torch is built for CUDA {torch.version.cuda}, and sees no GPU: {_why_none(has_driver)}.")
    for device in gpus:
        driver = gpu_driver(device)
        free, total = (1, 1) if driver is None else driver.free_and_total(device.torch_device)
        if free < _FREE_SHARE * total:
            yield Trouble(
                f"Of the memory of {device.name} {free / total:.0%} are free: another program uses this GPU. "
                "`nvidia-smi` lists it."
            )
    if len(gpus) > 1 and not dist.is_nccl_available():
        yield Trouble("There are several GPUs, and this build of torch has no NCCL: workers exchange gradients slowly.")


def _why_none(has_driver: bool) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} may hide it"
    return "its driver may be too old for this CUDA" if has_driver else "no NVIDIA driver is loaded"


if __name__ == "__main__":
    sys.stdout.write(f"{examine_devices().to_json()}\n")
