"""Which worker holds which part of a model, and which data it sees. Pure, on ints.

    data=2, pipeline=2, tensor=2          stage 0                 stage 1
                              replica 0   worker 0, worker 1      worker 4, worker 5
                              replica 1   worker 2, worker 3      worker 6, worker 7

Numbers go through tensor ranks first, then data, then stages, so that workers that communicate most share a host
(Narayanan et al. 2021, arXiv 2104.04473, section 5.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lockstep.errors import ConfigError

AXES = ("pipeline", "data", "tensor")
"""The axes of the mesh; worker numbers change fastest along the last one."""
REST = -1
"""As a degree: all workers that the other degrees leave."""


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """The workers of a job as a device mesh.

    Args:
        data: the number of copies of the model; each sees its own shard of a global batch.
        pipeline: the number of workers among which the layers of a copy are divided.
        tensor: the number of workers among which each layer is divided.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.data * self.pipeline * self.tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """The degrees in the order of ``AXES``."""
        return self.pipeline, self.data, self.tensor

    def place(self, worker: int) -> MeshCoordinate:
        """The coordinate of a worker."""
        rest, tensor = divmod(worker, self.tensor)
        stage, replica = divmod(rest, self.data)
        return MeshCoordinate(stage=stage, replica=replica, tensor=tensor)

    def worker(self, place: MeshCoordinate) -> int:
        """The number of the worker at a coordinate."""
        return (place.stage * self.data + place.replica) * self.tensor + place.tensor

    def peers(self, worker: int) -> tuple[int, ...]:
        """The data group of a worker: those that hold the same part of the model, in replica order."""
        here = self.place(worker)
        return tuple(
            self.worker(MeshCoordinate(stage=here.stage, replica=replica, tensor=here.tensor))
            for replica in range(self.data)
        )

    def line(self, worker: int) -> tuple[int, ...]:
        """The pipeline group of a worker: those of the same replica and tensor rank, in stage order."""
        here = self.place(worker)
        return tuple(
            self.worker(MeshCoordinate(stage=stage, replica=here.replica, tensor=here.tensor))
            for stage in range(self.pipeline)
        )

    def members(self, replica: int) -> tuple[int, ...]:
        """The workers that hold one copy of the model together, in ascending order."""
        return tuple(worker for worker in range(self.workers) if self.place(worker).replica == replica)

    def leaders(self, stage: int) -> tuple[int, ...]:
        """One worker per replica, in replica order: the first tensor rank of a pipeline worker.

        Args:
            stage: the pipeline worker that has the outputs, usually the last.
        """
        return tuple(
            self.worker(MeshCoordinate(stage=stage, replica=replica, tensor=0)) for replica in range(self.data)
        )

    def __str__(self) -> str:
        return f"data={self.data}, pipeline={self.pipeline}, tensor={self.tensor}"


@dataclass(frozen=True, kw_only=True)
class MeshCoordinate:
    """A worker's coordinate: its pipeline stage, its replica of the model, its tensor rank."""

    stage: int
    replica: int
    tensor: int


def choose_mesh_layout(workers: int, *, data: int = REST, pipeline: int = 1, tensor: int = 1) -> MeshLayout:
    """The layout of ``workers`` workers; one degree may be -1 and takes what the others leave.

    Raises:
        ConfigError: the degrees do not fit; the message names some that would.

    Example:
        >>> choose_grid(8, pipeline=2, tensor=2)
        Grid(data=2, pipeline=2, tensor=2)
    """
    degrees = {"data": data, "pipeline": pipeline, "tensor": tensor}
    for name, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or (degree < 1 and degree != REST):
            raise ConfigError(f"{name}={degree!r} is no degree; give a number from 1, or -1 for what the others leave")
    open_ones = [name for name, degree in degrees.items() if degree == REST]
    if len(open_ones) > 1:
        raise ConfigError(f"{' and '.join(f'{name}=-1' for name in open_ones)}: only one degree can be what is left")
    fixed = {name: degree for name, degree in degrees.items() if degree != REST}
    product = prod(fixed.values())
    if workers % product or (not open_ones and workers != product):
        raise ConfigError(_misfit(workers, degrees, fixed))
    return MeshLayout(**{**degrees, **dict.fromkeys(open_ones, workers // product)})


def check_divides(name: str, degree: int, sizes: Sequence[tuple[str, int]]) -> None:
    """Checks that a degree divides all of a model's sizes.

    Args:
        name: the name of the degree, such as "tensor".
        degree: the degree.
        sizes: the names and sizes, as the model's configuration has them.

    Raises:
        ConfigError: it does not; the message has the degrees that would.
    """
    for size_name, size in sizes:
        if size % degree:
            fitting = [number for number in range(1, size + 1) if all(other % number == 0 for _, other in sizes)]
            raise ConfigError(f"{name}={degree} does not divide {size_name}={size}; choose {_one_of(fitting)}")


def _misfit(workers: int, degrees: dict[str, int], fixed: dict[str, int]) -> str:
    given = ", ".join(f"{name}={degree}" for name, degree in degrees.items())
    if len(fixed) == len(degrees):
        product = prod(fixed.values())
        return (
            f"{given} is a grid of {product} workers, and the job has {workers}; start {product}, or leave data at -1, "
            "which takes what the others leave"
        )
    product = prod(fixed.values())
    named = " x ".join(f"{name}={degree}" for name, degree in fixed.items() if degree > 1)
    fitting = [number for number in range(1, workers + 1) if workers % number == 0]
    return (
        f"{given}: {named} = {product} does not divide the {workers} workers of the job; "
        f"choose degrees whose product is {_one_of(fitting)}"
    )


def _one_of(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
