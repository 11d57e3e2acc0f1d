"""Runs the examples of docstrings, which the reference shows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text()
]
LIMIT_S = 120
RUN = """
import doctest, importlib, sys
for name in sys.argv[1:]:
    doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
sys.exit(doctest.master.summarize(verbose=False).failed)
"""


@pytest.mark.workers
@pytest.mark.timeout(LIMIT_S + 15)
def test_the_examples_of_docstrings_run(python: Callable[..., subprocess.Popen[str]]):
    process = python("-c", RUN, *MODULES, KERAS_BACKEND="torch")
    printed, said = process.communicate(timeout=LIMIT_S)
    assert len(MODULES) > 25
    assert (process.returncode, said) == (0, ""), printed
