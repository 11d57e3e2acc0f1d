"""Divides the layers of a model among tensor ranks, and says which part of each tensor a rank then has.

    plan (``tensor_plan``) -> torch's ``parallelize_module`` with styles (``tensor_styles``) -> parameters as DTensors

A weight that has several names stays one weight. Where a layer makes several outputs in one, such as query, key and
value, its columns are put into another order first, so that equal shares hold a share of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp

from lockstep._torch_compat import dtensor_chunks
from lockstep.parallel.model_specs import require_model_spec
from lockstep.parallel.regions import Region, whole_region
from lockstep.parallel.tensor_plan import DividedModel, TensorPlan, local_styles
from lockstep.parallel.vocab_parallel import VocabShard, vocab_parallel_logits


@dataclass(frozen=True, kw_only=True)
class TensorSharding:
    """How a module was divided."""

    # by name, for each parameter that was reordered along its divided dim: the index of what stands in each place
    orders: Mapping[str, Tensor] = field(default_factory=dict)
    rank_rng: tuple[str, ...] = ()  # the names of modules that draw random numbers for their own part
    common_rng: tuple[str, ...] = ()  # the names of modules inside those that draw alike on all tensor ranks


WHOLE = TensorSharding()


def shard_layers(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, sequences: bool = False) -> TensorSharding:
    """Divides a module, whole on every tensor rank of ``mesh`` and alike there, in place. Nothing is sent.

    ``sequences``: modules between divided layers work on this rank's part of the sequences; with the plan "auto".
    ``check_plan`` says beforehand whether it can be divided.
    """
    degree = mesh.size()
    if degree == 1:
        return WHOLE
    ties = ties_of(module)
    if plan != "auto":
        # src_data_rank=None: each rank has the whole weights, equal on all, and cuts its part. By default torch would
        # scatter rank 0's.
        tp.parallelize_module(module, mesh, local_styles(module, plan), src_data_rank=None)
        _tie(module, ties)
        return WHOLE
    model = DividedModel(module, require_model_spec(module, 'tensor_plan="auto"'))
    # Before the weights are divided, for the order decides which columns are in a rank's part.
    orders = model.reorder(degree)
    tp.parallelize_module(module, mesh, model.styles(sequences=sequences), src_data_rank=None)
    _make_buffers_plain(module)
    model.scale(degree)
    _tie(module, ties)
    for name in model.heads():
        _give_logits(module.get_submodule(name), mesh)
    rank_rng = model.rank_rng()
    if sequences:
        return TensorSharding(orders=orders, rank_rng=(*rank_rng, *model.dropouts(model.layer_names())))
    return TensorSharding(orders=orders, rank_rng=tuple(rank_rng), common_rng=tuple(model.dropouts(rank_rng)))


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


def local_shard(whole: Tensor, like: Tensor, order: Tensor | None = None) -> Tensor:
    """This worker's plain shard of ``whole``, placed as its own tensor ``like``, reordered by ``order``."""
    if not isinstance(like, DTensor):
        return whole
    if order is not None:
        whole = whole.index_select(ordered_dim(like), order.to(whole.device))
    # src_data_rank=None: every worker cuts its part from the same whole tensor, and nothing is sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def ordered_dim(like: DTensor) -> int:
    """The dim that tensor ranks divide, along which a parameter may have been reordered."""
    names = like.device_mesh.mesh_dim_names or ()
    placement = like.placements[names.index("tensor")]
    assert isinstance(placement, Shard)
    return placement.dim


def region_of(value: Tensor, order: Tensor | None = None) -> Region:
    """The place in the whole tensor of this worker's shard ``value``, which stands in ``order``."""
    region = whole_region(value.shape)
    if not isinstance(value, DTensor):
        return region
    (chunk,) = dtensor_chunks(value)
    region = replace(region, sizes=tuple(chunk.sizes), offsets=tuple(chunk.offsets))
    if order is None:
        return region
    dim = ordered_dim(value)
    begin = region.offsets[dim]
    return replace(region, dim=dim, columns=tuple(order[begin : begin + region.sizes[dim]].tolist()))


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
