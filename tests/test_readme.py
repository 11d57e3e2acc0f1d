"""Runs what the README and the documentation show, and keeps the two READMEs the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [README, *sorted((ROOT / "docs").glob("[!_]*/*.md")), ROOT / "docs" / "index.md"]

# A bash block is run where this comment stands before it; a python block always is.
BLOCK = re.compile(r"^(<!-- run -->\n+)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


LIMIT_S = 400  # eight workers on two cores, with other tests beside them, have taken 170
WARNINGS_ARE_ERRORS = "import warnings; warnings.simplefilter('error', UserWarning, append=True)"  # as -W does


def blocks(page: Path, language: str) -> list[str]:
    return [body for _, kind, body in BLOCK.findall(page.read_text()) if kind == language]


def runnable_bash(page: Path) -> list[str]:
    return [body for mark, kind, body in BLOCK.findall(page.read_text()) if kind == "bash" and mark]


RUNNABLE = [(page, number) for page in PAGES for number in range(len(runnable_bash(page)))]


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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, python: Callable[..., subprocess.Popen[str]]):
    done = python("-c", "\n".join([WARNINGS_ARE_ERRORS, *blocks(page, "python")]))
    _, said = done.communicate(timeout=LIMIT_S)

    assert done.returncode == 0, said


def test_the_readme_shows_what_its_first_program_prints(python: Callable[..., subprocess.Popen[str]]):
    printed, _ = python("-c", blocks(README, "python")[0]).communicate(timeout=LIMIT_S)

    assert blocks(README, "text") == blocks(CHINESE, "text") == [printed]


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(("page", "number"), RUNNABLE, ids=lambda value: getattr(value, "name", value))
def test_the_bash_of_a_page_runs(page: Path, number: int, tmp_path: Path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # as in a checkout
    done = run(["bash", "-euo", "pipefail", "-c", runnable_bash(page)[number]], tmp_path)

    assert done.returncode == 0, done.stderr


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

    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "src/lockstep" / name).exists()] == []
