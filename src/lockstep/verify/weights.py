"""The parameters and buffers of a strategy's mirrored modules, by name, and what they were when last looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.mirroring.module import MirroredModule
from lockstep.replicas.context import ReplicaContext
from lockstep.strategies.base import Strategy


class Weights:
    """Names are the module's own; with several mirrored modules, the module's class stands before them.

    Args:
        strategy: whose modules they are; those that it mirrors later are found too.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._modules: list[MirroredModule] = []
        self._labels: list[str] = []
        self._names: list[dict[int, str]] = [{} for _ in strategy.devices]
        self._last: dict[str, Tensor] = {}
        self.find_modules()

    @property
    def unit(self) -> float:
        """The relative rounding error of the coarsest type among the parameters."""
        types = {parameter.dtype for parameter in self.all().values() if parameter.is_floating_point()}
        return max((torch.finfo(kind).eps for kind in types), default=torch.finfo(torch.float32).eps)

    def names(self, context: ReplicaContext, parameters: Sequence[nn.Parameter]) -> list[str]:
        """What a replica's parameters are called."""
        known = self._names[context.replica_id_in_sync_group]
        return [
            known.get(id(parameter), f"parameter {number} of the optimizer")
            for number, parameter in enumerate(parameters)
        ]

    def name_of(self, module: MirroredModule) -> str:
        """What a mirrored module is called."""
        labels = [label for label, each in zip(self._labels, self._modules, strict=True) if each is module]
        return "".join(labels).removesuffix(".") or type(module.module).__name__

    def all(self) -> dict[str, nn.Parameter]:
        """Replica 0's parameters of all modules."""
        return {
            f"{label}{name}": parameter
            for label, module in zip(self._labels, self._modules, strict=True)
            for name, parameter in module.module.named_parameters()
        }

    def take_all(self) -> dict[str, Tensor]:
        """Copies of all parameters; they are what later changes are measured from."""
        return self.take(self.all())

    def take(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of these parameters; they are what later changes are measured from."""
        taken = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}
        self._last.update(taken)
        return taken

    def changed(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that are not what they were when looked at last, as they are now."""
        fresh = {
            name: parameter.detach().cpu()
            for name, parameter in parameters.items()
            if name in self._last and not torch.equal(parameter.detach().cpu(), self._last[name])
        }
        return self.take(fresh)

    @torch.no_grad()
    def put_back(self) -> None:
        """Gives all replicas' parameters the values of the last look."""
        for label, module in zip(self._labels, self._modules, strict=True):
            for duplicate in module.copies:
                for name, parameter in duplicate.named_parameters():
                    if f"{label}{name}" in self._last:
                        parameter.copy_(self._last[f"{label}{name}"])

    def buffers(self) -> dict[str, Tensor]:
        """All modules' buffers, averaged over the replicas. Outside replicas; every worker must call it."""
        for module in self._modules:
            module.exchange_buffers()
        return {
            f"{label}{name}": buffer.detach().to("cpu", copy=True)
            for label, module in zip(self._labels, self._modules, strict=True)
            for name, buffer in module.named_buffers()
        }

    def find_modules(self) -> None:
        """Looks for modules that were mirrored since. Outside replicas."""
        known = {id(module) for module in self._modules}
        self._modules += [module for module in self._strategy.mirrored_modules if id(module) not in known]
        self._labels = _labels([type(module.module).__name__ for module in self._modules])
        for replica, names in enumerate(self._names):
            for label, module in zip(self._labels, self._modules, strict=True):
                named = module.copies[replica].named_parameters()
                names.update({id(parameter): f"{label}{name}" for name, parameter in named})


def _labels(classes: Sequence[str]) -> list[str]:
    """What stands before a module's names: nothing for a lone module; a class that is there again gets a number."""
    if len(classes) == 1:
        return [""]
    total, seen = Counter(classes), Counter[str]()
    labels = []
    for each in classes:
        seen[each] += 1
        labels.append(f"{each}{seen[each]}." if total[each] > 1 else f"{each}.")
    return labels
