"""The tree of commands. A command only describes a job; ``main`` runs it, outside typer, so that errors are ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from typer.main import get_command

from lockstep.cli.bench import BENCH_EXAMPLE, bench_app
from lockstep.cli.data import data_app
from lockstep.cli.devices import devices
from lockstep.cli.in_workers import InWorkers
from lockstep.cli.plan import EXAMPLE as PLAN_EXAMPLE
from lockstep.cli.plan import plan
from lockstep.cli.run import EXAMPLE as RUN_EXAMPLE
from lockstep.cli.run import run
from lockstep.cli.train import train_app
from lockstep.cli.verify import EXAMPLE as VERIFY_EXAMPLE
from lockstep.cli.verify import verify
from lockstep.errors import ConfigError

Job = Callable[[], int | InWorkers]


def parse(words: Sequence[str]) -> Job | int:
    """The job that ``words`` ask for, or the exit code where all has been said already, as after ``--help``.

    Raises:
        ConfigError: words that are no command or no flag, or a value that is not of its flag's type.
    """
    command = get_command(_app())
    try:
        job: Job | int = command.main(args=list(words), prog_name="lockstep", standalone_mode=False)
    except typer.TyperException as error:
        raise ConfigError(f"{error.format_message().rstrip('.')}; see {_path(error)} --help") from error
    return job


def _path(error: typer.TyperException) -> str:
    """The command that refused its words, as it was called."""
    context = getattr(error, "ctx", None)
    return "lockstep" if context is None else str(context.command_path)


def _app() -> typer.Typer:
    train_example = "Example: lockstep train mlm --devices cpu:4"
    app = typer.Typer(add_completion=False, epilog=train_example)
    app.callback()(_root)
    app.add_typer(train_app(), name="train", help="Train one of the recipes.", epilog=train_example)
    app.command(epilog="Example: lockstep devices --devices cpu:4")(devices)
    app.add_typer(
        data_app(), name="data", help="Say what the data of a recipe holds.", epilog="Example: lockstep data mlm"
    )
    app.add_typer(bench_app(), name="bench", help="Measure how fast a recipe trains.", epilog=BENCH_EXAMPLE)
    app.command("plan", epilog=PLAN_EXAMPLE)(plan)
    # The program's own flags come after its name, and are not looked at.
    app.command(epilog=VERIFY_EXAMPLE, context_settings={"allow_interspersed_args": False})(verify)
    app.command(epilog=RUN_EXAMPLE, context_settings={"allow_interspersed_args": False})(run)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lockstep {version('lockstep')}")
        raise typer.Exit


def _root(
    *,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="On an error, show where it was raised too. May stand anywhere.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train one model on many devices as if on one, with the same numbers."""
