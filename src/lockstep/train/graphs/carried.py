"""What one step hands to the next besides weights: gradients that wait for their update, and the sums of the losses.

    step 1 of a cycle --gradients, sums--> step 2 --...--> the step with the update --nothing-->

In a recorded step these are tensors at fixed addresses. Here is their Python side: which tensors stand under ``.grad``
and in the replicas' states before the step, and which after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.train.step import ReplicaState

Value = torch.Tensor | float | None


@dataclass(frozen=True)
class Snapshot:
    """The gradients and sums of all replicas at one moment. It keeps the tensors alive.

    Args:
        gradients: of every parameter of every replica.
        sums: of every replica the total and the count.
    """

    gradients: tuple[Value, ...]
    sums: tuple[Value, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that are tensors."""
        return [value for value in (*self.gradients, *self.sums) if isinstance(value, torch.Tensor)]

    @property
    def kind(self) -> Hashable:
        """What two snapshots have in common if a recorded step that began with one can begin with the other."""
        if not any(gradient is not None for gradient in self.gradients):
            return tuple(map(_form, self.sums))
        return tuple(map(_form, (*self.gradients, *self.sums)))

    def take(self, values: Snapshot) -> None:
        """Copies values of the same kind into these tensors."""
        pairs = zip((*self.gradients, *self.sums), (*values.gradients, *values.sums), strict=True)
        with torch.no_grad():
            for into, value in pairs:
                if isinstance(into, torch.Tensor) and isinstance(value, torch.Tensor) and into is not value:
                    into.copy_(value)


class Carried:
    """Reads and sets what is carried.

    Args:
        copies: each replica's copy of the module.
        states: each replica's state.
    """

    def __init__(self, copies: Sequence[nn.Module], states: Sequence[ReplicaState]) -> None:
        self._parameters = [parameter for copy in copies for parameter in copy.parameters()]
        self._states = states

    def now(self) -> Snapshot:
        """What is carried now."""
        sums: list[Any] = [value for state in self._states for value in (state.total, state.count)]
        with torch._C.DisableTorchFunction():  # what watches the step's calls would take this for the step's own look
            return Snapshot(tuple([parameter.grad for parameter in self._parameters]), tuple(sums))

    def put(self, snapshot: Snapshot, *, where_not: Snapshot | None = None) -> None:
        """Makes a snapshot the present.

        Args:
            snapshot: what is carried from now on.
            where_not: what is carried already; gradients that are the same there are not touched.
        """
        present = snapshot.gradients if where_not is None else where_not.gradients
        for parameter, old, new in zip(self._parameters, present, snapshot.gradients, strict=True):
            if where_not is None or old is not new:
                parameter.grad = new  # type: ignore[assignment]
        for state, total, count in zip(self._states, snapshot.sums[::2], snapshot.sums[1::2], strict=True):
            state.total, state.count = total, count  # type: ignore[assignment]


def _form(value: Value) -> Hashable:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value
