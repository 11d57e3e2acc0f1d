"""Who takes part in a job: one frozen description, whichever variables or arguments it came from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.errors import ClusterError

Task = Literal["worker", "evaluator"]


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The workers of a job, and which of them this process is.

    Args:
        workers: one address "host:port" per worker, the chief's first; its store listens there. Launchers that name
            only the chief leave the others' empty.
        index: this process's place among them, from 0; for an evaluator, among the evaluators.
        task: "worker", or "evaluator" for a process beside the training.
        job_id: what tells this job's processes from others that find the same address.
        source: who said so, for messages: "TF_CONFIG", "torchrun", "SLURM" or "ClusterSpec".
        attempt: how often the job was started again after a failure.
        store_is_served: a launcher serves the store at the chief's address; no worker does.
    """

    workers: tuple[str, ...]
    index: int
    task: Task = "worker"
    job_id: str = ""
    source: str = "ClusterSpec"
    attempt: int = 0
    store_is_served: bool = False

    def __post_init__(self) -> None:
        if not self.workers:
            raise ClusterError("a cluster without workers")
