"""One thing whose state a checkpoint holds: what it gives, what it gets back, and the three calls in between.

What is equal on all replicas is kept once. What each replica has of its own (buffers, values of variables) is kept for
each, and goes back to each where the layout is the same; on another layout it is combined as its kind says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lockstep.checkpoint.held_tensors import HeldTensor

SHARED = "shared"
"""What the keys of tensors in ``PartState.shared`` have behind the part's name."""


@dataclass(frozen=True, kw_only=True)
class PartState:
    """What one worker's part gives.

    Args:
        shared: equal on all workers.
        replicas: one item per local replica; empty where replicas have nothing of their own.
        worker: this worker's own.
        weights: the tensors of a module's state_dict.
        held: what this worker holds of tensors that ``shared`` says are ``nested.Stored``, by their keys.
        held_weights: what it holds of the tensors of a module's state_dict, where ``weights`` has none.
    """

    shared: Any = None
    replicas: Sequence[Any] = ()
    worker: Any = None
    weights: Mapping[str, torch.Tensor] | None = None
    held: Mapping[str, HeldTensor] = field(default_factory=dict)
    held_weights: Mapping[str, HeldTensor] | None = None


@dataclass(frozen=True, kw_only=True)
class SavedPart:
    """What a checkpoint holds for one part.

    Args:
        name: the part's name.
        source: the checkpoint, for messages.
        shared: as it was given.
        replicas: one item per replica of all workers that saved; empty where they had nothing of their own.
        workers: one item per worker that saved.
        weights: the tensors of a module's state_dict, if it is one.
        weights_in: the file or folder that has them, where they were not read.
        same_layout: as many workers and replicas save and restore, and divide the model alike.
        first_replica: the number of this worker's first replica among those of all workers.
        local_replicas: how many this worker has.
        worker_index: which of the processes that save and restore this is.
        step: of which step it is.
    """

    name: str
    source: str
    shared: Any
    replicas: Sequence[Any]
    workers: Sequence[Any]
    weights: Mapping[str, torch.Tensor]
    weights_in: str | None
    same_layout: bool
    first_replica: int
    local_replicas: int
    worker_index: int
    step: int

    @property
    def own(self) -> Sequence[Any] | None:
        """The local replicas' items, in order; None on another layout."""
        mine = slice(self.first_replica, self.first_replica + self.local_replicas)
        return self.replicas[mine] if self.same_layout else None

    @property
    def worker(self) -> Any:
        """This worker's item; on another layout the chief's."""
        return self.workers[self.worker_index if self.same_layout else 0]


class Part(ABC):
    """One thing whose state a checkpoint holds."""

    @abstractmethod
    def state(self) -> PartState:
        """The state now. Every worker must call it."""

    @abstractmethod
    def check(self, saved: SavedPart) -> None:
        """Looks whether ``saved`` fits, before anything is loaded.

        Raises:
            CheckpointError: it does not.
        """

    @abstractmethod
    def load(self, saved: SavedPart) -> None:
        """Takes the state. Every worker must call it."""
