"""Measures this machine: matrix products, memory, copies between devices. A second or two in all.

Measured figures are what is reached, so they come with constants of 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils.benchmark import Timer

from lockstep.errors import ConfigError
from lockstep.plan.hardware import GIB, LINKS, DeviceKind, Format, Link, Network
from lockstep.plan.software import Constants

_CPU_SIZES, _GPU_SIZES = (256, 512, 1024), (2048, 4096, 8192)
_CPU_TYPES: dict[Format, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_GPU_TYPES: dict[Format, torch.dtype] = {**_CPU_TYPES, "fp16": torch.float16}
_MIB = 2**20
_TOKENS, _WIDTH = 2048, 1024
# Counted as predictions count them: two values each for norm and activation, three and a mask byte for dropout.
_ELEMENTWISE_BYTES = _TOKENS * _WIDTH * (2 * 4 + 2 * 4 + 3 * 4 + 1)


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
        seconds: duration of each measurement.

    Raises:
        ConfigError: more workers than cores.
    """
    cores = len(os.sched_getaffinity(0))
    if torch.cuda.is_available():
        return _measure_gpu(_Rates(torch.device("cuda", 0), seconds, cores), max(per_host, torch.cuda.device_count()))
    if not 1 <= per_host <= cores:
        raise ConfigError(f"per_host={per_host} was given, expected 1 to {cores} workers on the {cores} cores here")
    return _measure_cpu(_Rates(torch.device("cpu"), seconds, cores // per_host), per_host)


def _measure_cpu(rates: _Rates, per_host: int) -> Measured:
    copied = rates.copy(rates.device, 32 * _MIB)
    kind = DeviceKind(
        name="cpu",
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / per_host,
        bandwidth_gb_s=2 * copied / 1e9,  # a copy reads and writes
        peak_tflops={name: rates.product(dtype, _CPU_SIZES) / 1e12 for name, dtype in _CPU_TYPES.items()},
        inside="memory",
        between="ethernet-10",
        per_host=per_host,
        source="measured",
    )
    # Between two workers of a host a tensor is copied twice: into shared memory or a socket, and out of it.
    return _measured(
        rates, kind, Link(name="memory", bandwidth_gb_s=copied / 2e9, latency_us=LINKS["memory"].latency_us)
    )


def _measure_gpu(rates: _Rates, per_host: int) -> Measured:
    kind = DeviceKind(
        name=torch.cuda.get_device_name(rates.device),
        memory_gib=torch.cuda.get_device_properties(rates.device).total_memory / GIB,
        bandwidth_gb_s=2 * rates.copy(rates.device, 256 * _MIB) / 1e9,
        peak_tflops={name: rates.product(dtype, _GPU_SIZES) / 1e12 for name, dtype in _GPU_TYPES.items()},
        inside="pcie4",
        between="hdr",
        per_host=per_host,
        source="measured",
    )
    link = LINKS[kind.inside]
    if torch.cuda.device_count() > 1:
        copied = rates.copy(torch.device("cuda", 1), 256 * _MIB)
        link = Link(name="peer", bandwidth_gb_s=copied / 1e9, latency_us=link.latency_us)
    return _measured(rates, kind, link)


def _measured(rates: _Rates, kind: DeviceKind, link: Link) -> Measured:
    passes, launch_us = min(1.0, rates.elementwise() / kind.bandwidth), 1e6 * rates.launch_seconds()
    return Measured(
        device=kind,
        network=Network(inside=link, between=LINKS[kind.between], per_host=kind.per_host),
        constants=Constants(matmul=1.0, memory=1.0, passes=passes, link=1.0, launch_us=launch_us),
    )


@dataclass(frozen=True)
class _Rates:
    """What one device reaches, measured for ``seconds`` each."""

    device: torch.device
    seconds: float
    threads: int

    def product(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> float:
        """The best rate of square matrix products, in FLOP/s."""
        matrices = [torch.ones(size, size, dtype=dtype, device=self.device) for size in sizes]
        return max(2 * float(len(each)) ** 3 / self._time(lambda each=each: each @ each) for each in matrices)  # type: ignore[misc]

    def copy(self, target: torch.device, size: int) -> float:
        """Bytes per second that arrive at ``target``."""
        source, copy = torch.ones(size // 4, device=self.device), torch.empty(size // 4, device=target)
        return size / self._time(lambda: copy.copy_(source))

    def elementwise(self) -> float:
        """Bytes per second of a norm, an activation, a dropout and a residual sum."""
        values = torch.ones(_TOKENS, _WIDTH, device=self.device)

        def elementwise() -> None:
            normed = functional.layer_norm(values, (_WIDTH,))
            functional.dropout(functional.gelu(normed), 0.1).add_(values)

        return _ELEMENTWISE_BYTES / self._time(elementwise)

    def launch_seconds(self) -> float:
        """Seconds of an operation on a tiny tensor, of many in a row."""
        tiny = torch.ones(8, device=self.device)
        return self._time(lambda: tiny.add_(1.0))

    def _time(self, work: Callable[[], object]) -> float:
        """Seconds of one call. torch's timer warms up and waits for GPUs."""
        timer = Timer("work()", globals={"work": work}, num_threads=self.threads)
        return timer.blocked_autorange(min_run_time=self.seconds).median
