"""Measures the choices in turn and writes the dated table, with JSON beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lockstep as ls
from benchmarks.harness import Progress, Sample, run_rounds
from benchmarks.loops import run_replicas, train_replicas
from benchmarks.processes import Body, Seat, SpawnedBody
from benchmarks.report import Conditions, head, settings_list
from benchmarks.results import Figures, figures_of
from benchmarks.step_timer import Laps
from benchmarks.suites.cpu import picked, trials_of
from benchmarks.trial import Contender, Trial, Workload
from benchmarks.workloads import find_workload
from lockstep.atomic_files import atomic_write
from lockstep.report import markdown_table


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


@dataclass(frozen=True, kw_only=True)
class ChoicesResult:
    """What came of it: the figures of each workload, and all samples."""

    conditions: Conditions
    figures: tuple[tuple[Workload, tuple[Figures, ...]], ...]
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        """The report as Markdown."""
        blocks = [head(self.conditions, "Choices of replicas on a CPU")]
        for workload, figures in self.figures:
            blocks += [f"## {workload.title}", markdown_table(_HEADINGS, [_row(row) for row in figures])]
        return "\n\n".join([*blocks, "\n".join(settings_list(self.figures[0][1])), _LEGEND]) + "\n"


def measure_cpu_choices(
    names: Sequence[str], conditions: Conditions, progress: Progress, *, only: Sequence[str] | None = None
) -> ChoicesResult:
    """Measures every choice once a round, each time in a fresh process.

    Args:
        names: of the workloads.
        conditions: how many steps and rounds.
        progress: told of each trial's outcome.
        only: names of the choices that are wanted; None for all.

    Raises:
        ConfigError: a name is nobody's.
        ReplicaError: a contender failed.
    """
    workloads, chosen = [find_workload(name) for name in names], picked(choices(), only)
    trials = [trial for workload in workloads for trial in trials_of(workload, chosen, conditions)]
    samples = run_rounds(trials, rounds=conditions.rounds, progress=progress).samples
    figures = tuple((workload, tuple(figures_of(chosen, samples, workload.name))) for workload in workloads)
    return ChoicesResult(conditions=conditions, figures=figures, samples=samples)


def write_choices_report(folder: Path, result: ChoicesResult) -> Path:
    """Writes ``DATE-choices-cpu-CORES.md`` and ``.json``, each whole or not at all; one of the same day is replaced.

    Returns:
        The path of the Markdown file.
    """
    record = {"conditions": asdict(result.conditions), "samples": [asdict(sample) for sample in result.samples]}
    base = folder / f"{result.conditions.date}-choices-cpu-{result.conditions.machine.cores}"
    atomic_write(base.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    return atomic_write(base.with_suffix(".md"), result.text)


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
