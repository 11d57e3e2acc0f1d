"""Suite ``keras``: a Keras program on our replicas, on one device, and on TensorFlow's MirroredStrategy."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.frameworks import ENVIRONMENTS, PROGRAMS, peers_of
from benchmarks.programs import Program
from benchmarks.report import Report, columns, report_in_turn
from benchmarks.results import Comparison, Figures, compare_steps
from benchmarks.trial import Conditions, Contender, Pace, Role, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS

PACE = Pace(warm_up=3, steps=12, rounds=3)
LIMITS = {"keras": 0.85, "tensorflow-2 fit": 1.0, "tensorflow-2": 1.0}
"""The step time of two replicas over that of each other."""


def contenders(workload: str) -> list[Contender]:
    """Ours on two and four replicas, Keras alone, and TensorFlow, by the same program and by a loop of its own."""
    tensorflow = ENVIRONMENTS / "tensorflow" / "bin" / "python"
    return [
        _fit("lockstep-2", "torch", "distribute, MirroredStrategy, CPU split in 2", 2, "ours"),
        _fit("lockstep-4", "torch", "distribute, MirroredStrategy, CPU split in 4", 4, "ours"),
        _fit("keras", "torch", "Keras's own step, all cores as intra-op threads", 0, "baseline"),
        _fit("tensorflow-2 fit", "tensorflow", "MirroredStrategy on 2 logical CPU devices", 2, "peer", tensorflow),
        *(each for each in peers_of(workload) if each.name in LIMITS),
    ]


def _fit(
    name: str, backend: str, settings: str, replicas: int, role: Role, python: Path = Path(sys.executable)
) -> Contender:
    """The program ``train_keras.py`` on one backend of Keras."""
    variables = {"KERAS_BACKEND": backend, "REPLICAS": str(replicas), "TF_CPP_MIN_LOG_LEVEL": "2"}
    return Contender(
        name=name,
        settings=f"Keras on {backend}, {settings}, one process, Model.fit, NHWC",
        launcher=Program(python=python, script=PROGRAMS / "train_keras.py", variables=variables),
        replicas=max(1, replicas),
        layout="framework",
        role=role,
        peer=backend if role == "peer" else "",
    )


def comparisons_of(figures: Sequence[Figures]) -> list[Comparison]:
    """Two replicas over each of the others."""
    by_name = {each.contender.name: each for each in figures}
    ours = by_name.get("lockstep-2")
    return [
        compare_steps(ours, by_name[name], limit)
        for name, limit in LIMITS.items()
        if ours is not None and name in by_name
    ]


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=USUAL_WORKLOADS, default=USUAL_WORKLOADS)


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures all contenders in turn."""
    in_keras = [replace(WORKLOADS[name], title=f"{WORKLOADS[name].title}, in Keras layers") for name in asked.workload]
    work = [(each, select_contenders(contenders(each.name), asked.only)) for each in in_keras]
    shown = columns("step ms", "p10", "p90", "CPU ms", "peak MB", "loss", "parameters")
    name = f"keras-cpu-{conditions.machine.cores}"
    return report_in_turn(name, conditions, "Keras on CPUs", work, shown, comparisons_of, meanings={})
