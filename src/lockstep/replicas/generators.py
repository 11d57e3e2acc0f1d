"""Where the replicas' random numbers stand: taken for a checkpoint, put back, or begun anew for another layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lockstep.config import LogicalDevice
from lockstep.replicas.gpu import GpuReplica
from lockstep.replicas.random import replica_generator


class ReplicaGenerators:
    """The random numbers of one worker's replicas. Use it between runs.

    Args:
        devices: the replicas' devices.
        generators: each replica's own.
        on_gpu: what each replica keeps on its GPU; None for a replica on a CPU.
        apart: that of the one replica here for what this worker alone holds of a model.
    """

    def __init__(
        self,
        devices: Sequence[LogicalDevice],
        generators: Sequence[torch.Generator],
        on_gpu: Sequence[GpuReplica | None],
        apart: torch.Generator | None = None,
    ) -> None:
        self._all = list(zip(devices, generators, on_gpu, strict=True))
        self._apart = apart

    def with_apart(self, apart: torch.Generator) -> ReplicaGenerators:
        """These, and one for what this worker alone holds of a model."""
        devices, generators, on_gpu = zip(*self._all, strict=True)
        return ReplicaGenerators(devices, generators, on_gpu, apart)

    def states(self) -> list[dict[str, torch.Tensor]]:
        """One dict per replica: "cpu", for a replica on a GPU "cuda", for one of a part "apart"; uint8 on the CPU."""
        apart = {} if self._apart is None else {"apart": self._apart.get_state()}
        return [
            {"cpu": generator.get_state()} | ({} if gpu is None else {"cuda": gpu.generator.get_state()}) | apart
            for _, generator, gpu in self._all
        ]

    def set_states(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Puts back what ``states`` gave, in this process or another."""
        for (_, generator, gpu), state in zip(self._all, states, strict=True):
            generator.set_state(state["cpu"])
            if gpu is not None and "cuda" in state:
                gpu.generator.set_state(state["cuda"])
            if self._apart is not None and "apart" in state:
                self._apart.set_state(state["apart"])

    def on_gpu(self) -> list[torch.Generator]:
        """Those that replicas on a GPU draw from there, in replica order; graphs register them."""
        return [gpu.generator for _, _, gpu in self._all if gpu is not None]

    def begin(self, seed: int, first_replica: int) -> None:
        """Begins anew, with the numbers of a new strategy of this seed.

        Args:
            seed: of all replicas.
            first_replica: the number of the first of these among the replicas of all workers.
        """
        self._set([replica_generator(seed, first_replica + replica) for replica in range(len(self._all))])

    def derive(self, step: int) -> None:
        """Begins anew with numbers that follow from each replica's seed and ``step``, and from nothing else.

        For a training that goes on with another number of replicas: the first numbers must not come once more.
        """
        self._set([replica_generator(generator.initial_seed(), step) for _, generator, _ in self._all])
        if self._apart is not None:
            self._apart.set_state(replica_generator(self._apart.initial_seed(), step).get_state())

    def _set(self, fresh: Sequence[torch.Generator]) -> None:
        for (_, generator, gpu), begun in zip(self._all, fresh, strict=True):
            generator.set_state(begun.get_state())
            if gpu is not None:
                gpu.generator.manual_seed(begun.initial_seed())
