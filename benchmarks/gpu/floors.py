"""The device's rates, measured in the same run, and the floor of a step: its work over those rates.

floor = the larger of  FLOPs / rate of large matrix products   and   bytes / rate of large copies
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.contenders.plain import laid_out, memory_format
from benchmarks.gpu.device_laps import wait_for
from benchmarks.gpu.setting import DeviceType, Pace, Setting, begin_process
from benchmarks.gpu.traffic import StepCost, count_flops, count_traffic
from benchmarks.gpu.work import PRECISIONS, GpuPrecision, Sizes, gpu_workloads, precision_of
from benchmarks.roster import layouts_of
from benchmarks.trial import Workload

_DTYPES: Mapping[GpuPrecision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SIDE: Mapping[DeviceType, int] = {"cuda": 8192, "cpu": 256}
_COPIED_BYTES: Mapping[DeviceType, int] = {"cuda": 2**30, "cpu": 2**22}
_REPEATS, _TRIES = 10, 3
_MB = 2**20


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the device is and what it does at best.

    Args:
        name: as the driver says.
        memory_mb: all of it.
        used_mb: what others had of it before the run began.
        capability: such as "9.0"; empty for a CPU.
        matmul_flops: FLOPs a second of large matrix products, by precision; fp32 with TF32 allowed.
        copy_bytes_s: bytes read and written a second by a large copy within the device.
        costs: of a step, by workload; without those whose eager step does not fit the device.
        trouble: why rates or costs are missing; empty where none is.
    """

    name: str
    memory_mb: float
    used_mb: float
    capability: str
    matmul_flops: Mapping[GpuPrecision, float]
    copy_bytes_s: float
    costs: Mapping[str, StepCost]
    trouble: str = ""

    def floor(self, workload: str, precision: GpuPrecision) -> Floor | None:
        """The floor of a workload's step; None where something that it needs is missing."""
        cost, rate = self.costs.get(workload), self.matmul_flops.get(precision)
        if cost is None or rate is None:
            return None
        return Floor(
            compute_ms=1000 * cost.flops / rate,
            traffic_ms=1000 * cost.traffic_bytes / self.copy_bytes_s,
        )


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a step cannot be faster than.

    Args:
        compute_ms: its FLOPs at the rate of large matrix products. Nothing on this device is faster.
        traffic_ms: the eager step's bytes at the rate of large copies. Fused operators move fewer.
    """

    compute_ms: float
    traffic_ms: float

    @property
    def ms(self) -> float:
        """The larger of the two."""
        return max(self.compute_ms, self.traffic_ms)


def look_at_device(device: DeviceType, sizes: Sizes) -> DeviceFacts:
    """Measures the rates and counts each workload's step. Takes memory there: call it in a process of its own."""
    setting = Setting(device=device, precision="fp32", pace=Pace(warm_up=1, lap_steps=1, laps=1))
    where = begin_process(setting)
    found = named_device(device)
    costs, trouble = _costs(device, sizes)
    return replace(
        found,
        matmul_flops={precision: _matmul_flops(where, device, precision) for precision in PRECISIONS},
        copy_bytes_s=_copy_bytes_s(where, device),
        costs=costs,
        trouble=trouble,
    )


def named_device(device: DeviceType, trouble: str = "") -> DeviceFacts:
    """What the device is called and has, without any rate.

    Args:
        device: which kind.
        trouble: why there are no rates.
    """
    if device == "cpu":
        name, total, free, capability = platform.machine() or "cpu", 0, 0, ""
    else:
        where = torch.device("cuda", 0)
        free, total = torch.cuda.mem_get_info(where)
        name, capability = torch.cuda.get_device_name(where), "{}.{}".format(*torch.cuda.get_device_capability(where))
    return DeviceFacts(
        name=name,
        memory_mb=total / _MB,
        used_mb=(total - free) / _MB,
        capability=capability,
        matmul_flops={},
        copy_bytes_s=0.0,
        costs={},
        trouble=trouble,
    )


def _costs(device: DeviceType, sizes: Sizes) -> tuple[dict[str, StepCost], str]:
    """The steps that fit the device, and a line about those that do not."""
    costs: dict[str, StepCost] = {}
    too_large = []
    for name, workload in gpu_workloads(sizes).items():
        try:
            costs[name] = StepCost(flops=count_flops(workload), traffic_bytes=_traffic(workload, device))
        except torch.OutOfMemoryError:
            too_large.append(name)
    return costs, f"the eager step does not fit the device: {', '.join(too_large)}" if too_large else ""


def _traffic(workload: Workload, device: DeviceType) -> int:
    """Bytes of the second eager step: the first one makes the optimizer's state."""
    setting = Setting(device=device, precision=precision_of(workload), pace=Pace(warm_up=1, lap_steps=1, laps=1))
    where, layout = setting.torch_device, layouts_of(workload.name.partition("-")[0])[0]
    module = workload.make_module().train().to(device=where, memory_format=memory_format(layout))  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(module.parameters(), lr=workload.learning_rate, fused=True)
    (batch,) = laid_out(workload.make_batches(1), layout)
    x, y = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(where), batch)

    def step() -> None:
        optimizer.zero_grad()
        with setting.autocast():
            total, count = workload.loss(module(**x) if isinstance(x, dict) else module(x), y)
            loss = total / count
        loss.backward()
        optimizer.step()

    step()
    return count_traffic(step)


def _matmul_flops(where: torch.device, device: DeviceType, precision: GpuPrecision) -> float:
    side = _SIDE[device]
    left, right = (torch.randn(side, side, device=where, dtype=_DTYPES[precision]) for _ in range(2))
    into = torch.empty_like(left)
    return 2 * side**3 / _best_s(where, lambda: torch.mm(left, right, out=into))


def _copy_bytes_s(where: torch.device, device: DeviceType) -> float:
    size = _COPIED_BYTES[device]
    source = torch.zeros(size, device=where, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size / _best_s(where, lambda: target.copy_(source))


def _best_s(where: torch.device, work: Callable[[], object]) -> float:
    """Seconds of one of many in a row, the best of a few tries; the first try warms up."""
    seconds = []
    for _ in range(_TRIES):
        wait_for(where)
        began = time.perf_counter()
        for _ in range(_REPEATS):
            work()
        wait_for(where)
        seconds.append((time.perf_counter() - began) / _REPEATS)
    return min(seconds)
