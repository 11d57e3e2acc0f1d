"""The device's rates, measured in the same run, and the bound on a step: its FLOPs over the rate of large products."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.loops import DeviceType, Setting, begin_process, wait_for
from benchmarks.gpu.workloads import PRECISIONS, GpuPrecision, precision_of
from benchmarks.loops import call
from benchmarks.trial import Workload

_DTYPES: Mapping[GpuPrecision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SIDE: Mapping[DeviceType, int] = {"cuda": 8192, "cpu": 256}
_REPEATS, _TRIES = 10, 3
_MB = 2**20


@cache
def count_flops(workload: Workload) -> int:
    """FLOPs of forward and backward pass of a global batch; computes nothing."""
    with torch.device("meta"):
        module = workload.make_module().train()
    x, y = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), workload.make_batches(1)[0])
    own = {torch.ops.aten.convolution_backward: _convolution_backward}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=own) as counter:
        total, _ = workload.loss(call(module, x), y)
        total.backward()  # type: ignore[no-untyped-call]
    flops: int = counter.get_total_flops()
    return flops


def _convolution_backward(
    gradient: Sequence[int], _: Sequence[int], weight: Sequence[int], *rest: Any, **__: Any
) -> int:
    """FLOPs of the gradients that are wanted, each those of the forward pass, from shapes of output and weight.

    torch 2.13's own formula takes a depthwise convolution's gradient of the weights for that of a full one, which makes
    MobileNetV2's step seven times what it is. ``rest``: bias, stride, padding, dilation, transposed, output padding,
    groups, which gradients are wanted.
    """
    forward: int = 2 * prod(gradient) * prod(weight[1:])
    return forward * sum(map(bool, rest[7][:2]))


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the device is and what it does at best."""

    name: str  # as the driver says
    memory_mb: float  # all of it
    used_mb: float  # what others had of it before the run began
    # FLOPs a second of large matrix products, by precision; fp32 with TF32 allowed. Empty if they were not measured.
    matmul_flops: Mapping[GpuPrecision, float]

    def least_ms(self, workload: str, flops: float) -> float | None:
        """What a step of so many FLOPs cannot be faster than on this device; None where its rate is not known."""
        rate = self.matmul_flops.get(precision_of(workload))
        return None if rate is None else 1000 * flops / rate

    @property
    def text(self) -> str:
        """For the head of the report."""
        memory = f"{self.memory_mb:.0f} MB, of which {self.used_mb:.0f} were taken before the run"
        rates = [f"{precision} {rate / 1e12:.1f} TFLOP/s" for precision, rate in self.matmul_flops.items()]
        measured = f"large matrix products at {', '.join(rates)}" if rates else "its rates were not measured"
        return f"{self.name}, {memory}; {measured}"


def look_at_device(device: DeviceType) -> DeviceFacts:
    """Measures the rates. Takes memory there: call it in a process of its own."""
    where = begin_process(Setting(device=device, precision="fp32"))
    rates = {precision: _matmul_flops(where, device, precision) for precision in PRECISIONS}
    return replace(named_device(device), matmul_flops=rates)


def named_device(device: DeviceType) -> DeviceFacts:
    """What the device is called and has, without any rate."""
    name, free, total = platform.machine() or "cpu", 0, 0
    if device == "cuda":
        name, (free, total) = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)
    return DeviceFacts(name=name, memory_mb=total / _MB, used_mb=(total - free) / _MB, matmul_flops={})


def _matmul_flops(where: torch.device, device: DeviceType, precision: GpuPrecision) -> float:
    """The rate of many products in a row, the best of a few tries; the first try warms up."""
    side = _SIDE[device]
    left, right = (torch.randn(side, side, device=where, dtype=_DTYPES[precision]) for _ in range(2))
    into = torch.empty_like(left)
    seconds = []
    for _ in range(_TRIES):
        wait_for(where)
        began = time.perf_counter()
        for _ in range(_REPEATS):
            torch.mm(left, right, out=into)
        wait_for(where)
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 * _REPEATS / min(seconds)
