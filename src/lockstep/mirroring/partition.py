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
        """Forward and backward of a shard, also without rows; ``examine`` is called on the worker with the outputs."""

    def evaluate(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward of a shard, likewise."""


class PartitionPolicy(ABC):
    """Which part of a module a worker holds.

    Attributes:
        parts: whether ``take`` returns a part, whose other parts are on other workers.
        shards_weights: whether each peer holds a shard of the weights, and all of them must make every pass.
    """

    parts = False
    shards_weights = False

    @abstractmethod
    def peers(self, workers: Communicator) -> Communicator:
        """Of all ``workers``, those that hold the same weights."""

    @abstractmethod
    def take(self, module: nn.Module) -> nn.Module:
        """This worker's part of a module. Every worker must call it."""

    @abstractmethod
    def pipeline(self, module: nn.Module) -> Pipelined | None:
        """How a step passes through the part, if it cannot be called by itself."""

    @abstractmethod
    def check(self, optimizer: Optimizer) -> None:
        """Raises ConfigError for an optimizer that cannot update the part."""


class WholeModels(PartitionPolicy):
    """Every worker holds every model."""

    def peers(self, workers: Communicator) -> Communicator:
        return workers

    def take(self, module: nn.Module) -> nn.Module:
        return module

    def pipeline(self, module: nn.Module) -> Pipelined | None:
        return None

    def check(self, optimizer: Optimizer) -> None:
        pass
