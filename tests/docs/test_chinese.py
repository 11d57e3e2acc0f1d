"""Chinese pages show what the English pages of the same name show: code, outputs, tables of names, public issues.

So the code of Chinese pages is run where that of the English ones is.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ENGLISH = {page.name: page for folder in ("start", "coming-from") for page in sorted((DOCS / folder).glob("*.md"))}
PAIRS = [
    (page, ENGLISH[page.name])
    for page in sorted((DOCS / "zh").glob("*.md"))
    if page.name in ENGLISH and page.name != "index.md"
]
PAIRS += [(page, DOCS / "how-to" / page.name) for page in sorted((DOCS / "zh" / "how-to").glob("*.md"))]

FENCED = re.compile(r"^(?:<!-- ([^\n]*) -->\n+)?```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]+`")
ISSUE = re.compile(r"\(https://github\.com/([^)]+)\)")


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def test_the_start_the_table_of_names_the_recipes_and_the_clusters_are_there_in_chinese():
    start = ["install", "ten-minutes", "tf-distribute", "which-front-end"]
    how_to = ["cluster", "images", "keras", "launch", "mlm", "multi-worker", "reviews", "trainer"]
    assert [page.stem for page, _ in PAIRS] == start + how_to


@pytest.mark.parametrize(("chinese", "english"), PAIRS, ids=lambda page: page.stem)
def test_code_and_outputs_are_the_same(chinese: Path, english: Path):
    assert FENCED.findall(chinese.read_text()) == FENCED.findall(english.read_text())


@pytest.mark.parametrize(("chinese", "english"), PAIRS, ids=lambda page: page.stem)
def test_sections_are_the_same(chinese: Path, english: Path):
    levels = [re.findall(r"^#+ ", prose(page), re.MULTILINE) for page in (chinese, english)]
    assert levels[0] == levels[1]


@pytest.mark.parametrize(("chinese", "english"), PAIRS, ids=lambda page: page.stem)
def test_tables_have_the_same_names_in_each_row(chinese: Path, english: Path):
    assert names_of_rows(chinese) == names_of_rows(english)


def names_of_rows(page: Path) -> list[list[str]]:
    """The names in each row of a page's tables, sorted: a sentence in Chinese has another order of words."""
    return [sorted(CODE.findall(line)) for line in prose(page).splitlines() if line[:1] == "|"]


@pytest.mark.parametrize(("chinese", "english"), PAIRS, ids=lambda page: page.stem)
def test_the_same_public_issues_are_named(chinese: Path, english: Path):
    assert ISSUE.findall(prose(chinese)) == ISSUE.findall(prose(english))
