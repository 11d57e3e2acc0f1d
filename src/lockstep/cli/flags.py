"""Flags made from a config: every field of a recipe's dataclass is a flag, with the field's own documentation as help.

A setting therefore has one home: its type, default, unit and explanation are those of the dataclass.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Result = TypeVar("Result")

_ENTRY = re.compile(r"^(\w+): *(.*)$")


def config_command(
    config: type[Any], *, name: str = "config"
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorates ``function(config, ...)``: the command gets one flag for every field of ``config``, after its own.

    Args:
        config: a dataclass whose docstring has an ``Args:`` section with an entry for every field.
        name: the parameter that takes it.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        settings = config_parameters(config)
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != name]
        names = {parameter.name for parameter in settings}

        def command(**flags: Any) -> Result:
            chosen = config(**{flag: value for flag, value in flags.items() if flag in names})
            rest = {flag: value for flag, value in flags.items() if flag not in names}
            return function(**{name: chosen}, **rest)

        parameters = [*own, *settings]
        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def config_parameters(config: type[Any]) -> list[inspect.Parameter]:
    """One keyword parameter for every field of a dataclass, annotated as typer wants it."""
    types, documented = get_type_hints(config), field_docs(config)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=Annotated[types[field.name], typer.Option(help=documented.get(field.name))],
        )
        for field in fields(config)
    ]


def field_docs(config: type[Any]) -> Mapping[str, str]:
    """Name -> text for the entries of the ``Args:`` section of a class's docstring."""
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
