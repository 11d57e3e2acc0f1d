"""``lockstep verify``: does a program give the same numbers on N replicas as on one, and if not, why?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lockstep.atomic_files import atomic_write
from lockstep.cli.devices import DEVICES_SPEC
from lockstep.errors import ConfigError
from lockstep.verify.config import Program, VerifyConfig
from lockstep.verify.report import render, to_json
from lockstep.verify.report import verify as run_verification

EXAMPLE = "Example: lockstep verify --devices cpu:4 train.py --batch-size 32"
_RECIPES = ("mlm", "images")

ProgramArgument = Annotated[
    str, typer.Argument(metavar="SCRIPT_OR_RECIPE", help="A Python file, or the name of a recipe: mlm or images.")
]
ArgumentsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The program's own arguments.")
]
StepsFlag = Annotated[int, typer.Option(help="Number of optimizer updates to compare.")]
DevicesFlag = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="SPEC",
        help=f"How to divide the devices before the program starts. {DEVICES_SPEC} Default: as the program does.",
        show_default=False,
    ),
]
JsonFlag = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the report as JSON.", show_default=False)
]
TimeoutFlag = Annotated[float, typer.Option("--timeout-s", help="Time limit of each run, in seconds.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="Print only the report, not what is running.")]


def verify(
    *,
    program: ProgramArgument,
    arguments: ArgumentsArgument = None,
    steps: StepsFlag = 3,
    devices: DevicesFlag = None,
    json: JsonFlag = None,
    timeout_s: TimeoutFlag = 300.0,
    quiet: QuietFlag = False,
) -> Callable[[], int]:
    """Run the first steps of a program on N replicas and on one, compare all numbers, and say why they differ.

    The program's own arguments come after its name. Exit code: 0 if equal within rounding, or different by dropout
    alone; 1 if different; 2 if the arguments or the program are wrong.
    """

    def job() -> int:
        config = VerifyConfig(
            program=find_program(program, tuple(arguments or ())), steps=steps, devices=devices, timeout_s=timeout_s
        )
        if json is not None and json.expanduser().is_dir():
            raise ConfigError(f"--json {str(json)!r} is a folder, expected a file; give it a name")
        report = run_verification(config, progress=None if quiet else _print_progress)
        print(render(report))
        if json is not None:
            atomic_write(json.expanduser(), to_json(report))
        return 0 if report.sound else 1

    return job


def find_program(name: str, arguments: tuple[str, ...]) -> Program:
    """The script at that path or, if there is none, the recipe of that name."""
    if name in _RECIPES and not Path(name).exists():
        return Program(
            name=name,
            target="lockstep.cli",
            kind="module",
            arguments=("train", name, "--quiet", *arguments),
            scratch_flag="--output",
        )
    return Program(name=Path(name).name, target=name, arguments=arguments)


def _print_progress(line: str) -> None:
    print(f"comparing {line} ...", file=sys.stderr, flush=True)
