"""What a step costs: its FLOPs, by torch's own counter, and the bytes that its operators read and write.

FLOPs are counted on the meta device, where nothing is computed: matrix products and convolutions, forward and backward,
attention as its plain products. Bytes are an estimate: of each operator that runs, the sizes of its inputs and outputs,
as if nothing stayed in a cache. They are those of the eager step; a compiler that fuses operators moves fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.trial import Workload

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One training step of the whole global batch.

    Args:
        flops: additions and multiplications, of forward and backward pass.
        traffic_bytes: read and written by forward and backward pass and optimizer.
    """

    flops: float
    traffic_bytes: float


def count_flops(workload: Workload) -> int:
    """FLOPs of forward and backward pass of a global batch; computes nothing."""
    with torch.device("meta"):
        module = workload.make_module().train()
    x, y = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), workload.make_batches(1)[0])
    own = {torch.ops.aten.convolution_backward: _convolution_backward}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=own) as counter:
        total, _ = workload.loss(module(**x) if isinstance(x, dict) else module(x), y)
        total.backward()  # type: ignore[no-untyped-call]
    flops: int = counter.get_total_flops()
    return flops


def _convolution_backward(
    gradient: Sequence[int], _: Sequence[int], weight: Sequence[int], *rest: Any, **__: Any
) -> int:
    """FLOPs of the gradients that are wanted, each those of the forward pass.

    torch 2.13's own formula takes a depthwise convolution's gradient of the weights for that of a full one, which makes
    MobileNetV2's step seven times what it is.

    Args:
        gradient: shape of the output's.
        weight: shape [channels out, channels in / groups, ...].
        rest: bias, stride, padding, dilation, transposed, output padding, groups, which gradients are wanted.
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
