"""``lockstep verify``: does a program give the same numbers on N replicas as on one, and if not, why?"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lockstep import console
from lockstep_tools.cli.flags import BEFORE_A_PROGRAM, command
from lockstep_tools.verify.config import Program, VerifyConfig
from lockstep_tools.verify.report import render
from lockstep_tools.verify.report import verify as run_verification

_RECIPES = ("mlm", "images")


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep verify``."""
    example = "Example: lockstep verify --devices cpu:4 train.py --batch-size 32"
    app.command("verify", epilog=example, context_settings=BEFORE_A_PROGRAM)(command(Verify))


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run the first steps of a program on N replicas and on one, compare all numbers, and say why they differ.

    The program's own arguments come after its name. Exit code: 0 if equal within rounding, or different by dropout
    alone; 1 if different; 2 if the arguments or the program are wrong.

    Args:
        program: a Python file, or the name of a recipe: mlm or images.
        arguments: the program's own arguments.
        steps: number of optimizer updates to compare.
        devices: how to divide the devices before the program starts, as in lockstep devices. Default: as the program
            does.
        timeout_s: time limit of each run, in seconds.
        quiet: print only the report, not what is running.
    """

    program: Annotated[str, typer.Argument(metavar="SCRIPT_OR_RECIPE")]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS")] = None
    steps: int = 3
    devices: Annotated[str | None, typer.Option(metavar="SPEC")] = None
    timeout_s: float = 300.0
    quiet: bool = False

    def __call__(self) -> int:
        program = find_program(self.program, tuple(self.arguments or ()))
        config = VerifyConfig(program=program, steps=self.steps, devices=self.devices, timeout_s=self.timeout_s)
        report = run_verification(config, progress=None if self.quiet else _print_progress)
        print(console.fill(render(report)))
        return 0 if report.sound else 1


def find_program(name: str, arguments: tuple[str, ...]) -> Program:
    """The script at that path or, if there is none, the recipe of that name."""
    if name in _RECIPES and not Path(name).exists():
        return Program(
            name=name,
            target="lockstep_tools.cli",
            kind="module",
            arguments=("train", name, "--quiet", *arguments),
            # Each run writes into a folder of its own; in a common one it would refuse the results of the other.
            scratch_flag="--output",
        )
    return Program(name=Path(name).name, target=name, arguments=arguments)


def _print_progress(line: str) -> None:
    # On standard error, so that the report alone can be redirected.
    print(f"comparing {line} ...", file=sys.stderr, flush=True)
