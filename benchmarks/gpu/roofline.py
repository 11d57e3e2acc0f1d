"""The device's rates, measured in the same run, and the roofline of a step: its work over those rates.

roofline = the larger of  FLOPs / rate of large matrix products   and   bytes / rate of large copies
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.loops import DeviceType, Pace, Setting, begin_process, wait_for
from benchmarks.gpu.workloads import PRECISIONS, GpuPrecision, Sizes, gpu_workloads, precision_of
from benchmarks.loops import adam, call, laid_out, memory_format
from benchmarks.suites.cpu import layouts_of
from benchmarks.trial import Workload

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One training step of the whole global batch."""

    flops: float  # additions and multiplications, of forward and backward pass
    traffic_bytes: float  # read and written by forward and backward pass and optimizer


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


def count_traffic(step: Callable[[], None]) -> int:
    """Bytes that a step's operators read and write."""
    with TrafficCounter() as counter:
        step()
        total: int = counter.total_bytes
    return total


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the sizes of the inputs and outputs of every operator that runs inside.

    Views and allocations move nothing; what an operator changes in place is read and written; of a tensor that repeats
    its elements only the memory behind it counts.

    Attributes:
        total_bytes: so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in _ALLOCATIONS:
            written = _written(func, args, kwargs or {})
            changed = {id(tensor) for tensor in written}
            outputs = [tensor for tensor in _tensors(result) if id(tensor) not in changed]
            self.total_bytes += sum(map(_bytes, (*_tensors((args, kwargs)), *written, *outputs)))
        return result


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operator's schema says it writes."""
    named = [*zip(func._schema.arguments, args, strict=False)]
    named += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    written = [given for argument, given in named if argument.alias_info is not None and argument.alias_info.is_write]
    return _tensors(written)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


_DTYPES: Mapping[GpuPrecision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SIDE: Mapping[DeviceType, int] = {"cuda": 8192, "cpu": 256}
_COPIED_BYTES: Mapping[DeviceType, int] = {"cuda": 2**30, "cpu": 2**22}
_REPEATS, _TRIES = 10, 3
_MB = 2**20


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the device is and what it does at best."""

    name: str  # as the driver says
    memory_mb: float  # all of it
    used_mb: float  # what others had of it before the run began
    capability: str  # such as "9.0"; empty for a CPU
    # FLOPs a second of large matrix products, by precision; fp32 with TF32 allowed
    matmul_flops: Mapping[GpuPrecision, float]
    copy_bytes_s: float  # bytes read and written a second by a large copy within the device
    costs: Mapping[str, StepCost]  # of a step, by workload; without those whose eager step does not fit the device
    trouble: str = ""  # why rates or costs are missing; empty where none is

    def roofline(self, workload: str) -> Roofline | None:
        """The roofline of a workload's step, by its name; None where something that it needs is missing."""
        cost, rate = self.costs.get(workload), self.matmul_flops.get(precision_of(workload))
        if cost is None or rate is None:
            return None
        traffic_ms = 1000 * cost.traffic_bytes / self.copy_bytes_s
        return Roofline(compute_ms=1000 * cost.flops / rate, traffic_ms=traffic_ms)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What a step cannot be faster than."""

    compute_ms: float  # its FLOPs at the rate of large matrix products. Nothing on this device is faster.
    traffic_ms: float  # the eager step's bytes at the rate of large copies. Fused operators move fewer.

    @property
    def ms(self) -> float:
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
    """What the device is called and has, without any rate; ``trouble`` says why there is none."""
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
    setting = Setting(device=device, precision=precision_of(workload.name), pace=Pace(warm_up=1, lap_steps=1, laps=1))
    where, layout = setting.torch_device, layouts_of(workload.name.partition("-")[0])[0]
    module = workload.make_module().train().to(device=where, memory_format=memory_format(layout))  # type: ignore[call-overload]
    optimizer = adam(workload, module)
    (batch,) = laid_out(workload.make_batches(1), layout)
    x, y = tree_map_only(Tensor, lambda tensor: tensor.to(where), batch)

    def step() -> None:
        optimizer.zero_grad()
        with setting.autocast():
            total, count = workload.loss(call(module, x), y)
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
