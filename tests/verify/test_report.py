from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lockstep import console
from lockstep_tools.verify.report import MAX_TABLE_ROWS, VerifyReport, _table, render

Verified = Callable[..., VerifyReport]


def test_an_early_end_is_noted(verified: Verified):
    assert "note: the program ended before the 3 updates asked for" in render(
        verified("sound_loop", "--every", "2", devices="cpu:3")
    )


def test_further_strategies_are_noted(verified: Verified):
    note = "note: the program made 2 strategies of several devices; the first one, on cpu:0, cpu:1, was compared"
    assert note in render(verified("two_strategies"))


def test_only_the_first_that_differ_are_shown(verified: Verified):
    report = verified("dropout")
    table = render(report).split("\n\n")[1].splitlines()
    assert len(table) == 2 + MAX_TABLE_ROWS
    assert table[2].split()[:3] == ["1", "output", "Sequential"]


def test_without_a_cause_it_says_so_and_what_was_tried(verified: Verified):
    report = replace(verified("dropout"), findings=())
    last = render(report).split("\n\n")[-1].splitlines()
    assert last[0] == "cause: none of the hypotheses explains it; what was tried:"
    assert last[1].startswith("  all replicas with one, as written: step 1: output Sequential differs by ")


def test_measured_rounding_is_said_to_be(verified: Verified):
    report = replace(verified("learning_rate"), first=None, findings=())
    assert render(report).endswith("of a tensor's largest value, or 32 times the measured rounding")


def test_it_fits_a_terminal_in_one_table_with_the_ends_of_long_names(
    verified: Verified, monkeypatch: pytest.MonkeyPatch
):
    report = verified("dropout")
    difference = replace(
        next(iter(report.comparison.differences)), kind="gradient", name=f"encoder.{'layer.' * 9}norm.weight"
    )
    monkeypatch.setattr(console, "width", lambda: 72)

    table = _table(report, [difference]).splitlines()
    causes = render(report).partition("cause: ")[2].splitlines()[1:]

    assert len(table) == 3
    assert max(map(len, table)) == 72
    assert ".norm.weight  " in table[2]
    assert max(map(len, causes)) <= 72
    assert {len(line) - len(line.lstrip()) for line in causes if line} == {2, 10}
