"""Full sharding: replicas divide a model's weights, with PyTorch's FSDP. A layer is whole only while it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def shard_fully(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards every parameter over the workers of ``mesh``, in place. All must call it; nothing is sent.

    Afterwards all of them must take part in each forward and backward pass, whether or not they have rows.
    """
    for unit in [*units_of(module), module]:
        # The root too: parameters outside the layers would otherwise stay unsharded after an evaluation.
        sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        # FSDP averages gradients over the replicas. Losses here are divided by the global batch, so a sum is what one
        # device has.
        sharded.set_gradient_divide_factor(1.0)
        # torch 2.13: with a factor of its own FSDP would ask for ReduceOp.PREMUL_SUM, which gloo does not have.
        sharded.set_force_sum_reduction_for_comms(True)


def units_of(module: nn.Module) -> list[nn.Module]:
    """The modules that are unsharded at a time: the members of the outermost module lists, usually the layers.

    One that has a parameter in common with another module is left out, and unsharded with the rest.
    """

    def uses(part: nn.Module) -> Counter[int]:
        return Counter(id(parameter) for _, parameter in part.named_parameters(remove_duplicate=False))

    # FSDP frees the weights of a unit when it has computed. A weight that another unit uses would be gone for that one,
    # so such a unit is gathered with the root (tests/parallel/test_fsdp.py).
    in_all = uses(module)
    members = [(part, uses(part)) for part in _members(module)]
    return [
        part
        for part, counts in members
        if counts and all(in_all[parameter] == counts[parameter] for parameter in counts)
    ]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield child
        else:
            yield from _members(child)
