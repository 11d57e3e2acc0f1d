"""Executes the tutorials as the documentation's build does, and checks that they print what they promise.

The build of the documentation in test_docs.py shows them without outputs, so each is executed once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
import torch
from myst_nb.core.config import NbParserConfig
from myst_nb.core.read import create_nb_reader
from myst_parser.config.main import MdParserConfig
from nbclient import NotebookClient

pytestmark = [pytest.mark.slow, pytest.mark.pages]

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(path for path in (ROOT / "docs/tutorials").glob("*.md") if "\n```{code-cell}" in path.read_text())
LIMIT_S = 280


def _notebook(path: Path) -> nbformat.NotebookNode:
    text = path.read_text()
    reader = create_nb_reader(str(path), MdParserConfig(), NbParserConfig(), text)
    assert reader is not None, f"{path.name} is not read as a notebook"
    return reader.read(text)


def _streams(notebook: nbformat.NotebookNode, name: str) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.text for output in outputs if output.output_type == "stream" and output.name == name]


def _promises(text: str) -> list[str]:
    """The lines below "It should print", each as it stands in an output."""
    block = re.search(r"^It should print.*?^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return block[1].splitlines() if block else []


@pytest.mark.workers
@pytest.mark.timeout(LIMIT_S + 15)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_prints_what_it_promises(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    notebook = _notebook(path)
    before = set((ROOT / "docs").rglob("*"))

    NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(path.parent)}}).execute()

    printed = " ".join("".join(_streams(notebook, "stdout")).split())
    promises = _promises(path.read_text())
    assert promises
    assert [line for line in promises if " ".join(line.split()) not in printed] == []
    assert f"torch {torch.__version__}" in printed.partition("last run ")[2]
    assert _streams(notebook, "stderr") == []
    machine = [str(ROOT), str(tmp_path), str(Path.home()), os.sep + "tmp" + os.sep]
    assert [name for name in machine if name in printed] == []
    assert {each for each in (ROOT / "docs").rglob("*") if "_build" not in each.parts} - before == set()
