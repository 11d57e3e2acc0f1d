"""GPT-2's linear layers, transformers' ``Conv1D``, divided among tensor ranks: styles as torch has them for nn.Linear.

    weight [in, out], y = x W + b        columns: W and b divided along out        rows: W divided along in, b whole

A layer that makes query, key and value in one is divided so that each rank has its part of all three: its columns are
put in that order before, by ``column_order``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement


class ColumnwiseConv1D(ParallelStyle):
    """Divides the outputs; takes whole inputs, gives this rank's part of the last dimension."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            _place(part, "weight", mesh, Shard(1), self.src_data_rank)
            _place(part, "bias", mesh, Shard(0), self.src_data_rank)

        return distribute_module(module, device_mesh, divide, _taking(Replicate()), _giving(Shard(-1)))


class RowwiseConv1D(ParallelStyle):
    """Divides the inputs; takes this rank's part of the last dimension.

    Args:
        output: how what it gives is placed; None is whole.
    """

    def __init__(self, output: Placement | None = None) -> None:
        self._output = Replicate() if output is None else output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            _place(part, "weight", mesh, Shard(0), self.src_data_rank)
            _place(part, "bias", mesh, Replicate(), self.src_data_rank)

        return distribute_module(module, device_mesh, divide, _taking(Shard(-1)), _giving(self._output))


def column_order(width: int, parts: int, degree: int) -> Tensor:
    """The columns of a layer that makes ``parts`` outputs in one, so that equal shares hold a share of each output.

    Example:
        >>> column_order(6, 3, 2).tolist()  # q0 q1 k0 k1 v0 v1 -> q0 k0 v0, q1 k1 v1
        [0, 2, 4, 1, 3, 5]
    """
    return torch.arange(width).reshape(parts, degree, -1).transpose(0, 1).reshape(-1)


def _place(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    whole = module.get_parameter(name)
    placed = distribute_tensor(whole, mesh, [placement], src_data_rank=source)
    module.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))


def _taking(placement: Placement) -> Any:
    def take(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        given = inputs[0]
        return given if isinstance(given, DTensor) else DTensor.from_local(given, mesh, [placement], run_check=False)

    return take


def _giving(placement: Placement) -> Any:
    def give(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[placement]).to_local()

    return give
