"""Tables as plain text."""

from __future__ import annotations

import pytest

from lockstep import console
from lockstep.console import text_table
from lockstep.train.logs import EpochTiming, History
from lockstep_tools.report import epochs_table, metrics_line


def test_numbers_stand_right_and_words_left():
    table = text_table(["device", "cores"], [["cpu:0", "1"], ["cpu:10", "12"]])
    assert table.splitlines() == ["device  cores", "------  -----", "cpu:0       1", "cpu:10     12"]


def test_a_table_without_rows_is_its_heading():
    assert text_table(["device", "cores"], []).splitlines() == ["device  cores", "------  -----"]


def test_columns_that_a_terminal_has_no_space_for_follow_below(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console, "width", lambda: 14)
    table = text_table(["name", "first", "second", "third"], [["a", "1", "2", "3"], ["b", "4", "5", "6"]])
    assert table.splitlines() == [
        *("name  first", "----  -----", "a         1", "b         4", ""),
        *("name  second", "----  ------", "a          2", "b          5", ""),
        *("name  third", "----  -----", "a         3", "b         6"),
    ]


def test_epochs_have_a_row_each_with_their_own_numbers():
    history = History()  # of a resumed run, of which one epoch was not validated
    for epoch, logs in ((2, {"loss": 2.0}), (3, {"loss": 1.5, "val_accuracy": 0.25})):
        history.add(epoch, logs)
        history.timing.append(EpochTiming(epoch=epoch, seconds=4.0 - epoch, steps=10, examples=100, median_step_s=0.25))

    assert [line.split() for line in epochs_table(history).splitlines()] == [
        ["epoch", "loss", "val_accuracy", "seconds", "ms/step", "examples/s"],
        ["-----", "------", "------------", "-------", "-------", "----------"],
        ["3", "2.0000", "-", "2.0", "250.0", "50"],
        ["4", "1.5000", "0.2500", "1.0", "250.0", "100"],
    ]


def test_metrics_in_one_line():
    assert metrics_line({"loss": 1.263, "accuracy": 0.353}) == "loss 1.2630, accuracy 0.3530"
