"""Measures this machine: matrix products, memory, copies between devices. A second or two in all.

Measured figures are what is reached, so they come with constants of 1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from lockstep.errors import ConfigError
from lockstep.plan.hardware import GIB, LINKS, DeviceKind, Format, Link, Network
from lockstep.plan.software import Constants

_CPU_SIZES, _GPU_SIZES = (256, 512, 1024), (2048, 4096, 8192)
_TYPES: dict[Format, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MIB = 2**20
_LAUNCHES = 100
_TOKENS, _WIDTH = 2048, 1024


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured figures of this machine."""

    device: DeviceKind  # one device
    network: Network  # the measured link inside this host, and the usual one between hosts
    constants: Constants  # 1 for everything that was measured, and the measured launch time of an operation


def measure(*, per_host: int = 1, seconds: float = 0.1) -> Measured:
    """Measures the first GPU, or the CPU if there is none.

    Args:
        per_host: workers on this machine, which divide a CPU's cores and memory among them. GPUs are not divided.
        seconds: duration of each measurement; the best of at least two runs counts.

    Raises:
        ConfigError: more workers than cores.
    """
    if torch.cuda.is_available():
        return _measure_gpu(_Timer(torch.device("cuda", 0), seconds), per_host)
    cores = len(os.sched_getaffinity(0))
    if not 1 <= per_host <= cores:
        raise ConfigError(f"per_host={per_host} was given, expected 1 to {cores} workers on the {cores} cores here")
    threads = torch.get_num_threads()
    torch.set_num_threads(cores // per_host)
    try:
        return _measure_cpu(_Timer(torch.device("cpu"), seconds), per_host)
    finally:
        torch.set_num_threads(threads)


def _measure_cpu(timer: _Timer, per_host: int) -> Measured:
    copied = timer.copy_rate(timer.device, 32 * _MIB)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    formats: tuple[Format, ...] = ("fp32", "bf16")
    kind = DeviceKind(
        name="cpu",
        memory_gib=memory / GIB / per_host,
        bandwidth_gb_s=2 * copied / 1e9,  # a copy reads and writes
        peak_tflops={name: timer.product_rate(name, _CPU_SIZES) / 1e12 for name in formats},
        inside="memory",
        between="ethernet-10",
        per_host=per_host,
        source="measured",
    )
    # Between two workers of a host a tensor is copied twice: into shared memory or a socket, and out of it.
    link = Link(name="memory", bandwidth_gb_s=copied / 2e9, latency_us=LINKS["memory"].latency_us)
    return _measured(timer, kind, link)


def _measure_gpu(timer: _Timer, per_host: int) -> Measured:
    formats: tuple[Format, ...] = ("fp32", "fp16", "bf16")
    device, count = timer.device, torch.cuda.device_count()
    kind = DeviceKind(
        name=torch.cuda.get_device_name(device),
        memory_gib=torch.cuda.get_device_properties(device).total_memory / GIB,
        bandwidth_gb_s=2 * timer.copy_rate(device, 256 * _MIB) / 1e9,
        peak_tflops={name: timer.product_rate(name, _GPU_SIZES) / 1e12 for name in formats},
        inside="pcie4",
        between="hdr",
        per_host=max(per_host, count),
        source="measured",
    )
    link = LINKS[kind.inside]
    if count > 1:
        rate = timer.copy_rate(torch.device("cuda", 1), 256 * _MIB)
        link = Link(name="peer", bandwidth_gb_s=rate / 1e9, latency_us=link.latency_us)
    return _measured(timer, kind, link)


def _measured(timer: _Timer, kind: DeviceKind, link: Link) -> Measured:
    passes = min(1.0, timer.elementwise_rate() / kind.bandwidth)
    return Measured(
        device=kind,
        network=Network(inside=link, between=LINKS[kind.between], per_host=kind.per_host),
        constants=Constants(matmul=1.0, memory=1.0, passes=passes, link=1.0, launch_us=timer.launch_seconds() * 1e6),
    )


class _Timer:
    """Times operations on one device, for ``seconds`` each."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self._seconds = seconds

    def product_rate(self, name: Format, sizes: tuple[int, ...]) -> float:
        """The best rate of square matrix products, in FLOP/s."""

        def rate(size: int) -> float:
            left = torch.ones(size, size, dtype=_TYPES[name], device=self.device)
            return 2 * float(size) ** 3 / self._best(lambda: left @ left)

        return max(rate(size) for size in sizes)

    def copy_rate(self, target: torch.device, size: int) -> float:
        """Bytes per second that arrive at ``target``."""
        source = torch.ones(size // 4, device=self.device)
        copy = torch.empty(size // 4, device=target)
        return size / self._best(lambda: copy.copy_(source))

    def elementwise_rate(self) -> float:
        """Bytes per second of a norm, an activation, a dropout and a residual sum.

        Counted as predictions count them: two values each for norm and activation, three and a mask byte for the rest.
        """
        values = torch.ones(_TOKENS, _WIDTH, device=self.device)

        def elementwise() -> None:
            normed = functional.layer_norm(values, (_WIDTH,))
            functional.dropout(functional.gelu(normed), 0.1).add_(values)

        return values.numel() * (2 * 4 + 2 * 4 + 3 * 4 + 1) / self._best(elementwise)

    def launch_seconds(self) -> float:
        """Seconds of an operation on a tiny tensor, averaged over many in a row."""
        tiny = torch.ones(8, device=self.device)

        def launches() -> None:
            for _ in range(_LAUNCHES):
                tiny.add_(1.0)

        return self._best(launches) / _LAUNCHES

    def _best(self, work: Callable[[], object]) -> float:
        """The shortest of at least two runs, after a warm-up."""
        self._run(work)
        times = [self._run(work), self._run(work)]
        while sum(times) < self._seconds:
            times.append(self._run(work))
        return min(times)

    def _run(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start
