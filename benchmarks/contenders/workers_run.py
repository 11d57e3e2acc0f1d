"""Ours on many workers: a MultiWorkerMirroredStrategy in every process, and the loop of one process as it is."""

from __future__ import annotations

import socket

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

import lockstep as ls
from benchmarks.contenders.lockstep_run import split_cpu, train_with
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trial import Trial
from lockstep.collectives.options import Compression

_LOOPBACK = "127.0.0.1"


def run_worker(trial: Trial, seat: Seat, laps: Laps, *, compression: Compression | None = None) -> None:
    """One of ``trial.contender.processes`` workers, each with an equal part of the replicas. All must call it.

    Args:
        trial: the work.
        seat: this worker's.
        laps: the stopwatch.
        compression: of what the workers send each other.
    """
    torch.set_num_threads(trial.threads_per_process)
    torch.manual_seed(0)
    devices = split_cpu(trial.contender.shares // trial.contender.processes)
    cluster = _cluster(trial.contender.processes, seat)
    options = ls.CommunicationOptions(compression=compression)
    strategy = ls.MultiWorkerMirroredStrategy(devices, cluster=cluster, communication=options)
    train_with(strategy, trial.workload, trial.workload.make_batches(laps.total), laps)


def _cluster(workers: int, seat: Seat) -> ls.ClusterSpec:
    """The chief tells the others, through the file at which they meet, where its store will listen."""
    store = FileStore(seat.store, workers)
    if seat.rank == 0:
        with socket.socket() as probe:
            probe.bind((_LOOPBACK if seat.host is None else seat.host.address, 0))
            host, port = probe.getsockname()
        store.set("chief", f"{host}:{port}")
    return ls.ClusterSpec(workers=(store.get("chief").decode(), *[""] * (workers - 1)), index=seat.rank)
