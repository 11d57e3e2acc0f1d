"""The full names of a family's modules in one model, and how torch's ``parallelize_module`` is to divide each."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from lockstep.parallel.conv1d import ColumnwiseConv1D, RowwiseConv1D
from lockstep.parallel.families import Family, HasConfig
from lockstep.parallel.sequences import TOKENS


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
