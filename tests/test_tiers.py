"""Which values of a parameter are slow, and which files a tier leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers import has_none_of, partly_slow


def test_the_values_named_are_marked_and_must_exist():
    quick, slow = partly_slow({"quick": 1, "slow": 2}, "slow")
    assert quick == "quick"
    assert slow.values == ("slow",)
    assert slow.marks == (pytest.mark.slow.mark,) or list(slow.marks) == [pytest.mark.slow]
    with pytest.raises(ValueError, match="none of"):
        partly_slow(["quick"], "renamed")


@pytest.mark.parametrize(
    ("text", "left_out_by"),
    [
        ("def test_it(): ...", {"slow and not pages", "slow and pages"}),
        ("pytestmark = pytest.mark.slow", {"not slow"}),
        ("pytestmark = [\n    pytest.mark.workers,\n    pytest.mark.slow,\n]", {"not slow"}),
        ("pytestmark = pytest.mark.workers\n\n\n@pytest.mark.slow\ndef test_it(): ...", set()),
        ('pytestmark = [pytest.mark.workers]\npartly_slow(("one", "two"), "two")', set()),
    ],
)
def test_a_tier_leaves_out_the_files_whose_text_shows_that_it_would_run_none_of_them(text: str, left_out_by: set[str]):
    tiers = ("not slow", "slow and not pages", "slow and pages", "", "not slow and not workers")
    assert {tier for tier in tiers if has_none_of(tier, text)} == left_out_by


def test_a_slow_test_whose_file_does_not_say_so_ends_the_run(tmp_path: Path):
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    mark = "import pytest\n@getattr(pytest.mark, 'sl' + 'ow')\ndef test_it(): ...\n"
    (tmp_path / "test_hidden.py").write_text(mark)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [*command, "-m", "not slow"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "test_hidden.py::test_it is of the tier 'slow and not pages'" in done.stderr + done.stdout
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
