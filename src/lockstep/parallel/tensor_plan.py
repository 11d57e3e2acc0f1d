"""How the layers of a model are divided among tensor ranks: torch's ``parallelize_module`` with a plan for its family.

    words  vocabulary divided -> sum       column pairs -> own heads, own part of the inner layer -> row pairs -> sum
    head   vocabulary divided -> scores of own words -> the loss of all, or else the scores of all words

Everything between these is whole, and alike, on all tensor ranks (Shoeybi et al. 2019, "Megatron-LM").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lockstep.errors import ConfigError
from lockstep.parallel.conv1d import column_order
from lockstep.parallel.families import Family, HasConfig, known_family
from lockstep.parallel.family_names import Names
from lockstep.parallel.grid import check_divides
from lockstep.parallel.scores import scores_of
from lockstep.parallel.vocabulary import Vocabulary

TensorPlan = Literal["auto"] | Mapping[str, ParallelStyle]
"""Names of modules, with "*" for any, and how each is divided; or "auto"."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a module was divided.

    Args:
        orders: per parameter whose columns were put in another order, by name: the column that stands in each place.
        apart: the names of modules that draw random numbers for their own part.
        together: the names of modules inside those that draw alike on all tensor ranks.
    """

    orders: Mapping[str, torch.Tensor] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    together: tuple[str, ...] = ()


WHOLE = Division()


def divide_layers(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, sequences: bool = False) -> Division:
    """Divides a module, whole on every tensor rank and alike there, in place. Nothing is sent.

    Args:
        module: the model, or a stage of it.
        plan: "auto", or the user's own.
        mesh: of the tensor ranks.
        sequences: whether what is between the divided layers works on this rank's part of the sequences; with "auto".

    Raises:
        ConfigError: a module of no known family, or sizes that the number of ranks does not divide.
    """
    degree = mesh.size()
    if degree == 1:
        return Division()
    ties = ties_of(module)
    if plan != "auto":
        if not isinstance(plan, Mapping):
            raise ConfigError(f'tensor_plan={plan!r} is unknown; give "auto", or a dict of module names to styles')
        parallelize_module(module, mesh, dict(plan), src_data_rank=None)
        _tie(module, ties)
        return Division()
    family = known_family(module, 'tensor_plan="auto"')
    _check_sizes(module, family, degree)
    names = Names(module, family)
    orders: dict[str, torch.Tensor] = {}
    for linear, parts in names.fused():
        orders |= _reorder(module, linear, parts, degree)
    parallelize_module(module, mesh, names.styles(sequences=sequences), src_data_rank=None)
    for owner, attribute in names.scaled():
        part = module.get_submodule(owner)
        setattr(part, attribute, getattr(part, attribute) // degree)
    _tie(module, ties)
    for name in names.heads():
        _give_scores(module.get_submodule(name), mesh)
    return Division(orders=orders, apart=names.apart(sequences=sequences), together=names.together(sequences=sequences))


def _check_sizes(module: nn.Module, family: Family, degree: int) -> None:
    config: Any = module.config if isinstance(module, HasConfig) else None
    sizes = [(name, int(getattr(config, name))) for name in family.sizes]
    check_divides("tensor", degree, sizes)


def _give_scores(head: nn.Module, mesh: DeviceMesh) -> None:
    """Has a head that gives the scores of its rank's words give those of all."""
    words: Any = head.out_features
    vocabulary = Vocabulary(words=words, rank=mesh.get_local_rank(), ranks=mesh.size(), group=mesh.get_group())
    head.register_forward_hook(lambda _, __, part: scores_of(part, vocabulary))


def _reorder(module: nn.Module, linear: str, parts: int, degree: int) -> dict[str, torch.Tensor]:
    part = module.get_submodule(linear)
    found = {}
    for name, parameter in part.named_parameters(recurse=False):
        order = column_order(parameter.shape[-1], parts, degree)
        if not parameter.is_meta:
            with torch.no_grad():
                parameter.copy_(parameter[..., order].clone())
        found[f"{linear}.{name}"] = order
    return found


def ties_of(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie(module: nn.Module, ties: list[list[str]]) -> None:
    """Makes each group of names one parameter again: torch divides a module's parameters one by one."""
    for names in ties:
        divided = [name for name in names if isinstance(module.get_parameter(name), DTensor)] or names
        shared = module.get_parameter(divided[0])
        for name in names:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner).register_parameter(attribute, shared)
