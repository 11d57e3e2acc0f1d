"""Builds the documentation as ``make docs`` does: a warning is an error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(430)
def test_the_documentation_builds_without_a_warning(tmp_path: Path):
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "html")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    reference = (tmp_path / "html" / "reference" / "api.html").read_text()
    undocumented = [name for name in lockstep.__all__ if not re.search(rf'id="lockstep[.\w]*\.{name}"', reference)]
    assert undocumented == ["callbacks", "config", "errors"]
