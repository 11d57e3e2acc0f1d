"""Which part of a model a worker holds: all of it, or the part that a mesh of workers assigns to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.collectives.communicator import Communicator


class PartitionPolicy(ABC):
    """Which part of a module a worker holds."""

    parts = False  # whether ``take`` returns a part, whose other parts are on other workers
    shards_weights = False  # whether each peer holds a shard of the weights, and all of them must make every pass

    @abstractmethod
    def peers(self, workers: Communicator) -> Communicator:
        """Of all ``workers``, those that hold the same weights."""

    @abstractmethod
    def take(self, module: nn.Module) -> nn.Module:
        """This worker's part of a module. Every worker must call it."""

    @abstractmethod
    def pipeline(self, module: nn.Module) -> Any:
        """The pipeline (``parallel.pipeline``) of which the part is a stage and cannot be called; else None."""

    @abstractmethod
    def source_of(self, weight: nn.Parameter) -> nn.Parameter:
        """The parameter to which autograd brings the gradient of a weight: itself, or one inside a part."""

    @abstractmethod
    def holders(self, module: nn.Module) -> Iterable[nn.Parameter]:
        """The parameters of what ``take`` has returned, and those inside a part."""

    @abstractmethod
    def is_divided(self, weight: nn.Parameter) -> bool:
        """Whether other workers hold other numbers of a weight."""

    @abstractmethod
    def check(self, optimizer: Optimizer) -> None:
        """Raises ConfigError for an optimizer that cannot update the part."""


class WholeModels(PartitionPolicy):
    """Every worker holds every model."""

    def peers(self, workers: Communicator) -> Communicator:
        return workers

    def take(self, module: nn.Module) -> nn.Module:
        return module

    def pipeline(self, module: nn.Module) -> Any:
        return None

    def source_of(self, weight: nn.Parameter) -> nn.Parameter:
        return weight

    def holders(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return module.parameters()

    def is_divided(self, weight: nn.Parameter) -> bool:
        return False

    def check(self, optimizer: Optimizer) -> None:
        pass
