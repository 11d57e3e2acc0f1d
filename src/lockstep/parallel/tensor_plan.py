"""How the layers of a model are divided among tensor ranks: torch's ``parallelize_module`` with a plan for its family.

    words  vocabulary divided -> sum       column pairs -> own heads, own part of the inner layer -> row pairs -> sum
    head   vocabulary divided -> scores of all words

Everything between these is whole, and alike, on all tensor ranks (Shoeybi et al. 2019, "Megatron-LM").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lockstep.errors import ConfigError
from lockstep.parallel.conv1d import ColumnwiseConv1D, RowwiseConv1D, column_order
from lockstep.parallel.families import Family, HasConfig, known_family
from lockstep.parallel.grid import check_divides

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


def divide_layers(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> Division:
    """Divides a module, whole on every tensor rank and alike there, in place. Nothing is sent.

    Args:
        module: the model, or a stage of it.
        plan: "auto", or the user's own.
        mesh: of the tensor ranks.

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
    parallelize_module(module, mesh, names.styles(), src_data_rank=None)
    for owner, attribute in names.scaled():
        part = module.get_submodule(owner)
        setattr(part, attribute, getattr(part, attribute) // degree)
    _tie(module, ties)
    return Division(orders=orders, apart=names.apart(), together=names.together())


class Names:
    """The full names of a family's modules in one model.

    Args:
        module: the model, with or without a head.
        family: its family.
    """

    def __init__(self, module: nn.Module, family: Family) -> None:
        self._module, self._family = module, family
        prefix = module.base_model_prefix if isinstance(module, HasConfig) else ""
        self._base = f"{prefix}." if prefix in dict(module.named_children()) else ""
        layers = module.get_submodule(f"{self._base}{family.layers}")
        self._layers = [f"{self._base}{family.layers}.{number}." for number, _ in layers.named_children()]

    def styles(self) -> dict[str, ParallelStyle]:
        """How each linear layer and embedding that the model has is divided."""
        columns, rows = self._of_layers(self._family.columns), self._of_layers(self._family.rows)
        found: dict[str, ParallelStyle] = {name: self._columnwise(name) for name in columns}
        found |= {name: self._rowwise(name) for name in rows}
        words = self._weighty([self._base + self._family.words])
        found |= {name: RowwiseParallel(input_layouts=Replicate()) for name in words}
        found |= {name: ColwiseParallel(output_layouts=Replicate()) for name in self._weighty(self._family.heads)}
        return found

    def fused(self) -> list[tuple[str, int]]:
        """The layers that make several outputs in one, and how many."""
        parts = dict(self._family.fused)
        return [(name, parts[short]) for short in parts for name in self._of_layers([short])]

    def scaled(self) -> list[tuple[str, str]]:
        """Modules and their attributes that are divided."""
        return [(name, attribute) for short, attribute in self._family.scaled for name in self._of_layers([short])]

    def apart(self) -> tuple[str, ...]:
        """Modules that draw dropout on their own part."""
        return self._of_layers(self._family.apart)

    def together(self) -> tuple[str, ...]:
        """Modules inside those that draw alike on all tensor ranks."""
        return self._of_layers(self._family.together)

    def _of_layers(self, names: Any) -> tuple[str, ...]:
        return self._present([layer + name for layer in self._layers for name in names])

    def _present(self, names: Any) -> tuple[str, ...]:
        modules = dict(self._module.named_modules(remove_duplicate=False))
        return tuple(name for name in names if name in modules)

    def _weighty(self, names: Any) -> tuple[str, ...]:
        """Of modules, those of this stage: what stands for another stage's has no weight."""
        weights = dict(self._module.named_parameters(remove_duplicate=False))
        return tuple(name for name in names if f"{name}.weight" in weights)

    def _columnwise(self, name: str) -> ParallelStyle:
        return ColwiseParallel() if self._is_linear(name) else ColumnwiseConv1D()

    def _rowwise(self, name: str) -> ParallelStyle:
        return RowwiseParallel() if self._is_linear(name) else RowwiseConv1D()

    def _is_linear(self, name: str) -> bool:
        return isinstance(self._module.get_submodule(name), nn.Linear)


def _check_sizes(module: nn.Module, family: Family, degree: int) -> None:
    config: Any = module.config if isinstance(module, HasConfig) else None
    sizes = [(name, int(getattr(config, name))) for name in family.sizes]
    check_divides("tensor", degree, sizes)


def _reorder(module: nn.Module, linear: str, parts: int, degree: int) -> dict[str, torch.Tensor]:
    part = module.get_submodule(linear)
    found = {}
    for name, parameter in part.named_parameters(recurse=False):
        order = column_order(parameter.shape[-1], parts, degree)
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
