"""Suite ``choices``: what replicas of a CPU gain or lose by choices that the engine makes differently."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

import lockstep as ls
from benchmarks.harness import log_progress, run_rounds, trials_of
from benchmarks.loops import run_replicas, train_replicas
from benchmarks.processes import Body, ProcessInfo, SpawnedBody
from benchmarks.report import Report, head
from benchmarks.results import Figures, figures_of
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Conditions, Contender, Pace, Trial, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS, find_workload
from lockstep.report import markdown_table

PACE = Pace(warm_up=3, steps=10, rounds=3)


def run_pinned(trial: Trial, seat: ProcessInfo, laps: StepTimer) -> None:
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


def run_with_all_cores(trial: Trial, seat: ProcessInfo, laps: StepTimer) -> None:
    """Every replica has as many intra-op threads as there are cores, in place of its share of them."""
    torch.set_num_threads(trial.cores * trial.contender.shares)
    train_replicas(trial.workload, trial.workload.make_batches(laps.total), laps, replicas=trial.contender.shares)


def run_in_bf16(trial: Trial, seat: ProcessInfo, laps: StepTimer) -> None:
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


_SHARES = (2, 4)


def choices() -> tuple[Contender, ...]:
    """All of them; the first is what the others' ratios are to."""
    return tuple(
        _choice(f"{name}, {shares}", f"{shares} replicas, {settings}", body, shares)
        for shares in _SHARES
        for name, settings, body in (
            ("as it is", "each with its share of the cores as intra-op threads, float32", run_replicas),
            ("pinned", "each replica's thread kept on cores of its own", run_pinned),
            ("all cores each", "each with as many intra-op threads as there are cores", run_with_all_cores),
            ("bf16", "the forward pass under autocast in bfloat16", run_in_bf16),
        )
    )


def _choice(name: str, settings: str, body: Body, shares: int) -> Contender:
    return Contender(
        name=name, settings=settings, launcher=SpawnedBody(body=body), shares=shares, layout="auto", role="ours"
    )


_HEADINGS = ("choice", "step ms", "p10", "p90", "ratio", "CPU ms", "exchange + update", "peak MB", "loss")
_LEGEND = """\
- ratio: to the first row: the median step over that one's of the same round, and of these the median.
- CPU ms: CPU time of a step, of all threads together. exchange + update: as part of the step, from the arrival of the
  last replica at `optimizer.step`.
- loss: of the last step; the batches and the first weights are the same for all."""


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=USUAL_WORKLOADS)


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures every choice once a round, each time in a fresh process."""
    workloads, chosen = [find_workload(name) for name in asked.workload], select_contenders(choices(), asked.only)
    trials = [trial for workload in workloads for trial in trials_of(workload, chosen, conditions)]
    samples = run_rounds(trials, rounds=conditions.rounds, progress=log_progress).samples
    blocks = [head(conditions, "Choices of replicas on a CPU")]
    for workload in workloads:
        figures = figures_of(chosen, samples, workload.name)
        blocks += [f"## {workload.title}", markdown_table(_HEADINGS, [_row(row) for row in figures])]
    blocks += ["\n".join(f"- {choice.name}: {choice.settings}" for choice in chosen), _LEGEND]
    return Report(
        name=f"choices-cpu-{conditions.machine.cores}",
        date=conditions.date,
        text="\n\n".join(blocks) + "\n",
        record={"conditions": asdict(conditions), "samples": [asdict(sample) for sample in samples]},
    )


def _row(row: Figures) -> list[str]:
    return [
        row.contender.name,
        *(f"{value:.1f}" for value in (row.median_ms, row.p10_ms, row.p90_ms)),
        f"{row.ratio:.3f}",
        f"{row.cpu_ms:.0f}",
        "" if row.exchange_share is None else f"{row.exchange_share:.1%}",
        f"{row.memory.peak_mb:.0f}",
        f"{row.loss:.4f}",
    ]
