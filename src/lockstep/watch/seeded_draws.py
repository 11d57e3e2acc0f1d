"""Finds random numbers that several replicas draw alike in a step's first run, because they seed alike.

    torch.manual_seed(step)                replica 0: state A -> noise    replica 1: state A -> the same noise
    rng = numpy.random.default_rng(step)   state B as its function returns, in both

It goes by the states that draws begin at, and not by the seeds: those that differ by replica are right, and so are
seeds that nothing is drawn after. Draws of a replica's own stream are not looked at unless the step has seeded it.
"""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import BuiltinFunctionType, FrameType
from typing import Any

import torch

from lockstep.collectives.communicator import call_site
from lockstep.replicas.rng.mode import ReplicaRng

_SEEDS = ("manual_seed", "set_state")
"""Methods of ``torch.Generator`` that ``torch.manual_seed``, ``torch.set_rng_state`` and their like call."""
_DRAWS = ("random", "getrandbits")
"""Methods in C of ``random.Random`` that all others draw with."""
_OF_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
"""Python's own generator, of which replicas have one in common."""
_ADVICE = (
    "so that rows of different replicas get the same noise; put the replica's number into the seed (seed * "
    "context.num_replicas_in_sync + context.replica_id_in_sync_group, with context = ls.get_replica_context()), or "
    "leave the seed out: each replica has numbers of its own, from the strategy's seed. Where all are to draw the same "
    'numbers, as in zeroth-order training, say so with warnings.filterwarnings("ignore", "the step .* same random '
    'numbers")'
)


@dataclass(slots=True)
class SeededDraws:
    """What one replica draws after a seed of the step, or from generators that are not its own stream."""

    draws: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """By a digest of the state that a draw begins at: the generator, held so that no other has its id, and the line."""
    _is_seeded: bool = False

    def called_in_c(self, function: Any, line: Callable[[], str]) -> None:
        """Notes a call of a function in C that the step is about to make."""
        if type(function) is not BuiltinFunctionType:
            return
        owner = function.__self__
        if type(owner) is torch.Generator:
            self._is_seeded |= function.__name__ in _SEEDS
        elif type(owner) is random.Random and function.__name__ in _DRAWS and owner is not _OF_PYTHON:
            self.add(owner, repr(owner.getstate()).encode(), line())

    def called(self, rng: ReplicaRng, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Notes a call of a random function of torch that the step is about to make. ``rng`` makes its draws."""
        for generator in (value for value in (*args, *kwargs.values()) if type(value) is torch.Generator):
            self.add(generator, generator.get_state().numpy().tobytes(), call_site())
            return
        # Only the first draw after a seed is looked at: the ones after it go on from the same state.
        if self._is_seeded:
            self._is_seeded = False
            for generator in (rng.generator, *torch.cuda.default_generators):  # replicas of one GPU have one in turn
                self.add(rng, generator.get_state().numpy().tobytes(), call_site())

    def returns(self, frame: FrameType) -> None:
        """Notes the NumPy generators among the local variables of a user's function that returns."""
        # NumPy's generators draw in Cython, which no profile function sees: their states are read as a function ends.
        numpy: Any = sys.modules.get("numpy")
        kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
        for value in frame.f_locals.values() if kinds else ():
            if type(value) in kinds:
                code = frame.f_code
                self.add(value, pickle.dumps(value), f"{code.co_filename.rpartition('/')[2]} in {code.co_name}")

    def add(self, generator: Any, state: bytes, line: str) -> None:
        """Notes a draw."""
        # 32 bits, as many as a record between workers has for them.
        self.draws.setdefault(zlib.crc32(state), (generator, line))

    def digest(self) -> int:
        """32 bits of all draws, to be compared with those of other workers; 0 if there are none."""
        return zlib.crc32(repr(sorted(self.draws)).encode()) if self.draws else 0


def equal_draws(replicas: Sequence[SeededDraws]) -> str:
    """Where two replicas draw the same numbers, from generators of their own; empty if none do."""
    for one, other in combinations(replicas, 2):
        for state in one.draws.keys() & other.draws.keys():
            (generator, line), (another, _) = one.draws[state], other.draws[state]
            # One generator in both replicas has one stream, of which ``ProfiledCalls`` warns otherwise.
            if generator is not another:
                return line
    return ""


def same_numbers(line: str) -> str:
    """The warning about a draw that is the same in several replicas."""
    return f"draws the same random numbers in several replicas at {line}, since they seed alike, {_ADVICE}"
