"""Sphinx settings: pages in Markdown, the reference from docstrings, warnings as errors (``make docs``)."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import lockstep

project = "Lockstep"
author = "Lockstep contributors"
copyright = "Lockstep contributors, Apache-2.0"
version = release = lockstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
add_module_names = False

html_theme = "furo"
html_title = "Lockstep"

_LITERAL = re.compile(r"(``.+?``)")
# reStructuredText markup that docstrings use as plain text: "*.train.tokens", and the trailing underscore of "val_".
_NOT_MARKUP = re.compile(r"\*(?=\.)|(?<=\w)_(?=\W|$)")


def _escaped(line: str) -> str:
    """A line of a docstring, with such characters escaped outside ``literals`` and examples."""
    if line.lstrip().startswith((">>>", "...")):
        return line
    parts = _LITERAL.split(line)
    return "".join(part if part.startswith("``") else _NOT_MARKUP.sub(r"\\\g<0>", part) for part in parts)


def _escape_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = [_escaped(line) for line in lines]


def setup(app: Sphinx) -> None:
    """Escapes docstrings before napoleon turns their sections into markup."""
    app.connect("autodoc-process-docstring", _escape_docstring, priority=100)
