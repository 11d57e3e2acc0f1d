"""Flags of ``lockstep train`` that are more than a value: backups, and the mesh of workers that divide a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ConfigError
from lockstep.parallel.mesh_layout import REST, MeshLayout, choose_mesh_layout
from lockstep.parallel.pipeline_config import PipelineConfig, ScheduleName, choose_pipeline_config
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import BackupAndRestore
from lockstep_tools.cli.flags import check_folder, flag_name

_FOLDER = "backup"


@dataclass(frozen=True, kw_only=True)
class BackupPlan:
    """How often a training run saves a backup, and whether it continues from one.

    Args:
        resume: continue the interrupted run in --output from the newest backup that it has saved, if there is one.
        backup: how often to save a backup for --resume: after each epoch, or every BATCHES global batches.
    """

    resume: bool = False
    backup: Annotated[str, typer.Option(metavar="epoch|BATCHES|none")] = "epoch"

    def __post_init__(self) -> None:
        if self.backup not in ("epoch", "none") and not (self.backup.isdecimal() and int(self.backup)):
            raise ConfigError(f"--backup {self.backup} was given, expected epoch, none, or a number of global batches")
        if self.resume and self.backup == "none":
            raise ConfigError("--resume continues from a backup, and --backup none saves none; leave one of them out")

    def check(self, output: Path) -> None:
        """Checks, without writing, that no backup of an interrupted run would be lost."""
        if self.backup == "none":
            return
        check_folder(output / _FOLDER)
        self.check_not_lost(self.newest(output))

    def check_not_lost(self, newest: Path | None) -> None:
        """Raises ConfigError if a run would begin anew where an interrupted one can be continued from ``newest``."""
        if newest is not None and not self.resume:
            raise ConfigError(
                f"--output has the backup of an interrupted run, {str(newest)!r}; add --resume to continue it, or"
                " remove it to start anew"
            )

    def callbacks(self, output: Path) -> list[BackupAndRestore]:
        if self.backup == "none":
            return []
        often: Literal["epoch"] | int = "epoch" if self.backup == "epoch" else int(self.backup)
        # Kept after ``fit``: the test and the writing of results come later, and may be interrupted too.
        return [BackupAndRestore(output / _FOLDER, save_freq=often, delete_checkpoint=False)]

    def newest(self, output: Path) -> Path | None:
        """The newest backup; None if there is none."""
        backups = [] if self.backup == "none" else CheckpointFolder(output / _FOLDER).paths()
        return backups[-1] if backups else None

    def remove(self, output: Path) -> None:
        """Removes the backup. Called after the results are written, since the test may be interrupted too."""
        if self.backup != "none":
            CheckpointFolder(output / _FOLDER).remove_all()


NO_BACKUP = BackupPlan(backup="none")


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
        shard_parameters: divide parameters, gradients and the optimizer's state among the replicas (FSDP), without a
            pipeline.
        sequence_parallel: divide activations outside of the tensor parallel layers along the sequence.
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
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        # These flags would have no effect, and a setting that is ignored must be told.
        if changed and not self.divides_model:
            raise ConfigError(
                f"{flag_name(changed[0])} says how workers divide a model, and none of --replicas, --pipeline and"
                " --tensor was given; add one, such as --tensor 2"
            )

    @property
    def _degrees(self) -> Mapping[str, int]:
        degrees = {"replicas": self.replicas, "pipeline": self.pipeline, "tensor": self.tensor}
        return {name: degree for name, degree in degrees.items() if degree is not None}

    @property
    def _by_axis(self) -> dict[str, int]:
        return {"data" if name == "replicas" else name: degree for name, degree in self._degrees.items()}

    @property
    def divides_model(self) -> bool:
        return bool(self._degrees)

    @property
    def flags(self) -> str:
        """The degrees as they were given, such as "--pipeline 2 --tensor 2"."""
        return " ".join(f"{flag_name(name)} {degree}" for name, degree in self._degrees.items())

    @property
    def fewest_workers(self) -> int:
        """The number of workers for the given degrees, with one replica if their number is open."""
        return prod(degree for degree in self._degrees.values() if degree != REST)

    def choose(self, workers: int) -> MeshLayout:
        """The mesh of a job with ``workers`` workers; raises ConfigError if the degrees do not fit."""
        return choose_mesh_layout(workers, **self._by_axis)

    def pipelining(self, mesh: MeshLayout) -> PipelineConfig:
        """The configuration of the pipelines; raises ConfigError for too few microbatches or stages."""
        return choose_pipeline_config(self.schedule, self.microbatches, mesh.pipeline, self.stages_per_worker)

    def make_strategy(self, cluster: ClusterSpec | None, *, seed: int) -> Strategy:
        """Makes the strategy on that mesh. Every worker must call it."""
        from lockstep.strategies.parallel import ParallelStrategy  # which imports torch's DTensor and pipelining

        # Without --replicas the data axis takes the workers that the other degrees leave.
        settings: dict[str, Any] = {"data": REST, **self._by_axis}
        for field in fields(self):
            if field.name not in ("replicas", "pipeline", "tensor"):
                settings[field.name] = getattr(self, field.name)
        return ParallelStrategy(**settings, cluster=cluster, seed=seed)


NO_MESH = MeshFlags()
