"""The embedded text: the English prose that comes with every Python.

It is the language reference (``pydoc_data.topics``) and the docstrings of the standard library's source files, as
distinct paragraphs: 6,326 of them, 1.45 million characters, in CPython 3.11. The files are parsed, never imported,
so nothing runs. Another version of Python gives a slightly different text.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import DataError
from lockstep.recipes.text.splits import MINIMUM_CHARACTERS, TextSplits, split_by_position

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
