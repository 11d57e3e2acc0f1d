"""What the bits of a training depend on beside its program, data, seed and number of replicas: devices and libraries.

Other processors and versions choose other kernels, which add in another order, and round differently.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from lockstep.config import LogicalDevice

Conditions = dict[str, str]
"""The name of a condition -> what it is here, both for people to read."""


def conditions_of(devices: Sequence[LogicalDevice], threads: Sequence[int]) -> Conditions:
    """The conditions of this process, whose replicas compute on ``devices``, on a CPU with ``threads`` each."""
    conditions = {
        "device": joined(map(device_name, devices)),
        "torch": torch.__version__,
        "float32 matmul precision": _setting(torch.get_float32_matmul_precision),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    kinds = {device.torch_device.type for device in devices}
    if "cpu" in kinds:
        conditions |= {
            "CPU capability": torch.backends.cpu.get_cpu_capability(),
            "BLAS": _blas(),
            "oneDNN": _version("MKL-DNN v"),
            "threads per replica": joined(map(str, threads)),
        }
    if "cuda" in kinds:
        conditions |= {
            "CUDA": str(torch.version.cuda or torch.version.hip),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "TF32 in cuDNN": _setting(lambda: torch.backends.cudnn.allow_tf32),
            "cuDNN benchmark": str(torch.backends.cudnn.benchmark),
        }
    return conditions


def device_name(device: LogicalDevice) -> str:
    """The model of the processor or GPU that a device is, or is a part of."""
    on = device.torch_device
    return torch.cuda.get_device_name(on) if on.type == "cuda" else processor_name()


@cache
def processor_name() -> str:
    """The model of this machine's processor, such as "AMD EPYC 9V74"; at least its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "unknown"


def joined(values: Iterable[str]) -> str:
    """The different values, in their order: what several devices, replicas or workers have."""
    return " and ".join(dict.fromkeys(values))


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What both name and is not the same, as "torch was 2.12.0, is 2.13.0"."""
    return [f"{name} was {was}, is {now[name]}" for name, was in before.items() if now.get(name, was) != was]


def _blas() -> str:
    version = _version("Math Kernel Library Version ")
    match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return f"MKL {version}" if version else (match[1] if match else "unknown")


def _version(title: str) -> str:
    """The version that follows ``title`` in what torch was built with; empty if it does not."""
    match = re.search(re.escape(title) + r"([\w.]+)", torch.__config__.show())
    return match[1] if match else ""


def _setting(read: Callable[[], object]) -> str:
    try:
        return str(read())
    except RuntimeError:  # torch refuses to answer where its older and newer settings were mixed
        return "mixed"
