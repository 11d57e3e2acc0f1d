"""Builds the documentation as ``make docs`` does: a warning is an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path: Path):
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "html")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "MirroredStrategy" in (tmp_path / "html" / "api.html").read_text()
