"""Suite ``start``: from the start of a program to the end of its first step, on two replicas, beside DDP.

Each contender is a program that a user would start: ``python program.py``, ``torchrun program.py``, ``lockstep train``.
All imports, the launcher, the data, the model and one step are in the time.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.frameworks import PROGRAMS, TORCHRUN
from benchmarks.harness import run_rounds, trials_of
from benchmarks.loops import layouts_of
from benchmarks.programs import Program
from benchmarks.report import Report, Section, columns, report_of
from benchmarks.results import Comparison, Figures, figures_of, paired_ratios
from benchmarks.trial import Batch, Conditions, Contender, Layout, Pace, Role, Workload, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS

PACE = Pace(warm_up=1, steps=1, rounds=7)
MAX_START_RATIO = 0.8
"""Our time from the start of the program to the end of the first step over DDP's, with torchrun."""
_OURS, _DDP = "lockstep-2", "ddp-2"


def _no_batches(_: int) -> list[Batch]:
    return [(torch.zeros(1), torch.zeros(1))]


_RECIPES = (
    Workload(
        name="train-images",
        title="`lockstep train images`: decoding scikit-learn's digits, MobileNetV2 of 32x32, global batch 64, Adam, "
        "accuracy, logs for TensorBoard",
        make_batches=_no_batches,  # the programs read data of their own
    ),
    Workload(
        name="train-mlm",
        title="`lockstep train mlm`: reading Python's documentation, training a tokenizer, bert_tiny, global batch 128 "
        "lines of at most 512 tokens, Adam, accuracy, logs for TensorBoard",
        make_batches=_no_batches,
    ),
)
_WORKLOADS: Mapping[str, Workload] = {
    **{name: WORKLOADS[name] for name in USUAL_WORKLOADS},
    **{workload.name: workload for workload in _RECIPES},
}


def contenders(workload: str) -> list[Contender]:
    """Ours, DDP under torchrun, and one process as a reference."""
    recipe = workload.startswith("train-")
    layout = layouts_of(workload)[0]
    ours = "lockstep train --devices cpu:2" if recipe else "python with MirroredStrategy, CPU split in 2, one process"
    same = "; the recipe's own data and batches, accuracy without torchmetrics" if recipe else f", {layout}"
    return [
        _program(_OURS, ours, "start_recipe.py" if recipe else "start_lockstep.py", "ours", layout="auto"),
        _program(
            _DDP, f"{' '.join(TORCHRUN)}, gloo{same}", "start_ddp.py", "baseline",
            arguments=TORCHRUN, processes=2, layout=layout,
        ),
        _program("single", f"python, one process, no strategy{same}", "start_ddp.py", "reference", 1, layout=layout),
    ]  # fmt: skip


def _program(
    name: str, settings: str, script: str, role: Role, replicas: int = 2, *,
    layout: Layout, processes: int = 1, arguments: tuple[str, ...] = (),
) -> Contender:  # fmt: skip
    launcher = Program(python=Path(sys.executable), script=PROGRAMS / script, arguments=arguments)
    return Contender(
        name=name,
        settings=settings,
        launcher=launcher,
        replicas=replicas,
        processes=processes,
        layout=layout,
        role=role,
    )


def comparisons_of(figures: Sequence[Figures]) -> list[Comparison]:
    """Ours over each of the others: time, and CPU time."""
    by_name = {each.contender.name: each for each in figures}
    ours = by_name.pop(_OURS, None)
    if ours is None:
        return []
    found = []
    for name, other in by_name.items():
        values = paired_ratios(ours.samples, other.samples, lambda sample: sample.first_step_s)
        limit = MAX_START_RATIO if name == _DDP else None
        found.append(Comparison(text=f"start to first step, {_OURS} / {name}", values=values, limit=limit))
        values = paired_ratios(ours.samples, other.samples, lambda sample: sample.first_step_cpu_s)
        found.append(Comparison(text=f"CPU time of the start, {_OURS} / {name}", values=values))
    return found


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=tuple(_WORKLOADS), default=tuple(_WORKLOADS))


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures all contenders in turn."""
    chosen = {name: select_contenders(contenders(name), asked.only) for name in asked.workload}
    trials = [trial for name in asked.workload for trial in trials_of(_WORKLOADS[name], chosen[name], conditions)]
    rounds = run_rounds(trials, rounds=conditions.rounds)
    sections = [
        Section(
            workload=name,
            title=_WORKLOADS[name].title,
            columns=columns("first step s", "first step CPU s"),
            figures=(figures := figures_of(chosen[name], rounds.samples, name)),
            comparisons=comparisons_of(figures),
            absences=[each for each in rounds.absences if each.workload == name],
        )
        for name in asked.workload
    ]
    title = "Start of a program on a CPU"
    return report_of(f"start-cpu-{conditions.machine.cores}", conditions, title, sections, rounds.samples)
