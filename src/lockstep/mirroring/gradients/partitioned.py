"""Sums gradients where each worker holds a part of the model.

losses and counts   over all workers: those that have the model's outputs tell the others
gradients           over the workers that hold the same part, one for each replica; of tied weights, over two stages
norm                over the workers of one replica; parameters that several of them hold count once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from lockstep.collectives.communicator import Communicator
from lockstep.mirroring.gradients.local import GradientExchange, Settings
from lockstep.mirroring.zero1 import ShardingGroup
from lockstep.replicas.context import ReplicaContext


class PartExchange(GradientExchange):
    """Sums the gradients of a part over the replicas.

    Args:
        between_replicas: how the gradients of this part are summed.
        workers: the replicas, each seen as one worker.
        holders: the workers that hold the summed gradients together.
        counted: the numbers of the parameters whose gradients count here for the norm of the whole model's.
        tied: those that another stage holds too, in an order that is the same there.
        tied_group: this worker and the one that holds the same tied weights; None where there is none.
        sharing: those who hold this part, where they divide the optimizer's state; None where each keeps all of it.
    """

    def __init__(
        self,
        between_replicas: GradientExchange,
        *,
        workers: Communicator,
        holders: Communicator,
        counted: frozenset[int],
        tied: Sequence[nn.Parameter] = (),
        tied_group: Communicator | None = None,
        sharing: ShardingGroup | None = None,
    ) -> None:
        self._sharing = sharing
        self._tied = tuple(tied)
        self._tied_group = tied_group
        self._between_replicas = between_replicas
        self._workers = workers
        self._holders = holders
        self._counted = counted

    def open(self, total: float, count: float, settings: Settings) -> tuple[float, float]:
        """Exchanges the sums, and completes the exchange of gradients. Every worker must call it."""
        met = self._workers.all_gather_numbers("optimizer update", [total, count])
        self._between_replicas.open(0.0, 0.0, settings)
        self._sum_tied()
        return sum(each for each, _ in met), sum(each for _, each in met)

    def run(self, context: ReplicaContext, mine: Sequence[int]) -> None:
        """Between local replicas, of which there is one."""
        self._between_replicas.run(context, mine)

    def norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The norm over all parts of the model; the same bits on all workers."""
        counted = [norms[index].double() for index in sorted(norms) if index in self._counted]
        # Read at once: a GPU is waited for once, and not for each.
        own = sum(norm**2 for norm in torch.stack(counted).tolist()) if counted else 0.0
        squares = [square for (square,) in self._holders.all_gather_numbers("gradient norm", [own])]
        return torch.tensor(sum(squares), dtype=torch.float64).sqrt()

    def _sum_tied(self) -> None:
        """One weight that two stages hold has the sum of both gradients, with the same bits on both."""
        if self._tied_group is None or not self._tied:
            return
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._tied]
        summed = self._tied_group.all_reduce("gradients of tied weights", gradients)
        for parameter, gradient in zip(self._tied, summed, strict=True):
            parameter.grad = gradient

    def held(self, replicas: Sequence[int]) -> AbstractContextManager[None]:
        """Between the replicas; those who hold this one's other parts need not know."""
        return self._between_replicas.held(replicas)

    @property
    def keeps_sums(self) -> bool:
        """Every worker's own part."""
        return self._workers.is_chief

    @property
    def sharing(self) -> ShardingGroup | None:
        """Those who hold this part, where they divide the state."""
        return self._sharing
