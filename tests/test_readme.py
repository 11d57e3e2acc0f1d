"""Runs what the README and the documentation show, and keeps the two READMEs the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.docs.reader_files import write_files
from tests.tiers import partly_slow

ROOT = Path(__file__).parents[1]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
DOCS = [*sorted((ROOT / "docs").glob("[!_]*/**/*.md")), ROOT / "docs" / "index.md"]
PAGES = [README, ROOT / "examples" / "README.md", ROOT / "examples" / "published" / "README.md", *DOCS]
# Pages that are read on their own; tests/test_docs.py follows the links of the others.
ALONE = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("examples/**/*.md")), *sorted(ROOT.glob("benchmarks/**/*.md"))]

# Python runs, all blocks of a page in one process. Bash says whether it runs, in a comment before the block:
#     <!-- run -->
#     <!-- run with --epochs 1 -->                these words are added to its commands, to make them short
#     <!-- run in tests/cli/test_run.py -->       a test runs what it shows
#     <!-- not run: two hosts -->
# The blocks of bash of a page run in one folder, one after the other. It has the files that they take from the reader
# (docs/reader_files.py); train.py is the page's Python above the block, if it has any. The last form also keeps a block
# of Python from running. A block of text that ``<!-- printed -->`` precedes is what the Python before it prints.
BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n+)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "bash", "text", "json"}
MARKS = re.compile(r"run|run with -.+|run in (?P<test>tests/\S+\.py)|printed|not run: \w.+")
NOT_RUN, RUN_WITH = "not run: ", "run with "
ADDED_TO = re.compile(r"^((?:lockstep|python|KERAS_BACKEND=\w+ python) .+?)(\s+[#&].*)?$")
PRINTED = "printed"

LIMIT_S = 400  # eight workers on two cores, with other tests beside them, have taken 170
WARNINGS_ARE_ERRORS = "import warnings; warnings.simplefilter('error', UserWarning, append=True)"  # as -W does
SEPARATOR = "-- the next block --\n"


def blocks(page: Path, language: str) -> list[str]:
    return [body for _, kind, body in BLOCK.findall(page.read_text()) if kind == language]


def runs(mark: str) -> bool:
    return mark == "run" or mark.startswith(RUN_WITH)


def runnable_bash(page: Path) -> list[tuple[str, str]]:
    """The blocks of bash that run, with what is added to their commands; and the Python of the page above each."""
    found, python = [], ""
    for mark, kind, body in BLOCK.findall(page.read_text()):
        if kind == "python" and not mark.startswith(NOT_RUN):
            python += body
        elif kind == "bash" and runs(mark):
            found.append((with_words(body, mark.removeprefix("run").removeprefix(" with")), python))
    return found


def with_words(body: str, words: str) -> str:
    """Adds words at the end of each command that trains or measures, before a comment and ``&``."""
    lines = body.replace("\\\n", " ").splitlines()
    return "\n".join(ADDED_TO.sub(rf"\1{words}\2", line) for line in lines)


def program_and_output(page: Path) -> tuple[str, dict[int, str]]:
    """The Python of a page, with a separator printed after each block; and what blocks print, by their number."""
    program, printed = [WARNINGS_ARE_ERRORS], {}
    for mark, kind, body in BLOCK.findall(page.read_text()):
        if kind == "python" and not mark.startswith(NOT_RUN):
            program += [body, f"print({SEPARATOR!r}, end='', flush=True)"]
        elif mark == PRINTED:
            printed[len(program) // 2 - 1] = body
    return "\n".join(program), printed


def commands(page: Path) -> list[str]:
    """The commands of Lockstep in the bash that does not run, without their comments."""
    shown = "\n".join(body for mark, kind, body in BLOCK.findall(page.read_text()) if kind == "bash" and not runs(mark))
    joined = shown.replace("\\\n", " ")
    return [line.partition("  #")[0].rstrip(" &") for line in joined.splitlines() if line.startswith("lockstep ")]


# Chinese pages have the blocks of the English ones, as tests/docs/test_chinese.py checks.
RUN_PAGES = [page for page in PAGES if "zh" not in page.relative_to(ROOT).parts]
WITH_PYTHON = [page for page in RUN_PAGES if program_and_output(page)[0] != WARNINGS_ARE_ERRORS]
WITH_BASH = [page for page in RUN_PAGES if runnable_bash(page)]


def all_but_readme_slow(pages: list[Path]) -> list[Any]:
    return partly_slow(pages, *(page for page in pages if page != README))


def name_of(value: object) -> str | None:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command with this environment's programs first on the path, in a folder of its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("page", all_but_readme_slow(WITH_PYTHON), ids=name_of)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, python: Callable[..., subprocess.Popen[str]]):
    program, shown = program_and_output(page)
    done = python("-c", program)
    printed, said = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 0, said
    outputs = printed.split(SEPARATOR)
    assert {number: outputs[number] for number in shown} == shown


def test_the_readme_shows_what_its_first_program_prints(python: Callable[..., subprocess.Popen[str]]):
    printed, _ = python("-c", blocks(README, "python")[0]).communicate(timeout=LIMIT_S)
    assert blocks(README, "text") == blocks(CHINESE, "text") == [printed]


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("page", all_but_readme_slow(WITH_BASH), ids=name_of)
@pytest.mark.pages
def test_the_bash_of_a_page_runs(page: Path, tmp_path: Path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # as in a checkout
    blocks = runnable_bash(page)
    write_files(tmp_path, "\n".join(body for body, _ in blocks))
    for body, python in blocks:
        if python:
            (tmp_path / "train.py").write_text(python)
        done = run(["bash", "-euxo", "pipefail", "-c", body], tmp_path)
        assert done.returncode == 0, done.stderr


def test_every_block_of_code_runs_or_says_why_not():
    for page, mark, language, body in [(each, *block) for each in PAGES for block in BLOCK.findall(each.read_text())]:
        where = f"{page}:\n{body}"
        assert language in LANGUAGES, where
        known = MARKS.fullmatch(mark) if mark else None
        assert not mark or known, f"{mark} in {where}"
        assert not known or not known["test"] or (ROOT / known["test"]).is_file(), f"{mark} in {where}"
        assert mark or language != "bash", f"<!-- run --> or <!-- not run: why --> is missing in {where}"
        if language == "python":
            compile(body, str(page), "exec")


@pytest.mark.parametrize("page", all_but_readme_slow(ALONE), ids=name_of)
def test_links_and_images_lead_somewhere(page: Path):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not leads_somewhere(page, link)] == []


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not anchor or not target.exists():
        return target.exists()
    titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_has_python_and_bash_to_run():
    assert blocks(README, "python")
    assert runnable_bash(README)


@pytest.mark.parametrize("language", ["bash", "python"])
def test_both_readmes_show_the_same_code(language: str):
    assert blocks(CHINESE, language) == blocks(README, language)


def test_both_readmes_have_the_same_sections():
    assert [heading.count("#") for heading in headings(CHINESE)] == [heading.count("#") for heading in headings(README)]


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ ", BLOCK.sub("", page.read_text()), re.MULTILINE)


def test_the_first_commands_of_the_readme_are_demo_and_test():
    assert [line.split("#")[0].strip() for line in blocks(README, "bash")[0].splitlines()] == ["make demo", "make test"]


def test_the_architecture_names_files_that_exist():
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:\w+/)+\w*\.py|(?:\w+/)+)`", page))
    assert [
        name
        for name in named
        if not any((ROOT / folder / name).exists() for folder in (".", "src/lockstep", "src/lockstep_tools"))
    ] == []
