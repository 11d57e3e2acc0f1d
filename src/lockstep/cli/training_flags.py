"""Flags of ``lockstep train`` that take more than a type: backups, the mesh of workers, ``--batch-size auto``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.cli.devices import take_devices
from lockstep.cli.flags import check_folder, check_output, config_command, field_docs, with_parameters
from lockstep.cli.in_workers import InWorkers
from lockstep.cluster.environment import cluster_from_environment
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ConfigError
from lockstep.parallel.mesh_layout import REST, MeshCoordinate, MeshLayout, choose_mesh_layout
from lockstep.parallel.pipeline_config import PipelineConfig, ScheduleName, choose_pipeline_config
from lockstep.recipes.batch_size import LargestBatch
from lockstep.report import text_table
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.train.callbacks import BackupAndRestore

ResumeFlag = Annotated[
    bool,
    typer.Option("--resume", help="Continue the interrupted run with the same --output, if there was one."),
]
BackupFlag = Annotated[
    str,
    typer.Option(
        metavar="epoch|BATCHES|none",
        help="How often to save a backup for --resume: after each epoch, or every BATCHES global batches.",
    ),
]
_FOLDER = "backup"


@dataclass(frozen=True, kw_only=True)
class BackupPlan:
    """How often a training run saves a backup, and whether it continues from one.

    Args:
        often: "epoch", a number of global batches, or "none".
        resume: continue from the backup in the output folder, if there is one.

    Raises:
        ConfigError: ``often`` is none of these, or "none" with ``resume``.
    """

    often: str
    resume: bool

    def __post_init__(self) -> None:
        if self.often not in ("epoch", "none") and not (self.often.isdecimal() and int(self.often)):
            raise ConfigError(f"--backup {self.often} was given, expected epoch, none, or a number of global batches")
        if self.resume and self.often == "none":
            raise ConfigError("--resume continues from a backup, and --backup none saves none; leave one of them out")

    def check(self, output: Path) -> None:
        """Checks, without writing, that no backup of an interrupted run would be lost.

        Raises:
            ConfigError: there is a backup and ``resume`` is False, or the folder cannot be written to.
        """
        if self.often == "none":
            return
        folder = output / _FOLDER
        check_folder(folder)
        kept = CheckpointFolder(folder).paths()
        if kept and not self.resume:
            raise ConfigError(
                f"--output has the backup of an interrupted run, {str(kept[-1])!r}; add --resume to continue it, or"
                " remove it to start anew"
            )

    def callbacks(self, output: Path) -> list[BackupAndRestore]:
        """The callback that saves and restores the training."""
        if self.often == "none":
            return []
        often: Literal["epoch"] | int = "epoch" if self.often == "epoch" else int(self.often)
        return [BackupAndRestore(output / _FOLDER, save_freq=often, delete_checkpoint=False)]

    def remove(self, output: Path) -> None:
        """Removes the backup. Called after the results are written, since the test may be interrupted too."""
        if self.often != "none":
            CheckpointFolder(output / _FOLDER).remove_all()


NO_BACKUP = BackupPlan(often="none", resume=False)


@dataclass(frozen=True, kw_only=True)
class MeshFlags:
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
                    f"{_flag_name(field.name)} says how workers divide a model, and none of --replicas, --pipeline and"
                    " --tensor was given; add one, such as --tensor 2"
                )

    @property
    def asked(self) -> bool:
        """Whether the model is to be divided."""
        return bool(self._degrees)

    @property
    def flags(self) -> str:
        """The degrees as they were given, such as "--pipeline 2 --tensor 2"."""
        return " ".join(f"{_flag_name(name)} {degree}" for name, degree in self._degrees.items())

    @property
    def fewest_workers(self) -> int:
        """The number of workers for the given degrees, with one replica if their number is open."""
        return prod(degree for degree in self._degrees.values() if degree != REST)

    def choose(self, workers: int) -> MeshLayout:
        """The mesh of a job with ``workers`` workers.

        Raises:
            ConfigError: the degrees do not fit; the message says which would.
        """
        degrees = {"data" if name == "replicas" else name: degree for name, degree in self._degrees.items()}
        return choose_mesh_layout(workers, **degrees)

    def pipelining(self, grid: MeshLayout) -> PipelineConfig:
        """The configuration of the pipelines.

        Raises:
            ConfigError: the schedule cannot have so many microbatches or stages.
        """
        return choose_pipeline_config(self.schedule, self.microbatches, grid.pipeline, self.stages_per_worker)

    def make_strategy(self, cluster: ClusterSpec | None, *, seed: int) -> ParallelStrategy:
        """Makes the strategy on that mesh. Every worker must call it.

        Raises:
            ClusterError: a worker did not join.
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


NO_MESH = MeshFlags()


def mesh_table(grid: MeshLayout) -> str:
    """A table of the workers that hold each part of the model, with a row for each replica.

    Example:
        >>> print(mesh_table(MeshLayout(data=2, pipeline=2, tensor=2)))
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
        grid.rank(MeshCoordinate(stage=stage, replica=replica, tensor=rank)) for rank in (0, grid.tensor - 1)
    )
    return f"worker {first}" if first == last else f"workers {first}-{last}"


def _flag_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


AUTO = "auto"

Job = Callable[[], int | InWorkers]
Largest = Callable[[Any, Strategy], LargestBatch]


def training_command(
    config: type[Any], largest: Largest, *, noun: str, groups: Mapping[str, str]
) -> Callable[[Callable[..., Job]], Callable[..., Job]]:
    """Decorates as ``config_command`` does, for a recipe whose ``--batch-size`` is a number or "auto".

    Args:
        config: the recipe's dataclass, with ``batch_size`` and ``seed``; the function has ``devices`` and ``output``.
        largest: finds the batch size; called with a config, whose batch size is the default, and a strategy.
        noun: what an example is called, such as "line".
        groups: first field of a group of flags -> title of the group in the help.
    """

    def decorate(function: Callable[..., Job]) -> Callable[..., Job]:
        with_number = config_command(config, groups=groups)(function)
        own = inspect.signature(function).parameters

        def command(*, batch_size: str, **flags: Any) -> Job:
            if batch_size != AUTO:
                return with_number(batch_size=_number(batch_size), **flags)
            settings = config(**{name: value for name, value in flags.items() if name not in own})

            def job() -> int | InWorkers:
                _refuse_grid(flags.get("grid", NO_MESH))
                check_output(flags["output"].expanduser())  # now rather than after the search
                size = _search(settings, largest, flags["devices"], noun=noun)
                return with_number(batch_size=size, **flags)()

            return job

        signature = inspect.signature(with_number)
        parameters = [
            _batch_size_flag(p, config) if p.name == "batch_size" else p for p in signature.parameters.values()
        ]
        return with_parameters(command, parameters, help_text=function.__doc__)

    return decorate


def _batch_size_flag(number: inspect.Parameter, config: type[Any]) -> inspect.Parameter:
    option = number.annotation.__metadata__[0]
    documented = field_docs(config)["batch_size"].rstrip(".")
    text = f"{documented[:1].upper()}{documented[1:]}; auto finds the largest that fits."
    flag = typer.Option(metavar="NUMBER|auto", help=text, rich_help_panel=option.rich_help_panel)
    return number.replace(annotation=Annotated[str, flag], default=str(number.default))


def _number(given: str) -> int:
    try:
        return int(given)
    except ValueError:
        raise ConfigError(f"batch_size={given!r} was given, expected an integer or {AUTO}") from None


def _refuse_grid(grid: MeshFlags) -> None:
    if grid.asked:
        raise ConfigError(
            f"--batch-size {AUTO} tries batches in one process that holds the whole model, and {grid.flags} divides "
            "it; give a number"
        )


def _search(settings: Any, largest: Largest, devices: str | None, *, noun: str) -> int:
    cluster = cluster_from_environment()
    if cluster is not None and cluster.num_workers > 1:
        raise ConfigError(
            f"--batch-size {AUTO} tries batches in one process, and {cluster.source} declares {cluster.num_workers} "
            "workers; find the size with one worker, and give --batch-size that number times the number of workers"
        )
    strategy = MirroredStrategy(take_devices(devices), seed=settings.seed)
    with closing(strategy), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run that follows gives the same warnings
        found = largest(settings, strategy)
    limit = "the memory of the GPUs" if found.memory_mb is None else f"{found.memory_mb:,.0f} MB for this process"
    print(
        f"batch size {AUTO}: {found.size:,} {noun}s fit; the limits are {limit} "
        f"and the {found.examples:,} {noun}s of the training split",
        flush=True,
    )
    return found.size
