"""This worker's shares of a model's tensors: cut out of whole ones, each of which may be freed afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep.parallel.first_weights import FirstWeights


def share_of(whole: Tensor, like: Tensor, order: Tensor | None = None) -> Tensor:
    """What of a tensor this worker holds. Nothing is sent.

    Args:
        whole: the tensor, of any device and dtype.
        like: the worker's own, which may be a DTensor, and without memory.
        order: the column that stands in each place, where the model's columns were put in another order.

    Returns:
        A plain tensor; where a share is all, it may be ``whole`` itself.
    """
    if not isinstance(like, DTensor):
        return whole if order is None else whole[..., order]
    if order is None:
        cut = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return cut.to_local()
    if not like.placements[0].is_shard(whole.ndim - 1):
        return whole[..., order]
    own = distribute_tensor(order, like.device_mesh, [Shard(0)], src_data_rank=None).to_local()
    return whole[..., own.to(whole.device)]


def fill(
    module: nn.Module, weights: FirstWeights, orders: Mapping[str, Tensor], device: torch.device | None = None
) -> None:
    """Gives all tensors of a divided module that are on the meta device their first values, one after another.

    Args:
        module: a part of the model; its ties stay.
        weights: the whole model's.
        orders: as ``Division.orders`` has them.
        device: where they go; None is the CPU.
    """
    blanks = list(_blanks(module))
    most = max((weights.bytes_of(name) for name, _, _ in blanks), default=0)
    memory = torch.empty(most, dtype=torch.uint8, device="cpu")
    filled: dict[int, tuple[Tensor, Tensor]] = {}  # beside the new one the old, so that no other gets its id
    for name, held, attribute in blanks:
        blank = held[attribute]
        if id(blank) not in filled:
            filled[id(blank)] = blank, _filled(blank, weights.make(name, memory), orders.get(name), device)
        held[attribute] = filled[id(blank)][1]


def _blanks(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Of each tensor on the meta device its name, what holds it, and under which attribute."""
    for prefix, part in module.named_modules():
        held: dict[str, Any]
        for held in (part._parameters, part._buffers):
            for attribute, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    yield f"{prefix}.{attribute}" if prefix else attribute, held, attribute


@torch.no_grad()
def _filled(blank: Tensor, whole: Tensor, order: Tensor | None, device: torch.device | None) -> Tensor:
    own = share_of(whole, blank, order)
    own = own if device is None else own.to(device)
    if own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        own = own.clone()  # what is made next takes the whole's memory
    if isinstance(blank, DTensor):
        own = DTensor.from_local(
            own, blank.device_mesh, blank.placements, run_check=False, shape=blank.shape, stride=blank.stride()
        )
    if isinstance(blank, nn.Parameter):
        return nn.Parameter(own, requires_grad=blank.requires_grad)
    return own
