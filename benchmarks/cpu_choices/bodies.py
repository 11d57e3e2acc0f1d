"""The loop of ``lockstep_run`` with one thing done otherwise than the engine does it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import lockstep as ls
from benchmarks.contenders.lockstep_run import train_replicas
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trial import Trial


def run_pinned(trial: Trial, seat: Seat, laps: Laps) -> None:
    """Every replica's thread stays on cores of its own, where the system moves it as it likes otherwise."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // trial.contender.shares)
    pinned: set[int] = set()

    def pin() -> None:
        context = ls.get_replica_context()
        if context is None or context.local_replica in pinned:
            return
        pinned.add(context.local_replica)
        first = context.local_replica * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])  # of the calling thread

    def loss(outputs: Any, y: Tensor) -> tuple[Tensor, Any]:
        pin()
        return trial.workload.loss(outputs, y)

    torch.set_num_threads(trial.cores)
    workload = replace(trial.workload, loss=loss)
    train_replicas(workload, workload.make_batches(laps.total), laps, replicas=trial.contender.shares)


def run_with_all_cores(trial: Trial, seat: Seat, laps: Laps) -> None:
    """Every replica has as many intra-op threads as there are cores, in place of its share of them."""
    torch.set_num_threads(trial.cores * trial.contender.shares)
    train_replicas(trial.workload, trial.workload.make_batches(laps.total), laps, replicas=trial.contender.shares)


def run_in_bf16(trial: Trial, seat: Seat, laps: Laps) -> None:
    """The forward pass computes in bfloat16 where autocast says so; the loss in float32."""
    module_of = trial.workload.make_module

    def make_module() -> torch.nn.Module:
        return _Autocast(module_of())

    def loss(outputs: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        return trial.workload.loss(outputs.float(), y)

    torch.set_num_threads(trial.cores)
    workload = replace(trial.workload, make_module=make_module, loss=loss)
    train_replicas(workload, workload.make_batches(laps.total), laps, replicas=trial.contender.shares)


class _Autocast(torch.nn.Module):
    """A module whose forward pass runs under autocast."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module inside gives."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(*inputs, **named)
