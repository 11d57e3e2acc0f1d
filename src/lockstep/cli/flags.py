"""Flags made from a config: every field of a recipe's dataclass is a flag, and its documentation is the flag's help.

So a setting is defined once: its type, default and explanation are those of the dataclass.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from lockstep.errors import ConfigError

Result = TypeVar("Result")

_ENTRY = re.compile(r"^(\w+): *(.*)$")


_MAX_CHOICES_WIDTH = 24  # characters; longer lists of choices would leave no room for the help beside them
_NO_GROUPS: Mapping[str, str] = {}


def config_command(
    config: type[Any],
    *,
    name: str = "config",
    groups: Mapping[str, str] = _NO_GROUPS,
    only: Collection[str] | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorates ``function(config, ...)``: the command gets one flag for every field of ``config``, after its own.

    Args:
        config: a dataclass whose docstring has an ``Args:`` section with an entry for every field.
        name: the parameter of the function that takes the config.
        groups: first field of a group of flags -> title of the group in the help.
        only: fields that get a flag; None: all. The others keep their defaults.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        settings = [p for p in config_parameters(config, groups=groups) if only is None or p.name in only]
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != name]
        names = {parameter.name for parameter in settings}

        def command(**flags: Any) -> Result:
            chosen = config(**{flag: value for flag, value in flags.items() if flag in names})
            rest = {flag: value for flag, value in flags.items() if flag not in names}
            return function(**{name: chosen}, **rest)

        return with_parameters(command, [*own, *settings], help_text=function.__doc__)

    return decorate


def with_parameters(
    command: Callable[..., Result], parameters: Sequence[inspect.Parameter], *, help_text: str | None
) -> Callable[..., Result]:
    """Gives ``command`` the parameters and the help that typer shows."""
    command.__doc__ = help_text
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def config_parameters(config: type[Any], *, groups: Mapping[str, str] = _NO_GROUPS) -> list[inspect.Parameter]:
    """Returns one keyword parameter for every field of a dataclass, annotated as typer expects it."""
    types, documented = get_type_hints(config), field_docs(config)
    parameters, group = [], None
    for field in fields(config):
        group = groups.get(field.name, group)
        option = _option(field, types[field.name], documented.get(field.name, ""), group)
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(field),
                annotation=Annotated[types[field.name], option],
            )
        )
    return parameters


def _option(field: Field[Any], kind: Any, documented: str, group: str | None) -> Any:
    text = f"{documented[:1].upper()}{documented[1:]}"
    flag = f"--{field.name.replace('_', '-')}"
    settings: dict[str, Any] = {
        "rich_help_panel": group,
        "show_default": field.default is not None and field.default is not False,
    }
    if kind is bool and field.default is False:
        return typer.Option(flag, help=text, **settings)  # without a --no-... that would change nothing
    choices = [choice for part in (kind, *get_args(kind)) if get_origin(part) is Literal for choice in get_args(part)]
    if len("|".join(choices)) > _MAX_CHOICES_WIDTH:
        return typer.Option(flag, help=f"{text} One of {', '.join(choices)}.", metavar="NAME", **settings)
    return typer.Option(help=text, **settings)


def field_docs(config: type[Any]) -> Mapping[str, str]:
    """Returns name -> text of the entries in the ``Args:`` section of a class's docstring."""
    _, _, section = (inspect.getdoc(config) or "").partition("\nArgs:\n")
    entries: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break
        entry = _ENTRY.match(line.removeprefix("    "))
        if entry:
            name = entry[1]
            entries[name] = entry[2]
        elif name and line.strip():
            entries[name] += f" {line.strip()}"
    return entries


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


def check_folder(folder: Path) -> None:
    """Checks that a folder can be written to or made.

    Raises:
        ConfigError: a file is in its place, or permissions forbid it.
    """
    present = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not present.is_dir():
        raise ConfigError(
            f"--output needs the folder {str(folder)!r}, but {str(present)!r} is a file, expected a folder;"
            " give another name or move it away"
        )
    if not os.access(present, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--output needs the folder {str(folder)!r}, but {str(present)!r} cannot be written to;"
            " give another name or change its permissions"
        )


def check_file(file: Path) -> None:
    """Checks that no folder is in the place of a file.

    Raises:
        ConfigError: there is one.
    """
    if file.is_dir():
        raise ConfigError(f"--output has a folder {str(file)!r}, expected a file; move it away")


def check_output(output: Path) -> None:
    """Checks that a training can write its results to ``output``, without writing anything.

    Raises:
        ConfigError: a file is in the place of a folder, a folder in the place of a file, or permissions forbid it.
    """
    for folder in (output, output / "logs", output / "model"):
        check_folder(folder)
    check_file(output / "curves.png")
