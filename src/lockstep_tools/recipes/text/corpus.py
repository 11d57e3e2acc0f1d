"""Text for language models: a folder of text, as WikiText is laid out or not, or the prose of the installed Python.

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
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from lockstep.collectives.communicator import Communicator, run_on_chief
from lockstep.errors import DataError

Line = tuple[str, bool]
"""A line, and whether it has more than ``MINIMUM_LENGTH`` bytes."""

_SPLITS = ("train", "valid", "test")
_SUFFIXES = ("tokens", "raw")
"""Of the files of WikiText: with rare words as <unk>, and with the text as it was written."""
MINIMUM_LENGTH = 100
"""Lines of a file must have more bytes than this, and paragraphs of Python's documentation more characters.

A language model learns little from headings and stray lines.
"""


@dataclass(frozen=True)
class TextSplits:
    """The lines of a text in three splits, and where the text comes from, for a person to read.

    ``dropped`` are the numbers of lines of train, valid and test that were read and left out because they are short.
    """

    train: tuple[str, ...]
    valid: tuple[str, ...]
    test: tuple[str, ...]
    source: str
    dropped: tuple[int, int, int] = (0, 0, 0)

    def __str__(self) -> str:
        """``my_text: train 1,224 of 2,347 lines, valid ...; the others have at most 100 bytes``."""
        splits = zip(_SPLITS, (self.train, self.valid, self.test), self.dropped, strict=True)
        if not any(self.dropped):
            return f"{self.source}: " + ", ".join(f"{name} {len(lines):,} lines" for name, lines, _ in splits)
        counts = (f"{name} {len(lines):,} of {len(lines) + dropped:,} lines" for name, lines, dropped in splits)
        return f"{self.source}: {', '.join(counts)}; the others have at most {MINIMUM_LENGTH} bytes"


def split_by_position(lines: Sequence[str], *, source: str) -> TextSplits:
    """Splits lines by position: of every twenty, the 19th is for validation and the 20th for the test.

    Nothing is drawn at random, so the same lines give the same splits everywhere, and each split covers the whole text.
    A test line's neighbours are in the training split, so the test measures new sentences on known subjects.
    """
    train = tuple(line for position, line in enumerate(lines) if position % 20 < 18)
    return TextSplits(train=train, valid=tuple(lines[18::20]), test=tuple(lines[19::20]), source=source)


def read_folder(folder: Path) -> TextSplits:
    """Reads a folder of text, whose lines are those of tf.data.

    In the layout of WikiText each split has a file, such as ``wiki.train.tokens`` or ``wiki.train.raw``. Other folders
    have ``*.txt`` files, which are read in the order of their names and split by position (``split_by_position``).
    Lines of at most ``MINIMUM_LENGTH`` bytes are left out; spaces around a line count and stay.

    Raises:
        DataError: the folder or a file is missing, duplicated, unreadable, not UTF-8, or has no line left.
    """
    named: Iterable[tuple[list[Line], str]]
    if files := _plain_files(folder):
        parts = _split_lines(line for file in files for line in _read_lines(file))
        names = [f"the {split} part of the text folder {str(folder)!r}" for split in _SPLITS]
        named = zip(parts, names, strict=True)
    else:
        paths = (_split_file(folder, split) for split in _SPLITS)
        named = ((_read_lines(path), f"the text file {str(path)!r}") for path in paths)
    splits = [_long_lines(lines, name) for lines, name in named]
    (train, short_train), (valid, short_valid), (test, short_test) = splits
    return TextSplits(train, valid, test, source=str(folder), dropped=(short_train, short_valid, short_test))


def _split_lines(lines: Iterable[Line]) -> list[list[Line]]:
    """Splits the long lines by position, as ``split_by_position`` does; short ones count to the long one after them."""
    parts: list[list[Line]] = [[], [], []]
    position = 0
    for line in lines:
        parts[max(0, position % 20 - 17)].append(line)
        position += line[1]
    return parts


def check_data(folder: Path) -> None:
    """Raises DataError if the file of a split is missing or duplicated, and there is no ``*.txt`` file instead."""
    for split in () if _plain_files(folder) else _SPLITS:
        _split_file(folder, split)


def _plain_files(folder: Path) -> list[Path]:
    """The ``*.txt`` files of a folder that is not in the layout of WikiText, by name."""
    files = (file for split in _SPLITS for suffix in _SUFFIXES for file in folder.glob(f"*.{split}.{suffix}"))
    return [] if any(files) else sorted(file for file in folder.glob("*.txt") if file.is_file())


def _split_file(folder: Path, split: str) -> Path:
    advice = "correct --data, or leave it out for the embedded text"
    if not folder.is_dir():
        problem = "is a file, expected its folder" if folder.exists() else "does not exist"
        raise DataError(f"the text folder {str(folder)!r} {problem}; {advice}")
    files = sorted(file for suffix in _SUFFIXES for file in folder.glob(f"*.{split}.{suffix}"))
    if len(files) != 1:
        names = " or ".join(f"*.{split}.{suffix}" for suffix in _SUFFIXES)
        present = " and ".join(file.name for file in files) or "no file"
        raise DataError(
            f"the text folder {str(folder)!r} has {present} for {names}, expected one each of train, valid and test,"
            f" or *.txt files, which are split here; {advice}"
        )
    return files[0]


def _read_lines(file: Path) -> list[Line]:
    lines: list[Line] = []
    number = 0
    try:
        with file.open("rb") as content:
            # Read as bytes and decoded line by line, so that an error can name its line.
            for number, line in enumerate(lines_as_tf_data(content), start=1):
                text = line.removeprefix(BOM_UTF8 if number == 1 else b"").decode()
                lines.append((text, len(line) > MINIMUM_LENGTH))
    except (OSError, UnicodeError) as error:
        line_number = f" in line {number}" if isinstance(error, UnicodeError) else ""
        raise DataError(f"the text file {str(file)!r} cannot be read as UTF-8{line_number}: {error}") from error
    return lines


def _long_lines(lines: Sequence[Line], name: str) -> tuple[tuple[str, ...], int]:
    """The long lines, and the number of the others."""
    texts = tuple(text for text, is_long in lines if is_long)
    if not texts:
        raise DataError(
            f"{name} has {len(lines):,} lines, none of more than {MINIMUM_LENGTH} bytes; join the lines of each"
            " paragraph"
        )
    return texts, len(lines) - len(texts)


def lines_as_tf_data(file: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yields the lines of a binary file as ``tf.data.TextLineDataset`` does: ``\n`` ends a line, ``\r`` is dropped.

    ``str.splitlines`` would also end lines at form feeds, U+2028 and six other characters.
    """
    for line in file:
        if text := line.replace(b"\r", b""):  # only the last line, without a line feed, can be empty
            yield text.removesuffix(b"\n")


def read_on_chief(read: Callable[[], TextSplits], workers: Communicator) -> TextSplits:
    """Returns what ``read`` returns on the chief. Every worker must call it; an error of the chief ends them all."""
    text = run_on_chief(workers, "read the text", read)
    record = "" if text is None else json.dumps(astuple(text))
    train, valid, test, source, dropped = json.loads(workers.broadcast_bytes("the text", record.encode()))
    return TextSplits(tuple(train), tuple(valid), tuple(test), source, tuple(dropped))


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
        if len(paragraph) > MINIMUM_LENGTH:
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
    paths: list[Path] = []
    for folder, inner, files in os.walk(library):
        # In place: ``os.walk`` then does not enter them. Paths are sorted below, as the order of a file system differs
        # between machines.
        inner[:] = set(inner) - _EXCLUDED_FOLDERS
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    for path in sorted(paths):
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
