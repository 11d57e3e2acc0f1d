"""The text of a job of several workers: the chief reads it, and all have the same.

Eight workers that parse Python's own library at once keep two cores busy for ten seconds; one does so for two, and what
it found is 1.5 MB. Nor need a folder of text be on every host.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.collectives.communicator import Communicator
from lockstep.errors import DataError

MINIMUM_CHARACTERS = 100
"""Lines must be longer than this many characters: headings and stray lines teach a language model little."""


@dataclass(frozen=True, kw_only=True)
class TextSplits:
    """Text to train on, to validate with after every epoch, and to test with once.

    Args:
        train: lines to train on.
        valid: lines for the validation after each epoch.
        test: lines for the one test at the end.
        source: where the text came from, in words for a person.
    """

    train: tuple[str, ...]
    valid: tuple[str, ...]
    test: tuple[str, ...]
    source: str


def split_by_position(lines: Sequence[str], *, source: str) -> TextSplits:
    """Splits lines by their position: of every twenty, the 19th is for validation, the 20th for the test.

    The rule draws nothing, so the same lines give the same parts everywhere, and each part covers the whole text.
    Neighbours of a test line are in the training part, so the test measures new sentences on known subjects.

    >>> parts = split_by_position([str(number) for number in range(40)], source="numbers")
    >>> parts.valid, parts.test, len(parts.train)
    (('18', '38'), ('19', '39'), 36)
    """
    return TextSplits(
        train=tuple(line for position, line in enumerate(lines) if position % 20 < 18),
        valid=tuple(lines[18::20]),
        test=tuple(lines[19::20]),
        source=source,
    )


def read_wikitext(folder: Path, *, longer_than: int = MINIMUM_CHARACTERS) -> TextSplits:
    """Reads the three parts of a wikitext folder.

    Args:
        folder: holds exactly one file for each part, such as ``wiki.train.tokens``.
        longer_than: shorter lines, in characters, and those of just this length are left out.

    Raises:
        DataError: the folder or a file is missing, doubled, unreadable, not UTF-8, or has no line left.
    """
    if not folder.is_dir():
        raise DataError(
            f"text folder {str(folder)!r} does not exist or is no folder; expected one with *.train.tokens,"
            " *.valid.tokens and *.test.tokens; correct --text, or leave it out for the embedded text"
        )
    return TextSplits(
        train=_read_part(folder, "train", longer_than),
        valid=_read_part(folder, "valid", longer_than),
        test=_read_part(folder, "test", longer_than),
        source=str(folder),
    )


def _read_part(folder: Path, part: str, longer_than: int) -> tuple[str, ...]:
    path = _only_file(folder, f"*.{part}.tokens")
    lines = tuple(line for line in map(str.strip, _read(path).splitlines()) if len(line) > longer_than)
    if not lines:
        raise DataError(
            f"text file {str(path)!r} has no line longer than {longer_than} characters; expected one"
            " paragraph a line; join the lines of each paragraph, or give another --text folder"
        )
    return lines


def _only_file(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise DataError(
            f"text folder {str(folder)!r} holds {len(found)} files {pattern} ({names}), expected exactly one;"
            " add or remove files so that each of train, valid and test has one"
        )
    return found[0]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"text file {str(path)!r} is not UTF-8 (byte {error.start}: {error.reason}); expected UTF-8 text;"
            " convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise DataError(
            f"text file {str(path)!r} cannot be read ({error.strerror}); expected a readable UTF-8 file;"
            " check its kind and permissions"
        ) from error


_NOT_PROSE = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_text(*, longer_than: int = MINIMUM_CHARACTERS) -> TextSplits:
    """Reads the installed Python's own prose (about two seconds) and splits it by position.

    Raises:
        DataError: this Python came without the source files of its standard library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paragraphs = python_paragraphs(library, longer_than=longer_than)
    return split_by_position(paragraphs, source=f"English prose of the Python library in {library}")


def python_paragraphs(library: Path, *, longer_than: int = MINIMUM_CHARACTERS) -> tuple[str, ...]:
    """Distinct paragraphs over 100 characters: the language reference first, then docstrings by path and place.

    Args:
        library: folder of a standard library's source files; tests and installed packages in it are left out.
        longer_than: shorter paragraphs, in characters, and those of just this length are left out.

    Raises:
        DataError: the folder has no language reference, as in a Python without library sources.
    """
    found: dict[str, None] = {}  # a dict keeps the order in which paragraphs are first met
    with _no_search_for_cycles():
        for document in (*_language_reference(library), *_library_docstrings(library)):
            found.update(dict.fromkeys(paragraphs_of(document, longer_than=longer_than)))
    return tuple(found)


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Inside the block Python does not look for cycles: trees have none, and looking took half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def paragraphs_of(document: str, *, longer_than: int = MINIMUM_CHARACTERS) -> Iterator[str]:
    """The paragraphs of a document over 100 characters, each as one line with single spaces.

    >>> list(paragraphs_of("short\\n\\n" + "word\\n  " * 25))[0][:14]
    'word word word'
    """
    for block in re.split(r"\n\s*\n", document):
        paragraph = " ".join(block.split())
        if len(paragraph) > longer_than:
            yield paragraph


def _language_reference(library: Path) -> Iterator[str]:
    path = library / "pydoc_data" / "topics.py"
    if not path.is_file():
        raise DataError(
            f"the embedded text needs {str(path)!r}, which this Python does not have, expected the library sources;"
            " give your own text with --text DIR"
        )
    topics = _value_of("topics", ast.parse(path.read_text(encoding="utf-8")))
    for name in sorted(topics):
        yield topics[name]


def _value_of(name: str, tree: ast.Module) -> dict[str, str]:
    """The literal that a module assigns to ``name``; empty where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            value: dict[str, str] = ast.literal_eval(node.value)
            return value
    return {}


def _library_docstrings(library: Path) -> Iterator[str]:
    found: list[Path] = []
    for folder, inner, files in os.walk(library):
        inner[:] = set(inner) - _NOT_PROSE
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    for path in sorted(found):
        yield from docstrings_of(path)


def docstrings_of(path: Path) -> Iterator[str]:
    """The docstrings of a source file, outermost first; none if it is not a Python 3 source file in UTF-8."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files are not the reader's concern
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # Python 2 samples, null bytes, other encodings: no prose for us
        return
    for node in _statements(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The module and all statements in it, level by level; ast.walk would visit every expression too."""
    level: list[ast.AST] = [tree]
    while level:
        yield from level
        level = [inner for node in level for field in _BLOCKS for inner in getattr(node, field, ())]


def text_for_all(read: Callable[[], TextSplits], workers: Communicator) -> TextSplits:
    """What ``read`` gives on the chief. Every worker must call it.

    Raises:
        DataError: on every worker, where the chief's text cannot be used.
    """
    if workers.is_single:
        return read()
    told = json.loads(workers.broadcast_bytes("the text", _said(read) if workers.is_chief else b""))
    if "refused" in told:
        raise DataError(told["refused"])
    return TextSplits(
        train=tuple(told["train"]), valid=tuple(told["valid"]), test=tuple(told["test"]), source=told["source"]
    )


def _said(read: Callable[[], TextSplits]) -> bytes:
    try:
        return json.dumps(asdict(read())).encode()
    except DataError as error:
        return json.dumps({"refused": str(error)}).encode()
