"""``python -m benchmarks --gpu``: its options, and what they ask for."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks.gpu.budget import TOTAL_S, Budget
from benchmarks.gpu.run import GpuSettings, run_gpu
from benchmarks.gpu.setting import Pace
from lockstep.errors import ConfigError

_WARM_UP, _LAP_STEPS, _LAPS, _ROUNDS = 10, 10, 3, 3


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    """The options that belong to ``--gpu`` alone."""
    group = parser.add_argument_group("on a GPU")
    group.add_argument(
        "--gpu",
        action="store_true",
        help="measure on GPU 0 instead; --workload mlm mobilenetv2, --only, --warm-up, --steps (of a lap) and --rounds "
        "hold too; exit code 77 where there is no GPU",
    )
    group.add_argument("--tests", help="folder of tests: run those that need a GPU first; make gpu gives tests")
    group.add_argument(
        "--budget-s", type=float, default=TOTAL_S, help=f"seconds for everything (default {TOTAL_S:.0f})"
    )
    group.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the programs at tiny sizes, without a GPU"
    )


def measure_gpu(asked: argparse.Namespace, words: Sequence[str]) -> int:
    """Runs it, and returns the exit code.

    Raises:
        ConfigError: options that do not go together, or a value that cannot be.
    """
    others = (asked.memory, asked.layouts, asked.choices, asked.trainer, asked.workers, asked.peers != "no")
    if any(others):
        raise ConfigError(
            "--gpu measures on a GPU alone; leave --memory, --layouts, --trainer, --workers and the like out"
        )
    return run_gpu(gpu_settings(asked, words))


def gpu_settings(asked: argparse.Namespace, words: Sequence[str]) -> GpuSettings:
    """What the command line asks for."""
    return GpuSettings(
        command=shlex.join(["python", "-m", "benchmarks", *words]),
        date=date.today().isoformat(),
        output=Path(asked.output),
        device=asked.device,
        pace=Pace(
            warm_up=_WARM_UP if asked.warm_up is None else asked.warm_up,
            lap_steps=_LAP_STEPS if asked.steps is None else asked.steps,
            laps=_LAPS,
        ),
        rounds=_ROUNDS if asked.rounds is None else asked.rounds,
        budget=Budget(total_s=asked.budget_s),
        workloads=tuple(asked.workload or ()),
        only=tuple(asked.only or ()),
        tests=None if asked.tests is None else Path(asked.tests).resolve(),
    )
