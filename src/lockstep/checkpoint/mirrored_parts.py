"""The states of mirrored modules, optimizers and variables: given to checkpoints, and taken back on any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.checkpoint.kinds import check_kind
from lockstep.checkpoint.optimizer_names import Names, check_state, in_order, kind_of
from lockstep.checkpoint.part import Part, PartState, SavedPart
from lockstep.checkpoint.weights import check_fit
from lockstep.collectives.reduce import sum_tensors
from lockstep.errors import CheckpointError
from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.variable import MirroredVariable


class ModulePart(Part):
    """A mirrored module: its state_dict as weights, and each replica's buffers."""

    def __init__(self, module: MirroredModule) -> None:
        self._module = module

    def state(self) -> PartState:
        """The weights with averaged buffers, and the buffers of each copy, those that no state_dict has included."""
        self._module.exchange_buffers()
        state = self._module.state_dict()
        return PartState(
            shared={key: value for key, value in state.items() if not isinstance(value, torch.Tensor)},
            replicas=[dict(duplicate.named_buffers()) for duplicate in self._module.copies],
            weights={key: value for key, value in state.items() if isinstance(value, torch.Tensor)},
        )

    def check(self, saved: SavedPart) -> None:
        """The keys and shapes must be the module's."""
        check_kind(saved.shared, dict[str, Any], "state_dict")
        check_kind(saved.replicas, list[dict[str, torch.Tensor]], "buffers")
        state = self._module.module.state_dict()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        check_fit(saved.weights, tensors, saved.source)

    @torch.no_grad()
    def load(self, saved: SavedPart) -> None:
        """Each replica gets its own buffers back; on another layout all get the averages."""
        self._module.load_state_dict({**saved.weights, **saved.shared})
        own = saved.own
        averages = _averages(saved.replicas) if saved.replicas else {}  # of a divided module they are in the weights
        buffers = own if own is not None else [averages] * len(self._module.copies)
        for duplicate, values in zip(self._module.copies, buffers, strict=True):
            for name, buffer in duplicate.named_buffers():
                if name in values:
                    buffer.copy_(values[name])


class OptimizerPart(Part):
    """An optimizer, mirrored or not: state and hyperparameters of all groups.

    Args:
        optimizer: whose.
        names: of its parameters; None where they are not known.
    """

    def __init__(self, optimizer: Optimizer, names: Names | None = None) -> None:
        self._optimizer, self._names = optimizer, names

    def state(self) -> PartState:
        """The plain optimizer's state_dict, and the names of its parameters."""
        named = {} if self._names is None else {"names": self._names}
        return PartState(shared={"kind": kind_of(self._optimizer), **named, "state": self._optimizer.state_dict()})

    def check(self, saved: SavedPart) -> None:
        """It must be of the same class, with as many parameters in each group."""
        check_state(saved.shared, self._optimizer)
        kind, groups = saved.shared["kind"], saved.shared["state"]["param_groups"]
        theirs = [len(group["params"]) for group in groups]
        ours = [len(group["params"]) for group in self._optimizer.param_groups]
        if kind != kind_of(self._optimizer) or theirs != ours:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} the state of a {kind} with {_sizes(theirs)} parameters, but it "
                f"is a {kind_of(self._optimizer)} with {_sizes(ours)}; make the optimizer as it was when that was saved"
            )

    def load(self, saved: SavedPart) -> None:
        """Takes state and hyperparameters, the learning rate included."""
        self._optimizer.load_state_dict(in_order(saved.shared, self._names))


class VariablePart(Part):
    """A mirrored variable: every replica's value."""

    def __init__(self, variable: MirroredVariable) -> None:
        self._variable = variable

    def state(self) -> PartState:
        """The values of the local replicas."""
        return PartState(replicas=list(self._variable.values))

    def check(self, saved: SavedPart) -> None:
        """The shapes must be the same."""
        check_kind(saved.replicas, list[torch.Tensor], "values")
        ours, theirs = self._variable.values[0].shape, saved.replicas[0].shape
        if ours != theirs:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} a variable of shape {tuple(theirs)} instead of {tuple(ours)}; "
                "make the variable as it was when that was saved"
            )

    @torch.no_grad()
    def load(self, saved: SavedPart) -> None:
        """Each replica gets its own value back; on another layout what a read outside gives stays the same."""
        own = saved.own
        if own is not None:
            for value, before in zip(self._variable.values, own, strict=True):
                value.copy_(before)
            return
        on_read = self._variable.synchronization == "on_read"
        first, rest = saved.replicas[0], torch.zeros_like(saved.replicas[0])
        if on_read and self._variable.aggregation == "sum":
            # The whole sum to the chief's first replica: a division would round, and integers cannot be divided.
            first = sum_tensors(list(saved.replicas))
        elif on_read and self._variable.aggregation == "mean":
            first = rest = sum_tensors(list(saved.replicas)) / len(saved.replicas)
        else:
            rest = first
        for number, value in enumerate(self._variable.values, start=saved.first_replica):
            value.copy_(rest if number else first)


def _averages(replicas: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of each floating buffer, and the first replica's of the others and of those that are equal anyway."""
    first = replicas[0]
    means: dict[str, torch.Tensor] = {}
    for name, value in first.items():
        values = [each[name] for each in replicas]
        equal = not value.is_floating_point() or all(torch.equal(value, other) for other in values[1:])
        means[name] = value if equal else sum_tensors(values) / len(values)
    return means


def _sizes(groups: Sequence[int]) -> str:
    return " + ".join(map(str, groups))
