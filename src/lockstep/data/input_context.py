"""What a worker's input function is told about its place, under TensorFlow's names."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class InputContext:
    """A worker's place among the input pipelines.

    Args:
        num_input_pipelines: how many pipelines there are, one per worker.
        input_pipeline_id: this worker's, from 0.
        num_replicas_in_sync: the replicas of all workers.

    Example:
        >>> import lockstep as ls
        >>> ls.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(128)
        32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if self.num_input_pipelines < 1 or self.num_replicas_in_sync < 1:
            raise ConfigError(
                f"num_input_pipelines={self.num_input_pipelines} and num_replicas_in_sync={self.num_replicas_in_sync}: "
                "give at least 1 of each"
            )
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise ConfigError(
                f"input_pipeline_id={self.input_pipeline_id} is none of {self.num_input_pipelines} pipelines; "
                f"choose 0 to {self.num_input_pipelines - 1}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of one replica's batch.

        Raises:
            ConfigError: a ValueError: the global batch does not divide evenly among the replicas.
        """
        replicas = self.num_replicas_in_sync
        if global_batch_size < 1 or global_batch_size % replicas:
            smaller = global_batch_size // replicas * replicas
            choice = f"{smaller} or {smaller + replicas}" if smaller > 0 else str(replicas)
            raise ConfigError(
                f"global_batch_size={global_batch_size} does not divide among {replicas} replicas; choose {choice}"
            )
        return global_batch_size // replicas
