"""Builds the documentation from what a fresh clone has, a warning being an error, and follows every link in it.

Tutorials are not executed here: ``make docs`` does that.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote, urlsplit

import pytest
from tests.test_readme import PAGES, commands

import lockstep
from lockstep_tools.cli.app import parse

FLAG = re.compile(r"(?<!\S)--[\w-]+")
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LIMIT_S = 400


class Page(HTMLParser):
    """The ids of a page, and what it links to or shows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids |= {value for name in ("id", "name") if (value := given.get(name))}
        self.targets += [value for name in ("href", "src") if (value := given.get(name))]


def copy_as_cloned(folder: Path) -> None:
    """Copies what a clone has of the documentation and the examples, changed as here: no file that git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "docs", "examples"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():  # not deleted here
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    copy_as_cloned(folder / "clone")
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(folder / "clone" / "docs"), str(folder / "html")],
        cwd=folder,
        env={**os.environ, "DOCS_NOTEBOOKS": "off"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


@pytest.mark.timeout(LIMIT_S + 30)
def test_every_link_and_image_leads_somewhere(site: Path):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 30

    lost = []
    for path, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            found = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchor = unquote(url.fragment)
            if not found.exists() or (anchor and found in pages and anchor not in pages[found].ids):
                lost.append(f"{path.relative_to(site)}: {target}")
    assert lost == []


@pytest.mark.timeout(LIMIT_S + 30)
def test_every_link_of_the_markdown_copies_leads_somewhere(site: Path):
    copies = [site / "llms.txt", *site.rglob("*.html.md")]
    sources = {path.relative_to(site).with_suffix(".html.md") for path in site.rglob("*.html") if _is_page(site, path)}
    assert sources == {copy.relative_to(site) for copy in copies[1:]}
    links = [(copy, link) for copy in copies for link in re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", copy.read_text())]
    assert len(links) > 100
    assert [f"{copy}: {link}" for copy, link in links if not (copy.parent / unquote(link)).exists()] == []


def _is_page(site: Path, path: Path) -> bool:
    return (DOCS / path.relative_to(site)).with_suffix(".md").exists()


@pytest.mark.timeout(LIMIT_S + 30)
def test_every_public_name_is_in_the_reference(site: Path):
    reference = "\n".join(path.read_text() for path in (site / "reference").rglob("*.html"))
    undocumented = [name for name in lockstep.__all__ if not re.search(rf'id="lockstep[.\w]*\.{name}"', reference)]
    assert undocumented == ["callbacks", "config", "divide", "errors"]


@pytest.mark.timeout(LIMIT_S + 30)
def test_long_names_in_tables_can_break_between_their_parts(site: Path):
    tables = [
        table for page in site.rglob("*.html") for table in re.findall(r"(?s)<table.*?</table>", page.read_text())
    ]
    names = {unescape(name) for table in tables for name in re.findall(r'<span class="pre">([^<]+)<', table)}
    assert {"OMPI_", "COMM_", "ValueError", "CommunicationOptions"} <= names
    assert [name for name in names if len(name) > 20] == []


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_page_says_its_language(site: Path):
    languages = {page: re.findall(r'<html[^>]* lang="([^"]+)', page.read_text()) for page in site.rglob("*/*.html")}
    assert languages[site / "zh/how-to/mlm.html"] == ["zh-CN"]
    assert languages[site / "how-to/mlm.html"] == ["en"]


def results(site: Path, words: str, profile: Path) -> list[str]:
    """The pages that a search finds, the best first, each once."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed (Debian: apt install chromium)")
    done = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"),
            *("--virtual-time-budget=10000", f"--user-data-dir={profile}"),
            f"{(site / 'search.html').as_uri()}?q={quote(words)}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = done.stdout.partition('class="search"')[2]
    pages = re.findall(r'<a href="([^"?#]+)\.html', found.partition("</ul>")[0])
    assert pages, done.stderr
    return list(dict.fromkeys(pages))


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    ("words", "page"), [("学习率", "zh/how-to/trainer"), ("习率", "zh/how-to/trainer"), ("分布", "zh/tf-distribute")]
)
def test_a_search_finds_parts_of_chinese_words(site: Path, tmp_path: Path, words: str, page: str):
    pages = results(site, words, tmp_path)
    assert page in pages
    assert all(name.startswith("zh/") for name in pages)


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_search_shows_how_to_pages_before_internals_and_the_reference_of_a_name_first(site: Path, tmp_path: Path):
    gradient = results(site, "gradient", tmp_path)
    assert gradient[0].startswith("how-to/")
    assert gradient.index("how-to/model") < gradient.index("concepts/architecture")
    assert results(site, "BackupAndRestore", tmp_path)[0] == "reference/api/callbacks"


@pytest.fixture(scope="module")
def command_help() -> Iterator[ModuleType]:
    """The extension that reads commands and their flags from the program."""
    sys.path.insert(0, str(DOCS / "_extensions"))
    yield importlib.import_module("command_help")
    sys.path.remove(str(DOCS / "_extensions"))


@pytest.mark.timeout(LIMIT_S + 30)
def test_every_command_is_in_the_reference(site: Path, command_help: ModuleType):
    page = (site / "reference" / "commands.html").read_text()
    assert [name for name in command_help.commands() if f"<h2>lockstep {name}<" not in page] == []


def test_commands_in_the_text_have_flags_that_exist(command_help: ModuleType):
    every = [command_help.groups_of(command) for command in command_help.commands().values()]
    names = [name for groups in every for _, records in groups for name, _ in records]
    known = {flag for name in names for flag in FLAG.findall(name)} | {"--help", "--version", "--traceback"}
    pages = [*ROOT.glob("*.md"), *PAGES]
    shown = [(page, each) for page in pages for each in re.findall(r"`(lockstep [^`\n]+)`", page.read_text())]
    assert len(shown) > 100
    assert [f"{page}: {each}" for page, each in shown if not set(FLAG.findall(each)) <= known] == []


def test_every_variable_that_is_read_is_in_the_reference():
    sources = [
        *(ROOT / "src/lockstep" / name for name in ("console.py", "tracebacks.py")),
        *(ROOT / "src/lockstep/cluster").glob("*.py"),
    ]
    sources += (ROOT / "src/lockstep/launch").glob("*.py")  # the architecture test: only these read the environment
    texts = {text for source in sources for text in re.findall(r'"([A-Z][A-Z0-9_]{3,})"', source.read_text())}
    page = (DOCS / "reference" / "environment.md").read_text().partition("## Variables of other libraries")[0]
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]{3,})", page))
    families = tuple(re.findall(r"`([A-Z][A-Z0-9_]{2,})\*", page))  # such as `PALS_*`

    names = {"ALPS", "MVAPICH", "MVAPICH2", "PALS", "SLURM"}  # of launchers, in messages
    assert {text for text in texts - names - documented if not text.startswith(families)} == set()
    assert all(name in texts or any(text.startswith(name) for text in texts) for name in documented)


def test_what_examples_and_pages_import_from_here_exists():
    sources = {path: path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    for page in PAGES:
        sources[page] = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
    found = {
        (path, package, name.split()[0])
        for path, source in sources.items()
        for package, names in re.findall(r"^ *from (lockstep[\w.]*) import ([\w ,]+)$", source, re.M)
        for name in names.split(",")
    }
    assert len(found) > 30
    for path, package, name in sorted(found):  # read, not imported: not every machine has Keras or transformers
        spec = find_spec(package)
        source = Path(spec.origin).read_text() if spec and spec.origin else ""
        assert re.search(rf"\b{name}\b", source), f"{path}: {package} has no {name}"


def test_commands_that_do_not_run_could():
    for page, command in [(each, command) for each in PAGES for command in commands(each)]:
        assert callable(parse(shlex.split(command)[1:])), f"{page}: {command}"
