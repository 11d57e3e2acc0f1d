"""Suite ``choices``: what replicas of a CPU gain or lose by choices that the engine makes differently."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import lockstep as ls
from benchmarks.harness import log_progress, run_rounds, trials_of
from benchmarks.loops import run_replicas, train_replicas
from benchmarks.processes import ProcessInfo, SpawnedBody
from benchmarks.report import Report, Section, columns, report_of
from benchmarks.results import figures_of
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Conditions, Contender, Pace, Trial, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS

PACE = Pace(warm_up=3, steps=10, rounds=3)


def run_pinned(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
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
    train_replicas(workload, workload.make_batches(timer.total), timer, replicas=trial.contender.shares)


def run_with_all_cores(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """Every replica has as many intra-op threads as there are cores, in place of its share of them."""
    torch.set_num_threads(trial.cores * trial.contender.shares)
    train_replicas(trial.workload, trial.workload.make_batches(timer.total), timer, replicas=trial.contender.shares)


def run_in_bf16(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """The forward pass computes in bfloat16 where autocast says so; the loss in float32."""
    module_of = trial.workload.make_module

    def make_module() -> torch.nn.Module:
        return _Autocast(module_of())

    def loss(outputs: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        return trial.workload.loss(outputs.float(), y)

    torch.set_num_threads(trial.cores)
    workload = replace(trial.workload, make_module=make_module, loss=loss)
    train_replicas(workload, workload.make_batches(timer.total), timer, replicas=trial.contender.shares)


class _Autocast(torch.nn.Module):
    """A module whose forward pass runs under autocast."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(*inputs, **named)


def choices() -> tuple[Contender, ...]:
    """All of them; the ratios are to the first."""
    return tuple(
        Contender(
            name=f"{name}, {shares}",
            settings=f"{shares} replicas, {settings}",
            launcher=SpawnedBody(body=body),
            shares=shares,
            layout="auto",
            role="ours",
        )
        for shares in (2, 4)
        for name, settings, body in (
            ("as it is", "each with its share of the cores as intra-op threads, float32", run_replicas),
            ("pinned", "each replica's thread kept on cores of its own", run_pinned),
            ("all cores each", "each with as many intra-op threads as there are cores", run_with_all_cores),
            ("bf16", "the forward pass under autocast in bfloat16", run_in_bf16),
        )
    )


COLUMNS = columns("step ms", "p10", "p90", "ratio", "CPU ms", "exchange + update", "peak MB", "loss")


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=USUAL_WORKLOADS)


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures every choice once a round, each time in a fresh process."""
    chosen = select_contenders(choices(), asked.only)
    trials = [trial for name in asked.workload for trial in trials_of(WORKLOADS[name], chosen, conditions)]
    samples = run_rounds(trials, rounds=conditions.rounds, progress=log_progress).samples
    sections = [
        Section(workload=name, title=WORKLOADS[name].title, columns=COLUMNS, figures=figures_of(chosen, samples, name))
        for name in asked.workload
    ]
    return report_of("choices-cpu", conditions, "Choices of replicas on a CPU", sections, samples)
