"""The tree of commands. A command returns a job; ``entry_point`` runs it outside typer, so that errors are ours.

A command's module is imported only when the command is called; until then its name and help line represent it. So
``lockstep --help`` and the plan of a well-known model do not wait for torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from lockstep import __version__
from lockstep.cli.in_workers import InWorkers
from lockstep.errors import ConfigError

Job = Callable[[], int | InWorkers]


def parse(arguments: Sequence[str]) -> Job | int:
    """Parses the arguments after ``lockstep``.

    Returns:
        The job, or the exit code if there is nothing to run, as after ``--help``.

    Raises:
        ConfigError: an unknown command or flag, or a value of the wrong type.
    """
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    command = get_command(_app(called))
    try:
        job: Job | int = command.main(args=list(arguments), prog_name="lockstep", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = "lockstep" if context is None else context.command_path
        raise ConfigError(f"{error.format_message().rstrip('.')}; see {path} --help") from error
    return job


def _app(called: str | None) -> typer.Typer:
    """The tree, in which only the command that is called has its own flags and subcommands."""
    app = typer.Typer(add_completion=False, epilog=_TRAIN_EXAMPLE)
    app.callback()(_root)
    for name, (help_line, add) in COMMANDS.items():
        if name == called:
            add(app)
        else:
            app.command(name, help=help_line)(_not_called)
    return app


def _not_called() -> None: ...


_TRAIN_EXAMPLE = "Example: lockstep train mlm --devices cpu:4"
# The arguments after a program's name belong to the program.
_BEFORE_A_PROGRAM: dict[str, Any] = {"allow_interspersed_args": False}


def _train(app: typer.Typer) -> None:
    from lockstep.cli.train import train_app

    app.add_typer(train_app(), name="train", help=COMMANDS["train"][0], epilog=_TRAIN_EXAMPLE)


def _devices(app: typer.Typer) -> None:
    from lockstep.cli.devices import devices

    app.command("devices", epilog="Example: lockstep devices --devices cpu:4")(devices)


def _data(app: typer.Typer) -> None:
    from lockstep.cli.data import data_app

    app.add_typer(data_app(), name="data", help=COMMANDS["data"][0], epilog="Example: lockstep data mlm")


def _bench(app: typer.Typer) -> None:
    from lockstep.cli.bench import BENCH_EXAMPLE, bench_app

    app.add_typer(bench_app(), name="bench", help=COMMANDS["bench"][0], epilog=BENCH_EXAMPLE)


def _plan(app: typer.Typer) -> None:
    from lockstep.cli.plan import EXAMPLE, plan

    app.command("plan", epilog=EXAMPLE)(plan)


def _verify(app: typer.Typer) -> None:
    from lockstep.cli.verify import EXAMPLE, verify

    app.command("verify", epilog=EXAMPLE, context_settings=_BEFORE_A_PROGRAM)(verify)


def _run(app: typer.Typer) -> None:
    from lockstep.cli.run import EXAMPLE, run

    app.command("run", epilog=EXAMPLE, context_settings=_BEFORE_A_PROGRAM)(run)


COMMANDS: dict[str, tuple[str, Callable[[typer.Typer], None]]] = {
    "train": ("Train one of the recipes.", _train),
    "devices": ("Show the physical devices, and the logical devices that --devices makes of them.", _devices),
    "data": ("Show what the data of a recipe contains.", _data),
    "bench": ("Measure how fast a recipe trains.", _bench),
    "plan": (
        "Rank the layouts (data x pipeline x tensor) of a model on devices, by predicted step time and memory.",
        _plan,
    ),
    "verify": (
        "Run the first steps of a program on N replicas and on one, compare all numbers, and say why they differ.",
        _verify,
    ),
    "run": ("Run a program in several worker processes, on this host or together with others.", _run),
}
"""Name -> its line of help, and a function that adds the command."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lockstep {__version__}")
        raise typer.Exit


def _root(
    *,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="On an error, print the traceback too. May stand anywhere.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train one model on many devices as if on one, with the same numbers."""
