"""Which worker holds which part of a model, and which data it sees. Pure, on ints.

    data=2, pipeline=2, tensor=2          stage 0             stage 1
                              replica 0   rank 0, rank 1      rank 4, rank 5
                              replica 1   rank 2, rank 3      rank 6, rank 7

Ranks go through tensor ranks first, then data, then stages, so that workers that communicate most share a host
(Narayanan et al. 2021, arXiv 2104.04473, section 5.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from lockstep.checks import alternatives, divisors, shown
from lockstep.errors import ConfigError

AXES = ("pipeline", "data", "tensor")  # ranks change fastest along the last one
REST = -1  # as a degree: all workers that the other degrees leave


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """The workers of a job as a device mesh."""

    data: int = 1  # replicas of the model; each sees its own shard of a global batch
    pipeline: int = 1  # workers among which the layers of a replica are divided
    tensor: int = 1  # workers among which each layer is divided

    @property
    def size(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """The degrees in the order of ``AXES``."""
        return self.pipeline, self.data, self.tensor

    def coordinate(self, rank: int) -> MeshCoordinate:
        # Tensor ranks exchange activations in every layer, so they are neighbours; stages exchange them once and may be
        # on two hosts (tests/parallel/test_mesh_layout.py).
        rest, tensor = divmod(rank, self.tensor)
        stage, replica = divmod(rest, self.data)
        return MeshCoordinate(stage=stage, replica=replica, tensor=tensor)

    def rank(self, at: MeshCoordinate) -> int:
        return (at.stage * self.data + at.replica) * self.tensor + at.tensor

    def data_group(self, rank: int) -> tuple[int, ...]:
        """The workers that hold the same part of the model as this one, in replica order."""
        coordinate = self.coordinate(rank)
        return tuple(self.rank(replace(coordinate, replica=replica)) for replica in range(self.data))

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """The workers of the same replica and tensor rank as this one, in stage order."""
        coordinate = self.coordinate(rank)
        return tuple(self.rank(replace(coordinate, stage=stage)) for stage in range(self.pipeline))

    def replica_group(self, replica: int) -> tuple[int, ...]:
        """The workers that hold one replica of the model together, in ascending order."""
        return tuple(rank for rank in range(self.size) if self.coordinate(rank).replica == replica)

    def leaders(self, stage: int) -> tuple[int, ...]:
        """Per replica, the first tensor rank of a pipeline worker, such as the one that has the outputs."""
        return self.data_group(self.rank(MeshCoordinate(stage=stage, replica=0, tensor=0)))

    def __str__(self) -> str:
        return f"data={self.data}, pipeline={self.pipeline}, tensor={self.tensor}"


@dataclass(frozen=True, kw_only=True)
class MeshCoordinate:
    """A worker's coordinate: its pipeline stage, its replica of the model, its tensor rank."""

    stage: int
    replica: int
    tensor: int


def choose_mesh_layout(workers: int, *, data: int = REST, pipeline: int = 1, tensor: int = 1) -> MeshLayout:
    """The layout of ``workers`` workers; one degree may be -1 and takes what the others leave."""
    degrees = {"data": data, "pipeline": pipeline, "tensor": tensor}
    for name, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or (degree < 1 and degree != REST):
            raise ConfigError(
                f"{name}={shown(degree)} is no degree; give a number from 1, or -1 for what the others leave"
            )
    fixed = {name: degree for name, degree in degrees.items() if degree != REST}
    open_ones = [name for name in degrees if name not in fixed]
    if len(open_ones) > 1:
        raise ConfigError(f"{' and '.join(f'{name}=-1' for name in open_ones)}: only one degree can be what is left")
    product = prod(fixed.values())
    choice = ", ".join(f"{name}={degree}" for name, degree in degrees.items())
    if not open_ones and workers != product:
        rest = "" if workers % (pipeline * tensor) else ", or leave data at -1"
        raise ConfigError(
            f"{choice} is a mesh of {product} workers, and the job has {workers}; start {product} with {_run(product)}"
            f"{rest}"
        )
    if workers % product:
        named = " x ".join(f"{name}={degree}" for name, degree in fixed.items() if degree > 1)
        raise ConfigError(
            f"{choice}: {named} = {product} does not divide the {workers} worker{'s' * (workers != 1)} of the job; "
            f"start {product}, or a multiple, with {_run(product)}, or choose degrees whose product is "
            f"{alternatives(divisors(workers))}"
        )
    return MeshLayout(**{**degrees, **dict.fromkeys(open_ones, workers // product)})


def _run(workers: int) -> str:
    return f"`lockstep run --workers {workers}`"
