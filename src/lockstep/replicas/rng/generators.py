"""The generators of a worker's replicas: their seeds, and the states that checkpoints save."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from lockstep.replicas.device.streams import GpuReplica


def derived_seed(*numbers: int) -> int:
    """A seed that depends on a sequence of numbers, such as (seed, replica), and on nothing else."""
    # A hash, not seed + replica: neighbouring seeds of two trainings would share replicas' generators.
    digest = hashlib.sha256("/".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def replica_generator(seed: int, replica: int) -> torch.Generator:
    """A CPU generator whose numbers depend on the seed and the replica's number, and on nothing else."""
    return torch.Generator().manual_seed(derived_seed(seed, replica))


class ReplicaGenerators:
    """The generators of one worker's replicas, to be used between runs.

    Args:
        generators: each replica's own.
        on_gpu: each replica's state on its GPU; None for a replica on a CPU.
        of_part: this worker's generator for the part of a model that it alone holds.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        on_gpu: Sequence[GpuReplica | None],
        of_part: torch.Generator | None = None,
    ) -> None:
        self._all = list(zip(generators, on_gpu, strict=True))
        self._of_part = of_part

    def with_part(self, of_part: torch.Generator) -> ReplicaGenerators:
        """These, and the generator for the part of a model."""
        return ReplicaGenerators([generator for generator, _ in self._all], [gpu for _, gpu in self._all], of_part)

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Per replica its states by name: "cpu", on a GPU "cuda", with a generator for a part "apart"."""
        of_part = {} if self._of_part is None else {"apart": self._of_part.get_state()}
        return [
            {"cpu": generator.get_state()} | ({} if gpu is None else {"cuda": gpu.generator.get_state()}) | of_part
            for generator, gpu in self._all
        ]

    def set_states(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Restores what ``states`` returned, in this process or another."""
        for (generator, gpu), state in zip(self._all, states, strict=True):
            generator.set_state(state["cpu"])
            if gpu is not None and "cuda" in state:
                gpu.generator.set_state(state["cuda"])
            if self._of_part is not None and "apart" in state:
                self._of_part.set_state(state["apart"])

    def on_gpu(self) -> list[torch.Generator]:
        """The generators of replicas on GPUs, in replica order; CUDA graphs register them."""
        return [gpu.generator for _, gpu in self._all if gpu is not None]

    def begin(self, seed: int, first_replica: int) -> None:
        """Begins anew, with the numbers of a new strategy of this seed."""
        self._set([replica_generator(seed, first_replica + replica) for replica in range(len(self._all))])

    def derive(self, step: int) -> None:
        """Begins anew with numbers that follow from each seed and ``step``, to resume on other replicas."""
        self._set([replica_generator(generator.initial_seed(), step) for generator, _ in self._all])
        if self._of_part is not None:
            self._of_part.set_state(replica_generator(self._of_part.initial_seed(), step).get_state())

    def _set(self, fresh: Sequence[torch.Generator]) -> None:
        for (generator, gpu), begun in zip(self._all, fresh, strict=True):
            generator.set_state(begun.get_state())
            if gpu is not None:
                gpu.generator.manual_seed(begun.initial_seed())
