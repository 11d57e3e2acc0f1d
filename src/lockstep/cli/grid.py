"""The flags with which workers divide a recipe's model among them, and the grid that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ConfigError
from lockstep.parallel.mesh_layout import REST, MeshCoordinate, MeshLayout, choose_mesh_layout
from lockstep.parallel.pipeline_config import PipelineConfig, ScheduleName, choose_pipeline_config
from lockstep.report import text_table
from lockstep.strategies.parallel import ParallelStrategy


@dataclass(frozen=True, kw_only=True)
class GridFlags:
    """How the workers of a job divide the model; without a degree they do not divide it.

    Args:
        replicas: data parallel degree: number of replicas of a model that workers divide; default: as many as there
            are workers for.
        pipeline: pipeline parallel degree: workers that divide the layers of a replica among them, in stages.
        tensor: tensor parallel degree: workers that divide each layer among them.
        microbatches: microbatches per replica in a pipeline; default: two for each worker of the pipeline.
        schedule: order in which a pipeline computes its microbatches.
        stages_per_worker: stages that each worker of a pipeline holds; default: 2 for interleaved, zero_bubble and
            zero_bubble_v, else 1.
        shard_optimizer: divide the optimizer's state among the replicas (ZeRO stage 1).
        shard_parameters: divide parameters, gradients and the optimizer's state among the replicas (FSDP).
        sequence_parallel: divide activations outside of the tensor parallel layers along the sequence.

    Raises:
        ConfigError: a setting was given without a degree.
    """

    replicas: int | None = None
    pipeline: int | None = None
    tensor: int | None = None
    microbatches: int | None = None
    schedule: ScheduleName = "1f1b"
    stages_per_worker: int | None = None
    shard_optimizer: bool = False
    shard_parameters: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.asked:
            return
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{_flag(field.name)} says how workers divide a model, and none of --replicas, --pipeline and"
                    " --tensor was given; add one, such as --tensor 2"
                )

    @property
    def asked(self) -> bool:
        """Whether the model is to be divided."""
        return bool(self._degrees)

    @property
    def flags(self) -> str:
        """The degrees as they were given, such as "--pipeline 2 --tensor 2"."""
        return " ".join(f"{_flag(name)} {degree}" for name, degree in self._degrees.items())

    @property
    def fewest_workers(self) -> int:
        """How many the degrees take, with one replica if their number is open."""
        return prod(degree for degree in self._degrees.values() if degree != REST)

    def choose(self, workers: int) -> MeshLayout:
        """The grid of a job of so many workers.

        Raises:
            ConfigError: degrees that do not fit; it says which would.
        """
        degrees = {"data" if name == "replicas" else name: degree for name, degree in self._degrees.items()}
        return choose_mesh_layout(workers, **degrees)

    def pipelining(self, grid: MeshLayout) -> PipelineConfig:
        """How its pipelines run.

        Raises:
            ConfigError: microbatches or stages that the schedule cannot take.
        """
        return choose_pipeline_config(self.schedule, self.microbatches, grid.pipeline, self.stages_per_worker)

    def make_strategy(self, cluster: ClusterSpec | None, *, seed: int) -> ParallelStrategy:
        """The strategy on that grid. Every worker must make it.

        Raises:
            ClusterError: workers that did not come.
        """
        return ParallelStrategy(
            data=REST if self.replicas is None else self.replicas,
            pipeline=1 if self.pipeline is None else self.pipeline,
            tensor=1 if self.tensor is None else self.tensor,
            microbatches=self.microbatches,
            schedule=self.schedule,
            stages_per_worker=self.stages_per_worker,
            shard_optimizer=self.shard_optimizer,
            shard_parameters=self.shard_parameters,
            sequence_parallel=self.sequence_parallel,
            cluster=cluster,
            seed=seed,
        )

    @property
    def _degrees(self) -> Mapping[str, int]:
        given = {"replicas": self.replicas, "pipeline": self.pipeline, "tensor": self.tensor}
        return {name: degree for name, degree in given.items() if degree is not None}


NOT_DIVIDED = GridFlags()


def grid_table(grid: MeshLayout) -> str:
    """Which workers hold which part of the model: a row for each replica.

    Example:
        >>> print(grid_table(Grid(data=2, pipeline=2, tensor=2)))
        replica  stage 0      stage 1
        -------  -----------  -----------
              0  workers 0-1  workers 4-5
              1  workers 2-3  workers 6-7
    """
    stages = ["workers"] if grid.pipeline == 1 else [f"stage {stage}" for stage in range(grid.pipeline)]
    rows = [
        [str(replica), *(_holders(grid, replica, stage) for stage in range(grid.pipeline))]
        for replica in range(grid.data)
    ]
    return text_table(["replica", *stages], rows)


def _holders(grid: MeshLayout, replica: int, stage: int) -> str:
    first, last = (
        grid.worker(MeshCoordinate(stage=stage, replica=replica, tensor=rank)) for rank in (0, grid.tensor - 1)
    )
    return f"worker {first}" if first == last else f"workers {first}-{last}"


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
