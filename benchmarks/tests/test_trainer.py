"""What is held against what, and what the report says; the measurement itself takes minutes."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.suites.trainer import contenders, render_trainer, targets_of


def test_the_original_runs_alone_and_under_torchrun_as_it_starts_and_told():
    assert [one.name for one in contenders(2)] == ["lockstep-1", "lockstep-2", "lockstep-4", "trainer", "torchrun-2"]
    assert [one.name for one in contenders(8)][-2:] == ["torchrun-2", "torchrun-2 told"]
    for one in contenders(8):
        assert pickle.loads(pickle.dumps(one)) == one  # it travels to its process
        assert one.role == ("ours" if one.name.startswith("lockstep") else "rival")


def test_our_best_is_held_against_the_better_of_the_original(make):
    figures = [
        make.figures(make.contender("lockstep-2", role="ours"), ratio=0.95),
        make.figures(make.contender("lockstep-4", role="ours"), ratio=0.8),
        make.figures(make.contender("trainer"), ratio=1.5),
        make.figures(make.contender("torchrun-2"), ratio=1.0),
    ]
    (target,) = targets_of(figures)

    assert (target.text, target.limit, target.value) == ("step time, lockstep-4 / torchrun-2", 0.9, 0.8)
    assert target.reached
    assert targets_of(figures[:2]) == targets_of(figures[2:]) == []


def test_the_report_has_a_row_for_each_and_the_target(make):
    figures = [
        make.figures(make.contender("lockstep-2", role="ours"), ratio=0.95),
        make.figures(make.contender("trainer"), ratio=1.0),
    ]
    text = render_trainer(make.conditions(), "the recipe", figures, targets_of(figures))

    assert text.startswith("# The Trainer on CPUs, 2026-01-31\n")
    assert "## The recipe\n" in text
    assert "| lockstep-2 | 10.0 | 9.0 | 12.0 | 0.950 | 20 | 2.00 | 100 | 1.5000 | 1,000 |" in text
    assert "| step time, lockstep-2 / trainer | at most 0.90 | 0.950 | NO |" in text
    assert "- trainer: settings of trainer" in text


def test_an_unknown_contender_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert main(["trainer", "--only", "ddp-2", "--output", str(tmp_path)]) == 1
    assert "--only ddp-2 is unknown; choose from 'lockstep-1', 'lockstep-2', " in caplog.messages[-1]
    assert list(tmp_path.iterdir()) == []
    assert caplog.records[-1].levelno == logging.ERROR
