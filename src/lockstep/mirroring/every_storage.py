"""All storages of the weights as one optimizer, which is what torch.amp.GradScaler works on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lockstep.mirroring.exchange import Copies
from lockstep.mirroring.skipping import on_device, skipped_too
from lockstep.mirroring.updaters import Updaters


class EveryStorage(Optimizer):
    """The parameters of every storage, stepped together or not at all.

    Args:
        updaters: those of the storages.
        parameters: per parameter its copies, one per replica.
        leaders: the replicas that lead a storage.
        skip: what was decided before the scaler looks: a tensor where the scaler's finding is not to be read either.

    Attributes:
        skipped: whether no weight was touched.
    """

    found_inf: torch.Tensor

    def __init__(
        self,
        updaters: Updaters,
        parameters: Sequence[Copies],
        leaders: Sequence[int],
        skip: bool | torch.Tensor,
    ) -> None:
        self._of_leader = {leader: [copies[leader] for copies in parameters] for leader in leaders}
        super().__init__([each for own in self._of_leader.values() for each in own], {})
        self._updaters = updaters
        self._skip = on_device(skip)
        # Torch's scaler then reads nothing: it leaves here, in "found_inf", what it has found, and steps.
        self._step_supports_amp_scaling = self._skip is not None
        self.skipped: bool | torch.Tensor = True  # unless the scaler steps

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.skipped = False
        if self._skip is not None:
            self.skipped = skip = skipped_too(self._skip, self.found_inf)
        for leader, own in self._of_leader.items():
            if self._skip is None:
                self._updaters.step(leader)
            else:
                self._updaters.step_slice(leader, own, skip)
