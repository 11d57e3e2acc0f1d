"""Sphinx settings: pages in Markdown, the reference from docstrings, warnings as errors (``make docs``)."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "Lockstep"
author = "the Lockstep authors"
copyright = "the Lockstep authors, Apache-2.0"
version = release = installed_version("lockstep")

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
