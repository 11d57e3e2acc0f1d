"""Commands made from dataclasses: every field is a flag, and its entry in the docstring is the flag's help.

So a setting is defined once: its type, default and explanation are those of the dataclass. The object is the job: the
entry point calls it.
"""

# Weighed on 2026-11-28: tyro 1.0.17, which makes commands of dataclasses, for this module and typer. With the names,
# groups and one-line errors of train mlm, train reviews and run kept, it takes 162 lines of code; this module has 147
# for all commands. tyro groups flags only by dataclass, does not leave the words after a program's name to the
# program, reports errors in boxes that only its private module _errors turns into a line, and breaks lines by
# characters, so that Chinese text took 131 of 80 columns. Help of train mlm at 80 columns: 132 lines, here 122. CPU
# time of lockstep --help: 0.23 s, here 0.08 s. typer's own groups (rich) would save about 40 lines here, but the same
# help then has 172.

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints
from unicodedata import east_asian_width

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep.checks import check_path
from lockstep.errors import ConfigError

Job = TypeVar("Job")

_ENTRY = re.compile(r"^ {4}(\w+):", re.MULTILINE)
_NEXT_SECTION = re.compile(r"^(?=\S)", re.MULTILINE)
_MAX_CHOICES_WIDTH = 24  # characters; longer lists of choices would leave no space for the help beside them
_GROUPS = ("Arguments", "Data", "Model", "Training", "Devices", "Layout", "Output")
_NAMES_WIDTH = 24  # characters; the help of a longer name begins on the next line
AUTO = "auto"
_PADDING = "\u2060"  # has no width; typer counts characters, and a Chinese one takes two columns
NO_FLAG = "no flag"
BEFORE_A_PROGRAM: dict[str, Any] = {"allow_interspersed_args": False}
"""Context settings of a command whose arguments after a program's name belong to the program."""
_SPEC = (
    "cpu:4 divides the CPU in four; gpu:4x2048 divides GPU 0 in four shares of 2048 MB; gpu:0,gpu:2 names devices; "
    "cpu or gpu takes all of that kind. Default: "
)
DevicesFlag = Annotated[str | None, typer.Option(metavar="SPEC", help=f"{_SPEC}every GPU, or else the CPU.")]
BenchDevicesFlag = Annotated[str | None, typer.Option(metavar="SPEC", help=f"{_SPEC}every GPU, or else cpu:2.")]
FolderFlag = Annotated[Path, typer.Option(metavar="DIR")]


@dataclass(frozen=True, kw_only=True)
class Nested:
    """A dataclass whose fields are flags of the command too.

    Args:
        kind: the dataclass.
        without: fields that get no flag, and keep their defaults.
        constants: values of fields that get no flag.
        defaults: other defaults of some flags.
        groups: first field of a group of flags -> title of the group in the help.
        auto: a number that may also be "auto": then its default is used, and the command's ``auto`` is True.
    """

    kind: type[Any]
    without: Collection[str] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    auto: str | None = None

    def parameters(self) -> list[inspect.Parameter]:
        parameters = [
            p.replace(default=self.defaults.get(p.name, p.default))
            for p in flags_of(self.kind, groups=self.groups)
            if p.name not in (*self.constants, *self.without)
        ]
        return [_number_or_auto(p) if p.name == self.auto else p for p in parameters]

    def is_auto(self, flags: Mapping[str, Any]) -> bool:
        """Whether the number that may be "auto" is."""
        return self.auto is not None and flags[self.auto] == AUTO

    def make(self, flags: Mapping[str, Any]) -> Any:
        values = {p.name: flags[p.name] for p in self.parameters()}
        if self.auto is not None:
            text = values.pop(self.auto)
            values |= {} if text == AUTO else {self.auto: _number(self.auto, text)}
        return self.kind(**values, **self.constants)


def command(
    job: type[Job],
    constants: Mapping[str, Any] | None = None,
    *,
    groups: Mapping[str, str] | None = None,
    **configs: Nested,
) -> Callable[..., Job]:
    """Returns a typer command that makes an object of a dataclass from the flags.

    Args:
        job: a dataclass whose docstring has an ``Args:`` section with an entry for every field, and before it the help.
        constants: values of fields that get no flag.
        groups: first field of a group of flags -> title of the group in the help.
        configs: fields that are dataclasses; their flags come after the others.
    """
    job_parameters = [parameter for parameter in flags_of(job, groups=groups) if parameter.name not in configs]

    def make(**flags: Any) -> Job:
        values = {parameter.name: flags[parameter.name] for parameter in job_parameters}
        for name, config in configs.items():
            values[name] = config.make(flags)
            values |= {"auto": True} if config.is_auto(flags) else {}
        return job(**values, **(constants or {}))

    parameters = [*job_parameters, *(parameter for config in configs.values() for parameter in config.parameters())]
    make.__doc__ = (inspect.getdoc(job) or "").partition("\n\nArgs:\n")[0]
    # typer reads a function's signature, which is how a command gets flags that no function was written with.
    make.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return make


class GroupedHelp(TyperCommand):
    """A command whose help shows each group of flags under its title, in one order for all commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the groups, with names on the left and help on the right."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in _GROUPS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                record = record[0], _padded(record[1])
                kind = "Arguments" if parameter.param_type_name == "argument" else "Other"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        groups["Other"] = groups.pop("Other", [])  # the last
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=_NAMES_WIDTH)
        # The padding was only for the width that the formatter counts.
        formatter.buffer[:] = [text.replace(_PADDING, "") for text in formatter.buffer]


def _padded(text: str) -> str:
    """The text with as many characters as it takes columns."""
    # Wide and fullwidth characters take two columns of a terminal (Unicode, UAX 11).
    return "".join(character + _PADDING if east_asian_width(character) in "WF" else character for character in text)


class CommandsHelp(TyperGroup):
    """A group of commands whose help shows the line of each of them whole, and not what fits one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands, with names on the left and their lines on the right."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, subcommand.get_short_help_str(limit=sys.maxsize)) for name, subcommand in self.commands.items()]
            )


def flags_of(config: type[Any], *, groups: Mapping[str, str] | None = None) -> list[inspect.Parameter]:
    """Returns one keyword parameter for every field of a dataclass, annotated as typer expects it.

    A field may be ``Annotated`` with ``typer.Option`` or ``typer.Argument`` for what does not follow from its type, or
    with ``NO_FLAG``. Fields that are dataclasses are no flags.
    """
    types, docs = get_type_hints(config, include_extras=True), field_docs(config)
    signature = inspect.signature(config).parameters
    parameters, group = [], None
    for flag in fields(config):
        group = (groups or {}).get(flag.name, group)
        kind, *extras = get_args(types[flag.name]) if get_origin(types[flag.name]) is Annotated else [types[flag.name]]
        if NO_FLAG in extras or is_dataclass(kind) or kind is Any:
            continue
        # A copy: the object in the annotation belongs to the class, which several commands use with different groups.
        option = copy.copy(extras[0]) if extras else typer.Option()
        _complete(option, flag, kind, docs.get(flag.name, ""), group)
        parameter = signature[flag.name].replace(annotation=Annotated[kind, option])
        if flag.default_factory is not MISSING:
            parameter = parameter.replace(default=flag.default_factory())
        parameters.append(parameter)
    return parameters


def _number_or_auto(number: inspect.Parameter) -> inspect.Parameter:
    # A text for typer, which knows no number that may be a word; ``Nested.make`` makes a number of it.
    option = copy.copy(number.annotation.__metadata__[0])
    option.help, option.metavar = f"{option.help.rstrip('.')}; {AUTO} finds it by trial steps.", f"NUMBER|{AUTO}"
    return number.replace(annotation=Annotated[str, option], default=str(number.default))


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{flag_name(name)} {text} was given, expected an integer or {AUTO}") from None


def _complete(option: Any, flag: Field[Any], kind: Any, doc: str, group: str | None) -> None:
    """Fills in what follows from the field: help, choices, and whether the default is shown."""
    if Path in (kind, *get_args(kind)):
        option.parser, option.metavar = _path, option.metavar or "PATH"
    option.help = option.help or f"{doc[:1].upper()}{doc[1:]}"
    option.rich_help_panel = group
    # "[default: None]" says nothing; the docstring tells what happens without the flag.
    option.show_default = flag.default is not None and flag.default is not False
    if kind is bool and flag.default is False and not option.param_decls:
        option.param_decls = (flag_name(flag.name),)  # without a --no-... that would change nothing
    choices = [choice for part in (kind, *get_args(kind)) if get_origin(part) is Literal for choice in get_args(part)]
    if len("|".join(choices)) > _MAX_CHOICES_WIDTH:
        option.help, option.metavar = f"{option.help} One of {', '.join(choices)}.", "NAME"


def _path(text: str | Path) -> Path:
    """The path that was given to a flag; typer names the flag in the error."""
    try:
        return Path(check_path(text, "the path"))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def flag_name(field_name: str) -> str:
    """``--batch-size`` of ``batch_size``."""
    return f"--{field_name.replace('_', '-')}"


def field_docs(config: type[Any]) -> Mapping[str, str]:
    """Returns name -> text of the entries in the ``Args:`` sections of a class and its bases."""
    entries: dict[str, str] = {}
    # From the oldest class on, so that a subclass may say more precisely what a field means.
    for base in reversed([ancestor for ancestor in config.__mro__ if is_dataclass(ancestor)]):
        _, _, sections = inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")
        section, *_ = _NEXT_SECTION.split(sections)
        _, *parts = _ENTRY.split(section)  # name, text, name, text ...
        entries |= {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    return entries


def check_folder(folder: Path) -> None:
    """Raises ConfigError if a folder can be neither written to nor made."""
    # ``lexists``: a link to nowhere is in the way of a folder too.
    present = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    needs = f"--output needs the folder {str(folder)!r}, but {str(present)!r}"
    if not present.is_dir():
        raise ConfigError(f"{needs} is a file, expected a folder; give another name or move it away")
    if not os.access(present, os.W_OK | os.X_OK):
        raise ConfigError(f"{needs} cannot be written to; give another name or change its permissions")


def check_file(file: Path) -> None:
    """Raises ConfigError if a folder is in the place of a file."""
    if file.is_dir():
        raise ConfigError(f"--output has a folder {str(file)!r}, expected a file; move it away")


def check_no_results(output: Path) -> None:
    """Raises ConfigError if a finished run has left its model or another result in the folder."""
    if present := results_in(output):
        raise ConfigError(
            f"--output has the results of a finished run, {str(present[0])!r}; give another --output, or --overwrite to"
            " replace them"
        )


RESULT_FILES = ("curves.png", "history.csv", "result.json")
"""The files of a finished run in --output, besides those of its model."""


def results_in(output: Path) -> list[Path]:
    """What a finished run has left in the folder."""
    model = output / "model"
    # A hidden file is what a killed process has not finished.
    weights = [path for path in sorted(model.iterdir()) if path.name[0] != "."] if model.is_dir() else []
    return weights + [output / name for name in RESULT_FILES if (output / name).exists()]
