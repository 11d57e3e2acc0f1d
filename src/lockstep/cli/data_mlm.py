"""``lockstep data mlm``: what a text holds."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.train import read_text
from lockstep.recipes.text.corpus import TextSplits
from lockstep.report import text_table

TextFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A folder with *.train.tokens, *.valid.tokens and *.test.tokens. Without it: the embedded text.",
        show_default=False,
    ),
]
LinesFlag = Annotated[int, typer.Option(min=0, help="How many first lines of each part to show.")]


def mlm(*, text: TextFlag = None, lines: LinesFlag = 2) -> Callable[[], int]:
    """Say what the text of the recipe mlm holds: lines, words and characters of each part, and its first lines."""

    def job() -> int:
        print(describe_text(read_text(MlmConfig(text=text)), lines=lines))
        return 0

    return job


def describe_text(splits: TextSplits, *, lines: int) -> str:
    """The source, a table of the three parts, and the first ``lines`` lines of each, cut to one line of a terminal."""
    parts = {"train": splits.train, "valid": splits.valid, "test": splits.test}
    table = text_table(
        ["part", "lines", "words", "characters"], [[name, *_sizes(part)] for name, part in parts.items()]
    )
    first = [f"{name:<6}{_cut(line)}" for name, part in parts.items() for line in part[:lines]]
    return "\n\n".join([f"text: {splits.source}", table, "\n".join(first)]).rstrip()


def _sizes(lines: Sequence[str]) -> list[str]:
    counts = (len(lines), sum(len(line.split()) for line in lines), sum(map(len, lines)))
    return [f"{count:,}" for count in counts]


def _cut(line: str) -> str:
    return textwrap.shorten(line, width=100, placeholder=" ...")
