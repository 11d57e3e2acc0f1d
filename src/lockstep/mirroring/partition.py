"""Which part of a model a worker holds: all of it, or the part that a mesh of workers assigns to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.collectives.communicator import Communicator

Examine = Callable[[Any, slice], Tensor]
"""Given the outputs for some rows of a shard: the scalar to back-propagate."""


class Pipelined(Protocol):
    """A module whose stages are on several workers: a step passes through all of them, in microbatches."""

    @property
    def is_last(self) -> bool:
        """Whether this worker has the outputs."""

    def train(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward and backward of a shard; ``examine`` is called where the outputs are, for rows that there are.

        A shard without rows passes too where others borrow the weights.
        """

    def evaluate(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward of a shard, likewise."""


class PartitionPolicy(ABC):
    """What becomes of a module when it is mirrored."""

    @abstractmethod
    def peers(self, workers: Communicator) -> Communicator:
        """Of all ``workers``, those that hold the same weights."""

    @abstractmethod
    def take(self, module: nn.Module) -> nn.Module:
        """What this worker holds of a module. Every worker must call it."""

    @property
    @abstractmethod
    def parts(self) -> bool:
        """Whether what ``take`` gives is a part, whose other parts are on other workers."""

    @property
    def shards_weights(self) -> bool:
        """Whether each peer holds a share of the weights and borrows the rest, in passes that all of them make."""
        return False

    @abstractmethod
    def pipeline(self, module: nn.Module) -> Pipelined | None:
        """How a step passes through what ``take`` gave, where the module cannot be called by itself."""

    @abstractmethod
    def check(self, optimizer: Optimizer) -> None:
        """Refuses an optimizer that cannot step what is held.

        Raises:
            ConfigError: it cannot.
        """


class WholeModels(PartitionPolicy):
    """Every worker holds every model."""

    def peers(self, workers: Communicator) -> Communicator:
        """All of them."""
        return workers

    def take(self, module: nn.Module) -> nn.Module:
        """All of it."""
        return module

    @property
    def parts(self) -> bool:
        """It is all of it."""
        return False

    def pipeline(self, module: nn.Module) -> Pipelined | None:
        """It can be called."""
        return None

    def check(self, optimizer: Optimizer) -> None:
        """Any will do."""
