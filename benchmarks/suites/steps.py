"""Suite ``steps``: what a small step costs, beside the plain loop of the same work in one process.

width-64, width-256   plain  lockstep-1, -2, -4  fit-1, -2  ddp-2, -4  fabric  lightning  accelerate  keras
parts                 the same plain, on one and on two replicas, up to each part of the step
blocks                plain  lockstep tensor  torch tensor  lockstep pipeline  torch pipeline
import                import torch  import lockstep  import and use

A step takes fractions of a millisecond, so the clock is read once a burst of steps. The fastest burst of a round says
what the code costs; the median also what other programs on the machine do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.frameworks import ENVIRONMENTS, PROGRAMS
from benchmarks.harness import Absence, Sample, run_rounds
from benchmarks.loops import SETTINGS
from benchmarks.processes import Body, ProcessInfo, SpawnedBody
from benchmarks.programs import Program
from benchmarks.report import Column, Report, Section, columns, report_of
from benchmarks.results import Comparison, Figures, median_step, paired_ratios
from benchmarks.small_step_loops import (
    MICROBATCHES,
    train_ddp,
    train_our_pipeline,
    train_our_tensor,
    train_torch_pipeline,
    train_torch_tensor,
)
from benchmarks.small_steps import (
    BLOCKS,
    MODULES,
    PARTS,
    RATE,
    ROWS,
    STEP_PART,
    STEP_PARTS,
    WIDTHS,
    small_batches,
)
from benchmarks.step_timer import StepTimer
from benchmarks.suites.cpu import chosen_contenders, found_versions, sections_of
from benchmarks.trial import Conditions, Contender, Pace, Role, Trial, Workload
from lockstep.errors import ConfigError

PACE = Pace(warm_up=64, steps=250, rounds=3)  # our checks look at the 64th step, and then at the 128th
BURST = 25
"""Steps between two readings of the clock."""
IMPORT = "import"
PLAIN = "plain"
IMPORT_TORCH, IMPORT_OURS, IMPORT_AND_USE = "import torch", "import lockstep", "import and use"
_PROGRAMS: Mapping[str, str] = {
    IMPORT_TORCH: "import torch",
    IMPORT_OURS: "import lockstep",
    IMPORT_AND_USE: "import torch, lockstep as ls; ls.MirroredStrategy, ls.Model, ls.compute_average_loss",
}
_IMPORTS = 3
"""Timed imports of a round, each in a fresh interpreter."""
_SHORTER = 5
"""The steps of the blocks take longer, so a burst has so many times fewer."""

MAX_IMPORT_S = 0.15
"""What ``import lockstep`` may take more than ``import torch``."""
MAX_MEMORY_RATIO = 1.02
"""Peak memory of an own loop on one replica over that of the plain loop."""
_ANY_WIDTH = (
    ("lockstep-1", PLAIN, 1.3),
    ("lockstep-1", "fabric", 1.05),
    ("fit-1", PLAIN, 1.5),
    ("fit-1", "lightning", 0.7),
    ("lockstep-4", "ddp-4", 0.5),
)
TARGETS: Mapping[str, Sequence[tuple[str, str, float]]] = {
    "width-64": (*_ANY_WIDTH, ("lockstep-2", "ddp-2", 0.7), ("fit-2", "ddp-2", 0.7)),
    "width-256": (*_ANY_WIDTH, ("lockstep-2", "ddp-2", 0.6), ("fit-2", "ddp-2", 0.6)),
    STEP_PARTS: (),
    BLOCKS: (("lockstep tensor", "torch tensor", 1.1), ("lockstep pipeline", "torch pipeline", 1.1)),
}
"""Of each workload: a contender, another, and what the project wants of the first one's step over the other's."""


def _small(name: str, title: str) -> Workload:
    return Workload(
        name=name,
        title=f"{title}, global batch {ROWS}, mean squared error, Adam {RATE:g} with `fused=True`",
        make_module=MODULES[name],
        make_batches=partial(small_batches, name),
        count=ROWS,
        learning_rate=RATE,
    )


_WORKLOADS: Mapping[str, Workload] = {
    each.name: each
    for each in (
        *(
            _small(name, f"Five linear layers of width {width}, a ReLU after each")
            for name, width in WIDTHS.items()
            if name not in {BLOCKS, STEP_PARTS}
        ),
        _small(STEP_PARTS, f"The parts of a step with five linear layers of width {WIDTHS[STEP_PARTS]}"),
        _small(BLOCKS, f"Four blocks of two linear layers, width {WIDTHS[BLOCKS]}, between two workers"),
        Workload(name=IMPORT, title="Imports, each in a fresh interpreter"),
    )
}


def contenders(workload: str) -> list[Contender]:
    """The contenders of a workload, the unit first."""
    if workload == IMPORT:
        return [_import(name, "baseline" if name == IMPORT_TORCH else "ours") for name in _PROGRAMS]
    if workload == STEP_PARTS:
        return _part_contenders()
    plain = _program(PLAIN, "steps_plain.py", "python, one process, a loop by hand; the unit", "baseline")
    if workload == BLOCKS:
        return [plain, *_divided()]
    return [
        plain,
        *(_ours("lockstep", "steps_lockstep.py", "an own loop", replicas) for replicas in (1, 2, 4)),
        *(_ours("fit", "steps_fit.py", 'Model.fit, loss="mse", verbose=0,', replicas) for replicas in (1, 2)),
        *(
            _spawned(f"ddp-{number}", f"{number} processes, a loop by hand, {SETTINGS}", train_ddp, "baseline", number)
            for number in (2, 4)
        ),
        _program("fabric", "steps_fabric.py", "Fabric, one process", "peer", peer="fabric"),
        _program(
            "lightning", "steps_lightning.py", "Lightning's Trainer, one process, no logger, bar or checkpoints",
            "peer", peer="lightning",
        ),
        _program("accelerate", "steps_accelerate.py", "Accelerator.prepare, one process", "peer", peer="accelerate"),
        _program(
            "keras", "steps_keras.py", "Keras on torch, one process, Model.fit, verbose=0, Keras's Adam", "peer",
            variables={"KERAS_BACKEND": "torch"},
        ),
    ]  # fmt: skip


def _ours(name: str, script: str, how: str, replicas: int) -> Contender:
    settings = f"{how} on a MirroredStrategy, CPU split in {replicas}, one process"
    return _program(f"{name}-{replicas}", script, settings, "ours", replicas)


def _program(
    name: str, script: str, settings: str, role: Role, replicas: int = 1, *, peer: str = "",
    variables: Mapping[str, str] | None = None,
) -> Contender:  # fmt: skip
    python = ENVIRONMENTS / peer / "bin" / "python" if peer else Path(sys.executable)
    # With bytecode, so that the peak memory is not that of compiling sources.
    environment = {"PYTHONDONTWRITEBYTECODE": "", **(variables or {})}
    return Contender(
        name=name,
        settings=f"{settings}, one intra-op thread{' each' if replicas > 1 else ''}",
        launcher=Program(python=python, script=PROGRAMS / script, variables=environment),
        replicas=replicas,
        role=role,
        peer=peer,
    )


def _part_contenders() -> list[Contender]:
    """Of each loop the steps that end after each part; the plain loop makes neither runs nor shards."""
    return [
        *(_up_to(part, "plain", "steps_parts_plain.py", "one process, a loop by hand") for part in PARTS[1:-1]),
        *(
            _up_to(part, f"lockstep-{number}", "steps_parts.py", f"an own loop, CPU split in {number}", number)
            for number in (1, 2)
            for part in PARTS
        ),
    ]


def _up_to(part: str, loop: str, script: str, settings: str, replicas: int = 1) -> Contender:
    role: Role = "ours" if script == "steps_parts.py" else "baseline"
    return _program(f"{loop} {part}", script, settings, role, replicas, variables={STEP_PART: part})


def _spawned(name: str, settings: str, body: Body, role: Role, processes: int) -> Contender:
    return Contender(
        name=name,
        settings=f"{settings}, one intra-op thread each",
        launcher=SpawnedBody(body=body, preloaded=__name__),
        replicas=processes,
        processes=processes,
        role=role,
    )


def _divided() -> list[Contender]:
    by_hand, order = "two processes over gloo, a loop by hand,", f"1F1B with {MICROBATCHES} microbatches"
    return [
        _spawned("lockstep tensor", "ParallelStrategy(tensor=2), an own loop", train_our_tensor, "ours", 2),
        _spawned("torch tensor", f"{by_hand} parallelize_module", train_torch_tensor, "baseline", 2),
        _spawned(
            "lockstep pipeline", f"ParallelStrategy(pipeline=2), Model.fit, {order}", train_our_pipeline, "ours", 2
        ),
        _spawned("torch pipeline", f"{by_hand} {order}", train_torch_pipeline, "baseline", 2),
    ]


def _import(name: str, role: Role) -> Contender:
    return Contender(
        name=name,
        settings=f'`python -c "{_PROGRAMS[name]}"`, from its start to its end',
        launcher=SpawnedBody(body=partial(run_interpreters, program=_PROGRAMS[name]), preloaded=__name__),
        replicas=1,
        role=role,
    )


def run_interpreters(trial: Trial, process: ProcessInfo, timer: StepTimer, *, program: str) -> None:
    """Each step is a fresh interpreter. The first one writes what bytecode there is none of."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    for _ in range(timer.total):
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        timer.record_step(0.0)


def fastest_burst(sample: Sample) -> float:
    """Milliseconds of a step in the fastest burst of a round."""
    return min(sample.step_ms)


def _named(figures: Sequence[Figures]) -> dict[str, Figures]:
    return {each.contender.name: each for each in figures}


def comparisons_of(workload: str, figures: Sequence[Figures]) -> list[Comparison]:
    """What the project has targets for; what needs a contender that did not run is left out."""
    rows = _named(figures)
    if workload == IMPORT:
        return _import_comparisons(rows)
    found = [
        Comparison(
            text=f"fastest burst, {ours} / {other}", values=_ratios(rows, ours, other, fastest_burst), limit=limit
        )
        for ours, other, limit in TARGETS[workload]
        if ours in rows and other in rows
    ]
    if "lockstep-1" in rows and PLAIN in rows:
        values = _ratios(rows, "lockstep-1", PLAIN, lambda sample: sample.memory.peak_mb)
        text = f"peak resident memory, lockstep-1 / {PLAIN}"
        found.append(Comparison(text=text, values=values, limit=MAX_MEMORY_RATIO))
    return found


def _ratios(rows: Mapping[str, Figures], ours: str, other: str, value: Callable[[Sample], float]) -> tuple[float, ...]:
    return paired_ratios(rows[ours].samples, rows[other].samples, value)


def _import_comparisons(rows: Mapping[str, Figures]) -> list[Comparison]:
    """How much longer ours take than torch, in seconds."""
    if IMPORT_TORCH not in rows:
        return []
    torch_ms = {sample.round: median_step(sample) for sample in rows[IMPORT_TORCH].samples}
    found = []
    for name, limit in ((IMPORT_OURS, MAX_IMPORT_S), (IMPORT_AND_USE, None)):
        if name in rows:
            both = [sample for sample in rows[name].samples if sample.round in torch_ms]
            values = tuple((median_step(sample) - torch_ms[sample.round]) / 1000 for sample in both)
            found.append(Comparison(text=f"{name} - {IMPORT_TORCH}", values=values, limit=limit, unit=" s"))
    return found


def _columns(workload: str, figures: Sequence[Figures]) -> Mapping[str, Column]:
    if workload == IMPORT:
        return {"seconds": lambda row: f"{row.median_ms / 1000:.2f}"}
    if workload == STEP_PARTS:
        return _part_columns(figures)
    plain = _named(figures).get(PLAIN)

    def over_plain(row: Figures, value: Callable[[Sample], float]) -> str:
        return "" if plain is None else f"{median(paired_ratios(row.samples, plain.samples, value)):.2f}"

    return {
        "fastest us": lambda row: f"{1000 * min(row.steps):.0f}",
        "of plain": lambda row: over_plain(row, fastest_burst),
        "median us": lambda row: f"{1000 * row.median_ms:.0f}",
        "median of plain": lambda row: over_plain(row, median_step),
        "CPU us": lambda row: f"{1000 * row.over_rounds(lambda sample: sample.cpu_ms):.0f}",
        **columns("peak MB", "loss", "parameters"),
    }


def _part_columns(figures: Sequence[Figures]) -> Mapping[str, Column]:
    """What a step takes up to a part, and how much that is more than up to the part before."""
    rows = _named(figures)

    def added(row: Figures) -> str:
        loop, _, part = row.contender.name.rpartition(" ")
        before = [f"{loop} {name}" for name in PARTS[: PARTS.index(part)]]
        fastest = [1000 * min(rows[name].steps) for name in before if name in rows]
        return f"{1000 * min(row.steps) - (fastest[-1] if fastest else 0.0):.0f}"

    return {"fastest us": lambda row: f"{1000 * min(row.steps):.0f}", "added us": added, **columns("parameters")}


_MEANINGS = {
    "fastest us": f"microseconds of a step in the fastest burst of all rounds. A burst is {BURST} steps; with the "
    f"blocks, which have {_SHORTER} times fewer steps, {BURST // _SHORTER}. of plain: the fastest burst of a round "
    "over that of the plain loop in the same round, and of these the median. Below 1 is faster.",
    "added us": "what the last part of the step adds to the row above it. run: a step function that does nothing. "
    "forward: the model. backward: the loss, the backward pass and zero_grad(). update: the sum of the gradients and "
    "the optimizer. data: another batch for each step, divided among the replicas.",
    "median us": "the median of all bursts of all rounds. median of plain: the median burst of a round over that of "
    "the plain loop, and of these the median.",
    "CPU us": "CPU time of a step, of all threads and processes together, waiting in a spinning barrier included.",
    "loss": "of the last step, but with `Model.fit` and Keras the mean of all steps. All train the same model on the "
    "same batches; Keras begins with other weights.",
    "limit": "what the project wants to reach.",
    "seconds": "of an interpreter from its start to its end: the median of all rounds. `import lockstep` by itself "
    "does not import torch, which comes with the first name that needs it; hence `import and use`.",
}


def section_of(workload: str, figures: Sequence[Figures], absences: Sequence[Absence] = ()) -> Section:
    """The table of a workload."""
    return Section(
        workload=workload,
        title=_WORKLOADS[workload].title,
        columns=_columns(workload, figures),
        figures=figures,
        comparisons=comparisons_of(workload, figures),
        absences=absences,
    )


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=tuple(_WORKLOADS), default=tuple(_WORKLOADS))


def trial_of(workload: str, contender: Contender, conditions: Conditions) -> Trial:
    """A trial with one intra-op thread for each replica or process.

    Raises:
        ConfigError: the steps are no whole number of bursts.
    """
    steps, warm_up, cores = conditions.steps, conditions.warm_up, contender.replicas
    if steps < 1 or steps % BURST:
        raise ConfigError(f"steps={steps} was given, expected a multiple of {BURST}, the steps of a burst")
    if workload == IMPORT:
        warm_up, steps, lap = 1, _IMPORTS, 1
    elif workload == BLOCKS:
        steps, lap = steps // _SHORTER, BURST // _SHORTER
    else:
        lap = BURST
    work = _WORKLOADS[workload]
    return Trial(workload=work, contender=contender, warm_up=warm_up, steps=steps, cores=cores, lap=lap)


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures the contenders of each workload in turn."""
    wanted = chosen_contenders({name: contenders(name) for name in asked.workload}, asked.only)
    peers = {each.peer for of_one in wanted.values() for each in of_one if each.peer}
    versions, missing = found_versions(sorted(peers))
    trials = [
        trial_of(name, each, conditions)
        for name, of_one in wanted.items()
        for each in of_one
        if each.peer not in missing
    ]
    rounds = run_rounds(trials, rounds=conditions.rounds)
    sections = sections_of(wanted, rounds, missing, section_of)
    conditions = replace(conditions, facts=tuple(versions.items()))
    name = f"steps-cpu-{conditions.machine.cores}"
    return report_of(name, conditions, "What a small step costs", sections, rounds.samples, meanings=_MEANINGS)
