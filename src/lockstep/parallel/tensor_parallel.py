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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from lockstep.errors import ConfigError
from lockstep.parallel.mesh_layout import check_divides
from lockstep.parallel.model_specs import HasConfig, ModelSpec, require_model_spec
from lockstep.parallel.sequence_parallel import TOKENS
from lockstep.parallel.vocab_parallel import VocabShard, vocab_parallel_logits


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


class SpecNames:
    """The full names of a family's modules in one model.

    Args:
        module: the model, with or without a head.
        family: its family.
    """

    def __init__(self, module: nn.Module, family: ModelSpec) -> None:
        self._module, self._family = module, family
        prefix = module.base_model_prefix if isinstance(module, HasConfig) else ""
        self._base = f"{prefix}." if prefix in dict(module.named_children()) else ""
        layers = module.get_submodule(f"{self._base}{family.layers}")
        self._layers = [f"{self._base}{family.layers}.{number}." for number, _ in layers.named_children()]

    def styles(self, *, sequences: bool) -> dict[str, ParallelStyle]:
        """How each linear layer and embedding that the model has is divided.

        Args:
            sequences: whether what is between the divided layers works on this rank's part of the sequences.
        """
        output = Shard(TOKENS) if sequences else Replicate()
        columns, rows = self._of_layers(self._family.columns), self._of_layers(self._family.rows)
        found: dict[str, ParallelStyle] = {name: self._columnwise(name) for name in columns}
        found |= {name: self._rowwise(name, output) for name in rows}
        words = self._weighty([self._base + self._family.words])
        found |= {name: RowwiseParallel(input_layouts=Replicate()) for name in words}
        found |= {name: ColwiseParallel() for name in self.heads()}
        return {**found, **self._between()} if sequences else found

    def _between(self) -> dict[str, ParallelStyle]:
        """What is between the divided layers takes this rank's tokens, and those take all."""
        between, tokens, whole = self._family.between, Shard(TOKENS), Replicate()
        found: dict[str, ParallelStyle] = {}
        for name in self._of_layers(between.norms):
            found[name] = SequenceParallel(sequence_dim=TOKENS, use_local_output=True)
        for name in self._of_layers(between.regions):
            found[name] = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)
        for name in self._of_layers(between.regions_by_name):
            found[name] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": whole}
            )
        return found

    def heads(self) -> tuple[str, ...]:
        """The layers of this stage that score the words."""
        return self._weighty(self._family.heads)

    def layers(self) -> list[nn.Module]:
        """The layers, in order."""
        return [self._module.get_submodule(name.removesuffix(".")) for name in self._layers]

    def fused(self) -> list[tuple[str, int]]:
        """The layers that make several outputs in one, and how many."""
        parts = dict(self._family.fused)
        return [(name, parts[short]) for short in parts for name in self._of_layers([short])]

    def scaled(self) -> list[tuple[str, str]]:
        """Modules and their attributes that are divided."""
        return [(name, attribute) for short, attribute in self._family.scaled for name in self._of_layers([short])]

    def apart(self, *, sequences: bool) -> tuple[str, ...]:
        """Modules that draw dropout on their own part."""
        return self._of_layers([*self._family.apart, *(self._family.between.dropouts if sequences else ())])

    def together(self, *, sequences: bool) -> tuple[str, ...]:
        """Modules inside those that draw alike on all tensor ranks."""
        return () if sequences else self._of_layers(self._family.together)

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

    def _rowwise(self, name: str, output: Placement) -> ParallelStyle:
        return RowwiseParallel(output_layouts=output) if self._is_linear(name) else RowwiseConv1D(output)

    def _is_linear(self, name: str) -> bool:
        return isinstance(self._module.get_submodule(name), nn.Linear)


TensorPlan = Literal["auto"] | Mapping[str, ParallelStyle]
"""Names of modules, with "*" for any, and how each is divided; or "auto"."""


@dataclass(frozen=True, kw_only=True)
class TensorSharding:
    """How a module was divided.

    Args:
        orders: per parameter whose columns were put in another order, by name: the column that stands in each place.
        apart: the names of modules that draw random numbers for their own part.
        together: the names of modules inside those that draw alike on all tensor ranks.
    """

    orders: Mapping[str, torch.Tensor] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    together: tuple[str, ...] = ()


WHOLE = TensorSharding()


def shard_layers(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, sequences: bool = False) -> TensorSharding:
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
        return TensorSharding()
    ties = ties_of(module)
    if plan != "auto":
        if not isinstance(plan, Mapping):
            raise ConfigError(f'tensor_plan={plan!r} is unknown; give "auto", or a dict of module names to styles')
        parallelize_module(module, mesh, dict(plan), src_data_rank=None)
        _tie(module, ties)
        return TensorSharding()
    family = require_model_spec(module, 'tensor_plan="auto"')
    _check_sizes(module, family, degree)
    names = SpecNames(module, family)
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
    return TensorSharding(
        orders=orders, apart=names.apart(sequences=sequences), together=names.together(sequences=sequences)
    )


def _check_sizes(module: nn.Module, family: ModelSpec, degree: int) -> None:
    config: Any = module.config if isinstance(module, HasConfig) else None
    sizes = [(name, int(getattr(config, name))) for name in family.sizes]
    check_divides("tensor", degree, sizes)


def _give_scores(head: nn.Module, mesh: DeviceMesh) -> None:
    """Has a head that gives the scores of its rank's words give those of all."""
    words: Any = head.out_features
    vocabulary = VocabShard(size=words, rank=mesh.get_local_rank(), ranks=mesh.size(), group=mesh.get_group())
    head.register_forward_hook(lambda _, __, part: vocab_parallel_logits(part, vocabulary))


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
