"""Tables as plain text."""

from __future__ import annotations

import pytest

from lockstep import console
from lockstep.report import epochs_table, history_columns, metrics_line, text_table
from lockstep.train.logs import EpochTiming, History


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


def test_epochs_have_a_row_each_and_a_column_for_what_was_recorded():
    table = epochs_table(
        {"loss": [2.0, 1.5], "val_accuracy": [0.25, 0.5], "seconds": [3.14159, 3.0], "ms_per_step": [20.04, 19.0]}
    )

    assert [line.split() for line in table.splitlines()] == [
        ["epoch", "loss", "val_accuracy", "seconds", "ms/step"],
        ["-----", "------", "------------", "-------", "-------"],
        ["1", "2.0000", "0.2500", "3.1", "20.0"],
        ["2", "1.5000", "0.5000", "3.0", "19.0"],
    ]


def test_a_run_cut_short_leaves_a_dash_where_there_is_no_value():
    assert epochs_table({"loss": [2.0, 1.5], "val_loss": [2.1]}).splitlines()[-1].split() == ["2", "1.5000", "-"]


def test_metrics_in_one_line():
    assert metrics_line({"loss": 1.263, "accuracy": 0.353}) == "loss 1.2630, accuracy 0.3530"


def test_the_columns_of_a_history_are_its_logs_and_the_times_of_its_steps():
    history = History()
    history.add(0, {"loss": 2.0})
    history.timing.append(EpochTiming(epoch=0, seconds=4.0, steps=10, examples=100, median_step_s=0.25))

    assert history_columns(history) == {
        "loss": [2.0],
        "seconds": [4.0],
        "ms_per_step": [250.0],
        "examples_per_s": [25.0],
    }
