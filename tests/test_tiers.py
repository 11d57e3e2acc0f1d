"""What ``tiers.py`` names exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import tiers

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    "file", sorted({*tiers.SLOW_FILES, *tiers.SLOW_TESTS, *tiers.NOT_SLOW_PARAMETERS, *tiers.BEGUN_FIRST})
)
def test_the_file_and_the_tests_named_exist(file: str):
    text = (TESTS / file).read_text()

    names = (*tiers.SLOW_FILES.get(file, ()), *tiers.SLOW_TESTS.get(file, ()))
    assert [name for name in names if f"def {name}(" not in text] == []


def test_a_test_is_slow_by_its_file_its_name_or_its_parameters():
    file, (kept, *_) = "cli/test_run.py", tiers.SLOW_FILES["cli/test_run.py"]

    assert tiers.is_slow(file, "test_another[1]")
    assert not tiers.is_slow(file, f"{kept}[1]")
    assert not tiers.is_slow("cli/test_app.py", kept)
    assert tiers.is_slow("strategies/test_parallel.py", "test_any[bert-tensor4]")
    assert not tiers.is_slow("strategies/test_parallel.py", "test_any[bert-tensor2]")
