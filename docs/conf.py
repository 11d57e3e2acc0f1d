"""Sphinx settings: pages in Markdown, the reference from docstrings, warnings as errors (``make docs``).

Pages in ``tutorials/`` are notebooks in Markdown (their front matter says ``file_format: mystnb``). They are executed
when the documentation is built, and again only when their code changes; an error in one ends the build.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import lockstep

project = "Lockstep"
author = "Lockstep contributors"
copyright = "Lockstep contributors, Apache-2.0"
version = release = lockstep.__version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))
from inventories import write_inventory  # noqa: E402  from _extensions

os.environ.setdefault("KERAS_BACKEND", "torch")  # before the reference imports the integration

extensions = [
    "chinese_search",
    "command_help",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llm.txt",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3

# With DOCS_NOTEBOOKS=off the tutorials are shown without outputs: a quick build while a page is being written.
nb_execution_mode = os.environ.get("DOCS_NOTEBOOKS", "cache")
if nb_execution_mode == "off":  # without a kernel "!lockstep" is taken for Python
    suppress_warnings = ["misc.highlighting_failure"]
nb_execution_cache_path = str(HERE / "_build" / "notebooks")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

# Kernels read no settings of whoever builds, and do not warn that they listen on this host's loopback.
PROFILE = HERE / "_build" / "ipython" / "profile_default"
PROFILE.mkdir(parents=True, exist_ok=True)
(PROFILE / "ipython_kernel_config.py").write_text('get_config().IPKernelApp.log_level = "ERROR"\n')
os.environ["IPYTHONDIR"] = str(PROFILE.parent)

# Lists of names are in this repository, so that a build needs no network and is the same everywhere.
intersphinx_mapping = {
    name: (
        address,
        write_inventory(
            HERE / f"_inventories/{name}.txt", HERE / f"_build/inventories/{name}.inv"
        ),
    )
    for name, address in {
        "python": "https://docs.python.org/3",
        "pytorch": "https://docs.pytorch.org/docs/stable",
    }.items()
}

copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

llms_txt_description = "tf.distribute for PyTorch: train one model on many devices as if on one, with the same numbers."
llms_txt_build_parallel = False
llms_txt_nested_enabled = False
llms_txt_suffix_mode = "append"  # how-to/data.html.md beside how-to/data.html

smartquotes = False  # "--resume" is a flag

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
add_module_names = False

html_theme = "furo"
html_title = "Lockstep"
html_static_path = ["_static"]
html_css_files = ["lockstep.css"]
html_search_language = "en-zh"  # of chinese_search
html_search_scorer = str(HERE / "_extensions" / "search_order.js")

# A name in a table, and where a long one may break: behind punctuation; before a capital.
_TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
_NAME = re.compile(r'(<span class="pre">)([^<]+)(</span>)')
_PUNCTUATION = re.compile(r"(?<=\w[_./(=,:-])(?=[\w&])")
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
# An image of a page: "](" and its path.
_FIGURE = re.compile(r"(!\[[^\]]*\]\()(figures/)")
_LITERAL = re.compile(r"(``.+?``)")
# reStructuredText markup that docstrings use as plain text: "*.train.tokens", and the trailing underscore of "val_".
_NOT_MARKUP = re.compile(r"\*(?=\.)|(?<=\w)_(?=\W|$)")


def _escaped(line: str) -> str:
    """A line of a docstring, with such characters escaped outside ``literals`` and examples."""
    if line.lstrip().startswith((">>>", "...")):
        return line
    parts = _LITERAL.split(line)
    return "".join(
        part if part.startswith("``") else _NOT_MARKUP.sub(r"\\\g<0>", part) for part in parts
    )


def _escape_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    lines[:] = [_escaped(line) for line in lines]


def _copy_figures(app: Sphinx, exception: Exception | None) -> None:
    """Puts the figures where the Markdown copies of the pages look for them.

    sphinx-llm writes the path of an image from the folder of the sources, also in pages that are in folders.
    """
    if exception is not None or app.builder.name != "html":
        return
    shutil.copytree(
        HERE / "figures", app.outdir / "figures", dirs_exist_ok=True, ignore=_no_program
    )
    for page in Path(app.outdir).rglob("*.html.md"):
        up = os.path.relpath(app.outdir, page.parent)
        page.write_text(_FIGURE.sub(rf"\g<1>{up}/\g<2>", page.read_text()))


def _no_program(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".py") or name == "__pycache__"]


def _dashes(app: Sphinx, document: nodes.document) -> None:
    """Between a parameter and its text is a dash; smartquotes would make it, and dashes of flags too."""
    for text in list(document.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def _describe(app: Sphinx, document: nodes.document) -> None:
    """Gives a page its first sentence as its description, for search engines and llms.txt."""
    if any(meta.get("name") == "description" for meta in document.findall(nodes.meta)):
        return
    first = next(document.findall(nodes.paragraph), None)
    if first is not None:
        sentence = re.split(r"(?<=[.。])(?: |$)|:$", " ".join(first.astext().split()))[0]
        document.insert(0, nodes.meta(name="description", content=sentence))


def _break_names(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object
) -> None:
    """Lets long names in tables break between their parts, so that a table fits a phone and no word is cut."""
    if "body" in context:
        context["body"] = _TABLE.sub(lambda table: _NAME.sub(_parts, table[0]), context["body"])


def _say_language(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object
) -> None:
    """Browsers choose the shapes of characters, and offer translations, by the language of a page."""
    if page.startswith("zh/"):
        context["language"] = "zh-CN"


def _parts(name: re.Match[str]) -> str:
    opened, text, closed = name.groups()
    parts = _PUNCTUATION.split(text) if len(text) > 16 else [text]
    parts = [
        word for part in parts for word in (_CAPITAL.split(part) if len(part) > 20 else [part])
    ]
    return "<wbr>".join(f"{opened}{part}{closed}" for part in parts)


def _plain_nodes(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Markdown has no descriptions, and no explanation for the ``*`` of a signature."""
    if app.builder.format != "html":
        for meta in list(document.findall(nodes.meta)):
            meta.parent.remove(meta)
        for node in list(document.findall(nodes.abbreviation)):
            node.replace_self(nodes.Text(node.astext()))


def setup(app: Sphinx) -> None:
    """Connects the functions above; docstrings are escaped before napoleon turns their sections into markup."""
    app.connect("autodoc-process-docstring", _escape_docstring, priority=100)
    app.connect("doctree-read", _dashes)
    app.connect("doctree-read", _describe)
    app.connect("doctree-resolved", _plain_nodes)
    app.connect("html-page-context", _break_names)
    app.connect("html-page-context", _say_language)
    app.connect("build-finished", _copy_figures, priority=900)  # after sphinx-llm
