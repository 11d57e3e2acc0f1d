"""Suite ``sums``: sums between workers in the order of the tree beside gloo's ring, alone and in training steps.

25 MB, 100 MB:           one tensor a step             tree-2 ring-2 tree-4 ring-4
MobileNetV2, bert_tiny:  a step of as many workers     tree-2 ring-2 tree-4 ring-4
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

import lockstep as ls
from benchmarks.loops import cluster_of, run_worker, split_cpu
from benchmarks.processes import ProcessInfo, SpawnedBody
from benchmarks.report import Report, columns, report_in_turn
from benchmarks.results import Comparison, Figures, compare_steps, with_role
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Conditions, Contender, Pace, Trial, Workload, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS
from lockstep.collectives.distributed import DistributedCommunicator
from lockstep.collectives.process_group import ProcessGroup, Work

PACE = Pace(warm_up=3, steps=30, rounds=3)
LIMIT = 1.1
"""The time of the tree over that of the ring."""
_WORKERS = (2, 4)
_SIZES_MB = (25, 100)


def contenders() -> tuple[Contender, ...]:
    """The tree and the ring, on two and on four workers of one replica."""
    return tuple(
        Contender(
            name=f"{order}-{workers}",
            settings=f"MultiWorkerMirroredStrategy, {workers} workers of 1 replica, this machine, gloo, {how}",
            launcher=SpawnedBody(body=partial(_work, ring=order == "ring")),
            replicas=workers,
            processes=workers,
            layout="auto",
            role="ours" if order == "tree" else "baseline",
        )
        for workers in _WORKERS
        for order, how in (("tree", "sums in the order of the tree"), ("ring", "sums by gloo's ring all-reduce"))
    )


def _start_ring(group: ProcessGroup, parts: Sequence[torch.Tensor]) -> Work:
    """``ProcessGroup.start_sum`` by gloo's own all-reduce."""
    (flat,) = parts
    work: Work = group._started(group._backend.allreduce([flat]))
    return work


def _work(trial: Trial, process: ProcessInfo, timer: StepTimer, *, ring: bool) -> None:
    if ring:
        ProcessGroup.start_sum = _start_ring  # type: ignore[assignment,method-assign]
    if trial.workload.name in WORKLOADS:
        run_worker(trial, process, timer)
        return
    torch.set_num_threads(trial.threads_per_process)
    strategy = ls.MultiWorkerMirroredStrategy(split_cpu(1), cluster=cluster_of(trial, process))
    workers = strategy.workers
    assert isinstance(workers, DistributedCommunicator)
    group = workers.new_group("measured", torch.device("cpu"))
    flat = trial.workload.make_module().get_parameter("flat").data
    for _ in range(timer.total):
        group.wait(group.start_sum([flat.fill_(1.0)]), "a measured sum")
        workers.all_gather_numbers("end of a measured sum")
        timer.record_step(float(flat[-1]))
    strategy.close()


class _Flat(nn.Module):
    def __init__(self, size_mb: int) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.ones(size_mb * 2**18))


def _sizes() -> list[Workload]:
    return [
        Workload(name=f"{size}mb", title=f"one tensor of {size} MB, float32", make_module=partial(_Flat, size))
        for size in _SIZES_MB
    ]


def comparisons_of(figures: Sequence[Figures]) -> list[Comparison]:
    """The tree over the ring of as many workers."""
    return [
        compare_steps(tree, ring, LIMIT)
        for tree in with_role(figures, "ours")
        for ring in with_role(figures, "baseline")
        if tree.contender.replicas == ring.contender.replicas
    ]


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    known = [*(size.name for size in _sizes()), *WORKLOADS]
    usual = [*(size.name for size in _sizes()), *USUAL_WORKLOADS]
    parser.add_argument("--workload", nargs="+", choices=known, default=usual)


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures all contenders in turn."""
    workloads = {each.name: each for each in [*_sizes(), *WORKLOADS.values()]}
    chosen = select_contenders(contenders(), asked.only)
    work = [(workloads[name], chosen) for name in asked.workload]
    shown = columns("step ms", "p10", "p90", "CPU ms", "peak MB")
    name = f"sums-cpu-{conditions.machine.cores}"
    return report_in_turn(name, conditions, "Sums between workers on CPUs", work, shown, comparisons_of, meanings={})
