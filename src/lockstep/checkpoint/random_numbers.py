"""The random numbers of a process and its replicas, as a part of every checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.checkpoint.kinds import DamagedStateError, check_kind
from lockstep.checkpoint.part import Part, PartState, SavedPart
from lockstep.data.position import random_state, set_random_state
from lockstep.replicas.rng.state import ReplicaGenerators

_STATES = dict[str, torch.Tensor]
_OF_A_PROCESS: Any = {"process": _STATES, "gpus": list[torch.Tensor]}


class RandomPart(Part):
    """torch's default generators, Python's and numpy's, each worker's own, and those of the replicas.

    Args:
        generators: the local replicas'.
    """

    def __init__(self, generators: ReplicaGenerators) -> None:
        self._generators = generators

    def state(self) -> PartState:
        """Where all of them stand now; each process has its own, also where several hold a replica together."""
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_gpus = torch.cuda.get_rng_state_all() if in_use else []
        replicas = self._generators.states()
        return PartState(worker={"process": random_state(None), "gpus": on_gpus, "replicas": replicas})

    def check(self, saved: SavedPart) -> None:
        """Every state of the same layout has as many replicas."""
        check_kind(saved.workers, list[_OF_A_PROCESS], "random numbers")
        ours, theirs = len(self._generators.states()), len(saved.worker.get("replicas", saved.own or ()))
        if saved.same_layout and ours != theirs:
            raise DamagedStateError(f"random numbers of {theirs} replicas instead of {ours}")

    def load(self, saved: SavedPart) -> None:
        """Puts all back; on another layout the replicas' are derived anew, and every process gets the chief's."""
        set_random_state(None, saved.worker["process"])
        on_gpus = saved.worker["gpus"]
        if on_gpus and torch.cuda.is_available() and torch.cuda.device_count() == len(on_gpus):
            torch.cuda.set_rng_state_all(on_gpus)
        own = saved.worker["replicas"] if saved.same_layout and "replicas" in saved.worker else saved.own
        if own is None or len(own) != len(self._generators.states()):
            self._generators.derive(saved.step)
        else:
            self._generators.set_states(own)
