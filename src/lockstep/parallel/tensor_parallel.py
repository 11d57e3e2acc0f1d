"""Divides the layers of a model among tensor ranks, and says which part of each tensor a rank then has.

    TensorDivision (``tensor_plan``) -> torch's ``parallelize_module`` with its styles -> parameters as DTensors

A weight that has several names stays one weight. Where a layer makes several outputs in one, such as query, key and
value, its columns are put into another order first, so that equal shares hold a share of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import parallel as tp

from lockstep._torch_compat import dtensor_chunks
from lockstep.parallel.regions import Region, whole_region
from lockstep.parallel.tensor_plan import ColumnOrder, TensorDivision
from lockstep.parallel.vocab_parallel import VocabShard, vocab_parallel_logits


def shard_layers(module: nn.Module, division: TensorDivision, mesh: DeviceMesh) -> None:
    """Divides a module, alike on every tensor rank of ``mesh``, in place. Nothing is sent.

    It may be one stage's part of a model; ``division`` is for the modules that it has.
    """
    ties = ties_of(module)
    # Before the weights are divided, for the order decides which columns are in a rank's part.
    reorder(module, division.orders)
    # src_data_rank=None: each rank has the whole weights, equal on all, and cuts its part. By default torch would
    # scatter rank 0's.
    tp.parallelize_module(module, mesh, dict(division.styles), src_data_rank=None)
    if division.has_plain_buffers:
        _make_buffers_plain(module)
    for name, attribute in division.scaled.items():
        part = module.get_submodule(name)
        setattr(part, attribute, getattr(part, attribute) // mesh.size())
    _tie(module, ties)
    for name in division.heads:
        _give_logits(module.get_submodule(name), mesh)


@torch.no_grad()
def reorder(module: nn.Module, orders: Mapping[str, ColumnOrder]) -> None:
    """Puts parameters into the order of a division. On the meta device they are when they get values, by others."""
    for name, order in orders.items():
        parameter = module.get_parameter(name)
        if not parameter.is_meta:
            parameter.copy_(parameter.index_select(order.dim, order.columns.to(parameter.device)))


def _make_buffers_plain(module: nn.Module) -> None:
    """Undoes that torch makes buffers of divided modules DTensors, such as the scale of an embedding."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if isinstance(buffer, DTensor):
                part._buffers[name] = buffer.to_local()


def _give_logits(head: nn.Module, mesh: DeviceMesh) -> None:
    """Has a head, which computes this rank's logits, return those of the whole vocabulary."""
    size: Any = head.out_features
    vocabulary = VocabShard(size=size, rank=mesh.get_local_rank(), ranks=mesh.size(), group=mesh.get_group())
    head.register_forward_hook(lambda _, __, part: vocab_parallel_logits(part, vocabulary))


def local_shard(whole: Tensor, like: Tensor, order: ColumnOrder | None = None) -> Tensor:
    """This worker's plain shard of ``whole``, placed as its own tensor ``like``, reordered by ``order``."""
    if not isinstance(like, DTensor):
        return whole
    if order is not None:
        whole = whole.index_select(order.dim, order.columns.to(whole.device))
    # src_data_rank=None: every worker cuts its part from the same whole tensor, and nothing is sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def region_of(value: Tensor, order: ColumnOrder | None = None) -> Region:
    """The place in the whole tensor of this worker's shard ``value``, which stands in ``order``."""
    region = whole_region(value.shape)
    if not isinstance(value, DTensor):
        return region
    (chunk,) = dtensor_chunks(value)
    region = replace(region, sizes=tuple(chunk.sizes), offsets=tuple(chunk.offsets))
    if order is None:
        return region
    begin = region.offsets[order.dim]
    columns = order.columns[begin : begin + region.sizes[order.dim]]
    return replace(region, dim=order.dim, columns=tuple(columns.tolist()))


def ties_of(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(module: nn.Module, ties: list[list[str]]) -> None:
    """Makes each group of names one parameter again: torch divides a module's parameters one by one."""
    for names in ties:
        # torch divides under one name of a tied weight and leaves the others the whole one, so the divided one stands
        # in for all.
        divided = [name for name in names if isinstance(module.get_parameter(name), DTensor)] or names
        parameter = module.get_parameter(divided[0])
        for name in names:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner).register_parameter(attribute, parameter)
