"""The yardsticks of the parallel efficiency: one share of the work on one share of the cores, without communication.

One process of it tells what a replica takes that has the machine's memory and caches to itself; as many at once as
there are shares tell what the machine has for each when all are at work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.contenders.lockstep_run import train_replicas
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.team import TRIAL_LIMIT_S
from benchmarks.trial import Batch, Trial
from lockstep.data.sharding import split_batch


def train_one_share(trial: Trial, seat: Seat, laps: Laps) -> None:
    """One replica in this process, on its own share of each global batch; several processes are timed side by side."""
    shares = trial.contender.shares
    torch.set_num_threads(max(1, trial.cores // shares))
    workload = replace(trial.workload, count=trial.workload.count // shares)
    batches = [split_batch(batch, shares)[seat.rank] for batch in trial.workload.make_batches(laps.total)]
    train_replicas(workload, _meeting(batches, trial, seat), laps, replicas=1)


def _meeting(batches: Sequence[Batch], trial: Trial, seat: Seat) -> Iterator[Batch]:
    """The batches; before the last step of the warm-up the processes wait for each other."""
    for index, batch in enumerate(batches):
        if index == trial.warm_up - 1:
            _meet(trial.contender.processes, seat)
        yield batch


def _meet(processes: int, seat: Seat) -> None:
    store = FileStore(seat.store, processes)
    if store.add("arrived", 1) == processes:
        store.set("all", "1")
    store.wait(["all"], timedelta(seconds=TRIAL_LIMIT_S))
