"""The tree of commands. A command returns a job; ``entry_point`` runs it outside typer, so that errors are ours.

A command's module is imported only when the command is called; until then its name and help line represent it. So
``lockstep --help`` and the plan of a well-known model do not wait for torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from lockstep import __version__
from lockstep.errors import ConfigError
from lockstep_tools.cli.flags import CommandsHelp
from lockstep_tools.cli.in_workers import InWorkers

Job = Callable[[], int | InWorkers]

COMMANDS = {
    "train": "Train one of the recipes.",
    "predict": "Classify images with a trained model, and write a table and a contact sheet.",
    "devices": "Show the physical devices, and the logical devices that --devices makes of them.",
    "doctor": "Show versions, devices, network and limits of this machine, and its known troubles.",
    "data": "Write the data that is embedded in a package as files.",
    "bench": "Measure how fast a recipe trains.",
    "plan": "Rank the layouts (data x pipeline x tensor) of a model on devices, by predicted step time and memory.",
    "verify": (
        "Run the first steps of a program on N replicas and on one, compare all numbers, and say why they differ."
    ),
    "run": "Run a program in several worker processes, on this host or together with others.",
}
"""Name -> its line of help. The module of that name has a function ``add_to(app)``."""
_NUMBERS = {"int_parsing": "integer", "float_parsing": "number"}
_HELP_SETTINGS = {"max_content_width": 120}
EXAMPLE = "Example: lockstep train mlm --devices cpu:4"


def parse(arguments: Sequence[str]) -> Job | int:
    """Returns the job for the arguments, or the exit code if there is nothing to run, as after ``--help``.

    Raises:
        ConfigError: an unknown command or flag, or a value of the wrong type.
    """
    # The first word without a dash is the command, since no flag before it takes a value.
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    command = get_command(tree(called))
    try:
        # Outside standalone mode typer raises its errors instead of printing them over several lines, and does not
        # exit.
        job: Job | int = command.main(args=list(arguments), prog_name="lockstep", standalone_mode=False)
    except typer.TyperException as error:
        raise ConfigError(f"{_refusal(error)}; see {_path(command, arguments)} --help") from error
    return job


def _refusal(error: typer.TyperException) -> str:
    """What is wrong, with the value that was given."""
    from pydantic import ValidationError  # imported by typer, once it reads a value

    message, cause = error.format_message().rstrip("."), error.__cause__
    if not isinstance(cause, ValidationError):
        return message
    # typer 0.29 leaves out a text that is no number, and puts "Value error, " before its own words for a choice.
    details = cause.errors()[0]
    if details["type"] in _NUMBERS:
        return f"{message.partition(': ')[0]}: {details['input']!r} is no {_NUMBERS[details['type']]}"
    return message.replace("Value error, ", "", 1)


def _path(command: Any, words: Sequence[str]) -> str:
    """The command that the words call: ``lockstep train mlm``."""
    path = "lockstep"
    for word in words:
        if not isinstance(command, TyperGroup) or word not in command.commands:
            break
        path, command = f"{path} {word}", command.commands[word]
    return path


def tree(called: str | None) -> typer.Typer:
    """The tree, in which only the command that is called has its own flags and subcommands."""
    app = typer.Typer(
        cls=CommandsHelp, add_completion=False, epilog=EXAMPLE, rich_markup_mode=None, context_settings=_HELP_SETTINGS
    )
    app.callback()(_root)
    for name, help_line in COMMANDS.items():
        if name == called:
            # test_what_needs_no_torch_does_not_wait_for_it: help takes 0.3 s, and would take two more with torch.
            import_module(f"lockstep_tools.cli.{name}").add_to(app)
        else:
            # test_a_command_that_is_not_called_has_the_same_line_of_help: its module, which may import torch, is not
            # read.
            app.command(name, help=help_line)(_not_called)
    return app


def _not_called() -> None: ...


def _print_version(is_requested: bool) -> None:
    if is_requested:
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
