"""Averages of a model's weights over the updates of a training, which change places with the weights.

    update -> weights -> averages          the average is computed by torch.optim.swa_utils, as of an AveragedModel
              weights <-> averages         exchanged in place, to validate and to save, and back with the same bits

Each worker averages what it holds: whole weights, or its parts of a model that is divided. Every number is averaged by
itself, so the averages have the same bits wherever the weights have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.mirroring.module.module import MirroredModule
from lockstep.train.model_weights import host_state, part_of

Average = Callable[[list[Tensor], list[Tensor], Tensor | int], None]
"""A ``multi_avg_fn`` of torch.optim.swa_utils: (averages, weights, how many were averaged), averages in place."""


class WeightAverages:
    """The averages of the floating-point weights of a module, in each storage of this worker.

    Buffers are not averaged: they stay those of the module, as in ``AveragedModel(use_buffers=False)``.

    Attributes:
        count: how often the weights were averaged.
        are_exchanged: whether the module has the averages now, and this object the weights.
    """

    def __init__(self, module: MirroredModule, average: Average) -> None:
        self._module, self._average = module, average
        self._averages: list[list[Tensor]] = []
        self.count = 0
        self.are_exchanged = False

    @torch.no_grad()
    def update(self) -> None:
        """Averages the present weights too; the first time it copies them."""
        weights = self._weights()
        if not self.count:
            self._averages = [[weight.clone() for weight in storage] for storage in weights]
        else:
            for averages, storage in zip(self._averages, weights, strict=True):
                # A tensor on the device, as AveragedModel has it: a float would be rounded otherwise.
                self._average(averages, storage, torch.tensor(self.count, device=storage[0].device))
        self.count += 1

    def exchange(self) -> None:
        """Exchanges averages and weights. Outside replicas; every worker must call it, and none waits for another."""
        if not self.count:
            return
        with self._module.writing_weights():
            for averages, storage in zip(self._averages, self._weights(), strict=True):
                for average, weight in zip(averages, storage, strict=True):
                    # Through a copy, and not by swapping the tensors: optimizers, hooks and captured graphs hold these.
                    former = weight.clone()
                    weight.copy_(average)
                    average.copy_(former)
        self.are_exchanged = not self.are_exchanged

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by the names of the whole model's weights. Every worker must call it."""
        if not self.count:
            return {}
        if part_of(self._module) is not None:
            # A divided model can be gathered under the names of the whole one only from the module itself.
            self.exchange()
            try:
                return host_state(self._module)
            finally:
                self.exchange()
        return dict(zip(self._names(), self._averages[0], strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor], count: int) -> None:
        """Restores averages that ``state_dict`` returned, on any layout, and how many there were."""
        self.count = 0
        if not count:
            return
        self.update()  # which makes the tensors
        self.count = count
        self.exchange()
        try:
            self._write(state)
        finally:
            self.exchange()

    def _write(self, state: Mapping[str, Tensor]) -> None:
        part = part_of(self._module)
        with self._module.writing_weights():
            if part is not None:
                for name, _ in part.named_parameters():
                    part.take(name, state[name])
                return
            for storage in self._weights():
                for name, weight in zip(self._names(), storage, strict=True):
                    weight.copy_(state[name])

    def _weights(self) -> list[list[Tensor]]:
        return [
            [weight.detach() for weight in storage if weight.is_floating_point()]
            for storage in self._module.stored_parameters()
        ]

    def _names(self) -> Sequence[str]:
        return [name for name, weight in self._module.module.named_parameters() if weight.is_floating_point()]
