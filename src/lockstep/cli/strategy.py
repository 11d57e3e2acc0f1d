"""The strategy of a command: one process, or the job of several workers that the environment declares."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.devices import take_devices
from lockstep.cluster.resolve import cluster_from_environment
from lockstep.config import LogicalDevice, resolve_devices
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy, own_devices


def take_own_devices(spec: str | None) -> tuple[LogicalDevice, ...]:
    """What a ``--devices`` flag means in this process; None is what is its own as a worker among others on its host.

    Raises:
        ConfigError: a form that is not there, or a device or a share that this machine cannot give.
        ClusterError: a malformed cluster.
    """
    return take_devices(spec) if spec is not None else resolve_devices(own_devices(cluster_from_environment()))


def make_strategy(devices: Sequence[LogicalDevice], seed: int) -> Strategy:
    """On ``devices`` of this process; together with the others in a job of several workers, as under lockstep run.

    Raises:
        ClusterError: a malformed cluster, or workers that did not come.
    """
    cluster = cluster_from_environment()
    if cluster is None or cluster.num_workers == 1:
        return MirroredStrategy(devices, seed=seed)
    return MultiWorkerMirroredStrategy(devices, cluster=cluster, seed=seed)


def speaks() -> bool:
    """Whether this process is the one that prints: the chief, or the only one."""
    cluster = cluster_from_environment()
    return cluster is None or cluster.is_chief


def declared_workers() -> int | None:
    """How many workers the environment declares; None where it declares none, and a command may start its own."""
    cluster = cluster_from_environment()
    return None if cluster is None else cluster.num_workers
