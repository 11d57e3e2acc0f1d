"""Text for language models: a folder in the layout of WikiText, or the English prose of the installed Python itself.

In a job of several workers only the chief reads the text, and all workers get the same. Eight workers that parse
Python's library at once keep two cores busy for ten seconds, one worker for two; and a folder of text then need not be
on every host.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from lockstep.collectives.communicator import Communicator
from lockstep.errors import DataError

_SPLITS = ("train", "valid", "test")
MINIMUM_CHARACTERS = 100
"""Lines must be longer than this: a language model learns little from headings and stray lines."""


@dataclass(frozen=True)
class TextSplits:
    """The lines of a text in three splits, and where the text comes from, for a person to read."""

    train: tuple[str, ...]
    valid: tuple[str, ...]
    test: tuple[str, ...]
    source: str


def split_by_position(lines: Sequence[str], *, source: str) -> TextSplits:
    """Splits lines by position: of every twenty, the 19th is for validation and the 20th for the test.

    Nothing is drawn at random, so the same lines give the same splits everywhere, and each split covers the whole text.
    A test line's neighbours are in the training split, so the test measures new sentences on known subjects.
    """
    train = tuple(line for position, line in enumerate(lines) if position % 20 < 18)
    return TextSplits(train=train, valid=tuple(lines[18::20]), test=tuple(lines[19::20]), source=source)


def read_wikitext(folder: Path) -> TextSplits:
    """Reads the three splits of a folder in the layout of WikiText: a file for each, such as ``wiki.train.tokens``.

    Raises:
        DataError: the folder or a file is missing, duplicated, unreadable, not UTF-8, or has no line left.
    """
    train, valid, test = (_read_split(_split_file(folder, split)) for split in _SPLITS)
    return TextSplits(train=train, valid=valid, test=test, source=str(folder))


def check_data(folder: Path) -> None:
    """Raises DataError if the file of a split is missing or duplicated."""
    for split in _SPLITS:
        _split_file(folder, split)


def _split_file(folder: Path, split: str) -> Path:
    found = sorted(folder.glob(f"*.{split}.tokens"))
    if len(found) != 1:
        raise DataError(
            f"the text folder {str(folder)!r} does not exist or has {len(found)} files *.{split}.tokens, expected one"
            " each of train, valid and test; correct --data, or leave it out for the embedded text"
        )
    return found[0]


def _read_split(file: Path) -> tuple[str, ...]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(f"the text file {str(file)!r} cannot be read as UTF-8: {error}") from error
    lines = tuple(line for line in map(str.strip, text.splitlines()) if len(line) > MINIMUM_CHARACTERS)
    if not lines:
        raise DataError(
            f"the text file {str(file)!r} has no line longer than {MINIMUM_CHARACTERS} characters; join the lines"
            " of each paragraph"
        )
    return lines


def read_on_chief(read: Callable[[], TextSplits], workers: Communicator) -> TextSplits:
    """Returns what ``read`` returns on the chief. Every worker must call it."""
    sent = json.dumps(astuple(read())) if workers.leads else ""
    train, valid, test, source = json.loads(workers.broadcast_bytes("the text", sent.encode()))
    return TextSplits(tuple(train), tuple(valid), tuple(test), source)


_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_text() -> TextSplits:
    """Reads the installed Python's own prose, in about two seconds, and splits it by position."""
    library = Path(sysconfig.get_path("stdlib"))
    return split_by_position(python_paragraphs(library), source=f"English prose of the Python library in {library}")


def python_paragraphs(library: Path) -> tuple[str, ...]:
    """Returns the distinct paragraphs of a standard library: the language reference, then docstrings by path.

    Tests and installed packages are left out.
    """
    documents = (*_language_reference(library), *_library_docstrings(library))
    return tuple(dict.fromkeys(paragraph for document in documents for paragraph in paragraphs_of(document)))


def paragraphs_of(document: str) -> Iterator[str]:
    """Yields the long paragraphs of a document, each as one line with single spaces."""
    for block in re.split(r"\n\s*\n", document):
        paragraph = " ".join(block.split())
        if len(paragraph) > MINIMUM_CHARACTERS:
            yield paragraph


def _language_reference(library: Path) -> Iterator[str]:
    """Yields the values of ``topics``, the dict literal of a module of the library, in the order of their names."""
    path = library / "pydoc_data" / "topics.py"
    if not path.is_file():
        raise DataError(
            f"the embedded text needs {str(path)!r}, which this Python does not have, expected the library sources;"
            " give your own text with --data DIR"
        )
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "topics":
            topics: dict[str, str] = ast.literal_eval(node.value)
            yield from (topics[name] for name in sorted(topics))
            return


def _library_docstrings(library: Path) -> Iterator[str]:
    found: list[Path] = []
    for folder, inner, files in os.walk(library):
        inner[:] = set(inner) - _EXCLUDED_FOLDERS
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    for path in sorted(found):
        yield from docstrings_of(path)


def docstrings_of(path: Path) -> Iterator[str]:
    """Yields the docstrings of a source file, outermost first; none if it is not Python 3 in UTF-8."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of invalid escapes in the library's files
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # Python 2 samples, null bytes, other encodings
        return
    level: list[ast.AST] = [tree]
    while level:  # statements only: ast.walk would visit every expression too
        for node in level:
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                yield text
        level = [inner for node in level for field in _BLOCKS for inner in getattr(node, field, ())]
