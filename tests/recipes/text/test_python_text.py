from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep_tools.recipes.text.corpus import docstrings_of, paragraphs_of, python_paragraphs, python_text

pytestmark = pytest.mark.slow


def long(word: str) -> str:
    return " ".join([word] * 30)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library: a language reference and modules."""
    files = {
        "pydoc_data/topics.py": f"topics = {{'b': '{long('second')}', 'a': '{long('first')}\\n\\nshort'}}",
        "alpha.py": f'"""{long("module")}"""\nclass A:\n    """{long("class")}\n\n    {long("first")}"""',
        "beta/inner.py": f'def f():\n    def g():\n        """{long("inner")}"""\n',
        "test/test_alpha.py": f'"""{long("tested")}"""',
        "beta/tests/case.py": f'"""{long("tested")}"""',
        "site-packages/other.py": f'"""{long("installed")}"""',
        "old.py": "print 'Python 2'",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9 ' + b"caf " * 50 + b'"""')
    return tmp_path


def test_the_reference_comes_first_then_docstrings_by_path_each_paragraph_once(library: Path):
    found = python_paragraphs(library)
    assert found == tuple(map(long, ["first", "second", "module", "class", "inner"]))


def test_the_order_does_not_come_from_the_file_system(library: Path):
    words = [f"word{number:02}" for number in range(12)]
    for word in [*words[1::2], *words[::2]]:
        (library / f"{word}.py").write_text(f'"""{long(word)}"""')
    found = python_paragraphs(library)
    assert [line for line in found if "word" in line] == list(map(long, words))


def test_a_paragraph_is_one_line_with_single_spaces_of_more_than_100_characters():
    document = f"{'a ' * 50}b\n{'c' * 3}\n \n{'d' * 100}\n\n{'e' * 101}"
    assert list(paragraphs_of(document)) == ["a " * 50 + "b ccc", "e" * 101]


def test_a_docstring_that_warns_is_read_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    (tmp_path / "a.py").write_text('"""a \\d b"""')
    assert list(docstrings_of(tmp_path / "a.py")) == ["a \\d b"]
    assert not recwarn.list


def test_a_library_without_sources_is_one_line_that_says_what_to_do(tmp_path: Path):
    with pytest.raises(
        DataError, match=r"needs '.*topics.py'.*, expected the library sources; give your own .* --data DIR$"
    ):
        python_paragraphs(tmp_path)


def test_the_installed_python_has_thousands_of_distinct_paragraphs():
    text = python_text()
    lines = [*text.train, *text.valid, *text.test]
    assert 5_500 < len(lines) < 8_000  # 6,326 in CPython 3.11
    assert 1_200_000 < sum(map(len, lines)) < 1_900_000  # 1,448,469
    assert len(set(lines)) == len(lines)
    assert len(text.valid) == len(lines) // 20
    assert "Python library in" in text.source
