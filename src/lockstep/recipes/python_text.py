"""The embedded text: the English prose that comes with every Python.

It is the language reference (``pydoc_data.topics``) and the docstrings of the standard library's source files, as
distinct paragraphs: 6,326 of them, 1.45 million characters, in CPython 3.11. The files are parsed, never imported,
so nothing runs. Another version of Python gives a slightly different text.
"""

from __future__ import annotations

import ast
import importlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import DataError
from lockstep.recipes.text import MINIMUM_CHARACTERS, TextSplits, split_by_position

_NOT_PROSE = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_text() -> TextSplits:
    """Reads the installed Python's own prose (about two seconds) and splits it by position.

    Raises:
        DataError: this Python came without the source files of its standard library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paragraphs = python_paragraphs(library)
    if len(paragraphs) < 20:
        raise DataError(
            f"the embedded text found {len(paragraphs)} paragraphs of Python's own prose under {library}, expected"
            " thousands: this Python has no library sources; give your own text with --text DIR"
        )
    return split_by_position(paragraphs, source=f"prose of the Python library in {library}")


def python_paragraphs(library: Path) -> tuple[str, ...]:
    """Distinct paragraphs over 100 characters: the language reference first, then docstrings by path and place.

    Args:
        library: folder of a standard library's source files; tests and installed packages in it are left out.
    """
    found: dict[str, None] = {}  # a dict keeps the order in which paragraphs are first met
    for document in (*_language_reference(), *_library_docstrings(library)):
        found.update(dict.fromkeys(paragraphs_of(document)))
    return tuple(found)


def paragraphs_of(document: str) -> Iterator[str]:
    """The paragraphs of a document over 100 characters, each as one line with single spaces.

    >>> list(paragraphs_of("short\\n\\n" + "word\\n  " * 25))[0][:14]
    'word word word'
    """
    for block in re.split(r"\n\s*\n", document):
        paragraph = " ".join(block.split())
        if len(paragraph) > MINIMUM_CHARACTERS:
            yield paragraph


def _language_reference() -> Iterator[str]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield topics[name]


def _library_docstrings(library: Path) -> Iterator[str]:
    for path in sorted(library.rglob("*.py")):
        if _NOT_PROSE.isdisjoint(path.relative_to(library).parts[:-1]):
            yield from docstrings_of(path)


def docstrings_of(path: Path) -> Iterator[str]:
    """The docstrings of a source file, outermost first; none if it is not a Python 3 source file in UTF-8."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files are not the reader's concern
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # Python 2 samples, null bytes, other encodings: no prose for us
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text
