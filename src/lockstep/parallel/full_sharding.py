"""Full sharding: each replica keeps a share of the weights, gradients and state, and borrows the rest layer by layer.

    forward    layer k: gather its weights -> compute -> free them        torch's ``fully_shard``, whose means are made
    backward   layer k: gather -> compute -> sum gradients, keep a share  sums here

Zhao et al. 2023, "PyTorch FSDP"; ZeRO's third stage (Rajbhandari et al. 2019). The stages of a pipeline are shared in
``stage_sharding``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lockstep.errors import ConfigError


def shard_fully(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves each worker of ``mesh`` its share of every parameter, in place. All must call it; nothing is sent.

    Afterwards all of them must take part in each forward and backward pass, whether or not they have rows.

    Raises:
        ConfigError: a parameter that is a single number.
    """
    check_shareable(module)
    for unit in [*units_of(module), module]:
        # The whole too: what is not in a layer would else stay gathered after an evaluation.
        share(unit, mesh, reshard_after_forward=True)


def share(unit: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool) -> FSDPModule:
    """One ``fully_shard``, whose gradients are summed over ``mesh`` and not averaged."""
    made = fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    made.set_gradient_divide_factor(1.0)
    made.set_force_sum_reduction_for_comms(True)
    return made


def check_shareable(module: nn.Module) -> None:
    """Refuses a module that cannot be shared.

    Raises:
        ConfigError: a parameter is a single number.
    """
    for name, parameter in module.named_parameters():
        if not parameter.ndim:
            raise ConfigError(f"{name} is a single number, which cannot be shared; choose shard_optimizer=True alone")


def units_of(module: nn.Module) -> list[nn.Module]:
    """What is gathered and freed at a time: the members of the outermost lists of modules, usually the layers.

    One that shares a parameter with another part is left out, and gathered with the rest.
    """
    return apart(_members(module), module)


def apart(parts: Iterable[nn.Module], module: nn.Module) -> list[nn.Module]:
    """Those parts of a module that have parameters, and share none with another part."""
    names = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    return [part for part in parts if _is_apart(part, names)]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield child
        else:
            yield from _members(child)


def _is_apart(unit: nn.Module, names: Counter[int]) -> bool:
    own = Counter(id(each) for _, each in unit.named_parameters(remove_duplicate=False))
    return bool(own) and all(names[each] == count for each, count in own.items())
