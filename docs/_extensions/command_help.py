"""The directive ``{command}``: usage, explanation and flags of a command, read from the program itself.

    ```{command} train mlm
    ```

Every flag is an entry of a definition list, which reads well in a narrow window too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

from lockstep_tools.cli.app import COMMANDS, tree

_FLAG = re.compile(r"(?<!\S)(--[\w-]+)")


def commands() -> dict[str, Any]:
    """``"train mlm"`` -> the command, of all that do something."""
    found: dict[str, Any] = {}

    def walk(name: str, command: Any) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            found[name] = command
        for word, each in (inner or {}).items():
            walk(f"{name} {word}", each)

    for name in COMMANDS:
        root: Any = get_command(tree(name))
        walk(name, root.commands[name])
    return found


def groups_of(command: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The title of each group of arguments or flags, and (name, help) of those in it."""
    context = typer.Context(command, info_name="lockstep")
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[0] != "--help":
            kind = "Arguments" if parameter.param_type_name == "argument" else "Flags"
            title = getattr(parameter, "rich_help_panel", None) or kind
            groups.setdefault(title, []).append(record)
    yield from ((title, records) for title, records in groups.items() if records)


class CommandHelp(SphinxDirective):
    """Shows one command."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        command = commands()[name]
        usage = " ".join(command.collect_usage_pieces(typer.Context(command, info_name=name)))
        shown: list[nodes.Node] = [_literal(f"lockstep {name} {usage}")]
        shown += [_paragraph(each) for each in (command.help or "").split("\n\n")]
        for title, records in groups_of(command):
            shown.append(nodes.rubric("", title))
            entries = nodes.definition_list(classes=["flags"])
            for flag, meaning in records:
                term = nodes.term("", "", nodes.literal("", flag))
                definition = nodes.definition("", _paragraph(meaning))
                entries += nodes.definition_list_item("", term, definition)
            shown.append(entries)
        if command.epilog:
            shown += [
                nodes.rubric("", "Example"),
                _literal(command.epilog.removeprefix("Example: ")),
            ]
        return shown


def _paragraph(text: str) -> nodes.paragraph:
    """The text on one line, with the flags in it as code."""
    paragraph = nodes.paragraph()
    for number, part in enumerate(_FLAG.split(" ".join(text.split()))):
        paragraph += nodes.literal("", part) if number % 2 else nodes.Text(part)
    return paragraph


def _literal(text: str) -> nodes.literal_block:
    block = nodes.literal_block(text, text)
    block["language"] = "console"
    return block


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the directive."""
    app.add_directive("command", CommandHelp)
    return {"parallel_read_safe": True}
