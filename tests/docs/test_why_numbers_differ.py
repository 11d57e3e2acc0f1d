"""The page on why numbers differ claims what its script measures: the script is run, and its figures are compared."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = DOCS / "figures" / "draw_why_numbers_differ.py"
PAGE = (DOCS / "concepts" / "why-numbers-differ.md").read_text()
LIMIT_S = 240  # four processes of DDP on two cores, with other tests beside them, have taken 60

ROWS = re.findall(r"^\| \[.+?\]\(#.+?\) \| ([\d.e-]+) \| ([\d.e-]+) \|$", PAGE, re.MULTILINE)
WITHOUT_CURE = "rounding"  # is not in the table


@pytest.mark.timeout(LIMIT_S + 30)
def test_each_cause_moves_the_weights_as_far_as_the_page_says_and_its_cure_leaves_rounding(
    python: Callable[..., subprocess.Popen[str]],
):
    process = python(str(SCRIPT), "--json")
    printed, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    measured = json.loads(printed)
    last = {
        cause: {
            kind: [line["distances"][-1] for line in lines if line["kind"] == kind]
            for kind in ("usual", "cured", "other")
        }
        for cause, lines in measured["causes"].items()
    }
    cured = {cause: max(line for line in lines["cured"]) for cause, lines in last.items()}
    assert {cause: distance for cause, distance in cured.items() if distance > 1e-14} == {}

    causes = [cause for cause in last if cause != WITHOUT_CURE]
    assert len(ROWS) == len(causes)
    for cause, (usual, ours) in zip(causes, ROWS, strict=True):
        assert max(last[cause]["usual"]) == pytest.approx(float(usual), rel=0.5), cause
        assert min(last[cause]["usual"]) > 1e-3, cause
        assert 1e-17 < float(ours) < 1e-15, cause

    assert last["batch-norm"]["other"] == pytest.approx(last["batch-norm"]["usual"], rel=1e-6)
    assert last["dropout"]["other"] == pytest.approx(last["dropout"]["usual"], rel=1)
    assert min(last["dropout"]["cured"]) == min(last["rounding"]["cured"]) == 0
    assert last["mean"]["other"][0] > 0.1
    backwards, ours = last["rounding"]["other"]
    assert 1e-9 < ours < 5 * backwards < 1e-5
    for right, total in measured["repeated rows"].values():
        assert f"{right} of {total}" in PAGE
        assert f"{right / total:.4f}" in PAGE
