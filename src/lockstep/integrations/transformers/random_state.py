"""The replicas' random numbers: begun from the arguments' seed, kept in a file of every checkpoint.

    rng_state.pth                transformers' own: Python's, numpy's and torch's, of the process
    lockstep_rng_state.pth       the replicas', from which dropout is drawn

So a training that goes on equals one that was not interrupted, bit for bit. On another number of replicas, or from a
checkpoint without the file, the numbers are derived from seed and step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lockstep.collectives.communicator import exchange_values
from lockstep.strategies.base import Strategy

FILE = "lockstep_rng_state.pth"


def begin(strategy: Strategy, seed: int) -> None:
    """Gives the replicas the numbers of ``seed``, as transformers' ``set_seed`` gives them to the process."""
    strategy.generators.begin(seed, strategy.workers.first_replica)


def save(strategy: Strategy, folder: Path) -> None:
    """Has the chief write where all replicas are. Every worker must call it."""
    everyones = exchange_values(strategy.workers, "the replicas' random numbers", strategy.generators.states())
    if strategy.workers.is_chief:
        torch.save([state for states in everyones for state in states], folder / FILE)


def load(strategy: Strategy, folder: Path, *, seed: int, step: int) -> None:
    """Puts back what ``save`` wrote, or derives numbers for a training that goes on otherwise.

    Args:
        strategy: whose replicas they are.
        folder: a checkpoint.
        seed: of the training.
        step: how many updates it has had.
    """
    workers = strategy.workers
    states = _read(folder / FILE)
    if len(states) == workers.num_replicas:
        local = len(strategy.devices)
        strategy.generators.set_states(states[workers.first_replica :][:local])
    else:
        begin(strategy, seed)
        strategy.generators.derive(step)


def _read(file: Path) -> Sequence[Mapping[str, Tensor]]:
    if not file.is_file():
        return ()
    states: list[dict[str, Tensor]] = torch.load(file, map_location="cpu", weights_only=True)
    return states
