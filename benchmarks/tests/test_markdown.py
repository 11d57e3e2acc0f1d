from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness import Absence
from benchmarks.results import Efficiency
from benchmarks.suites.cpu import WorkloadResult, render
from benchmarks.workloads import WORKLOADS
from lockstep.report import markdown_table


@pytest.fixture
def result(make):
    ours, rival = make.contender("ours-2", role="ours", shares=2), make.contender("single")
    return WorkloadResult(
        workload=WORKLOADS["mobilenetv2"],
        figures=(make.figures(ours, ratio=0.8, share=0.0212, peak_mb=1234.5), make.figures(rival, median_ms=12.5)),
    )


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_a_table_has_a_rule_and_a_row_for_each():
    assert lines(markdown_table(["who", "ms"], [["a", "1"], ["b", "2"]])) == [
        "| who | ms |",
        "| --- | ---: |",
        "| a | 1 |",
        "| b | 2 |",
    ]


def test_the_report_says_where_and_how(make, result):
    text = render(make.conditions(), [result])

    for fact in (
        "# CPU benchmark, 2026-01-31",
        "A processor, 2 cores, 24 GB, Linux 6; load average before the run 0.25",
        "Python 3.11.7, torch 2.13.0, transformers 5.0",
        "commit: abc",
        "command: `python -m benchmarks`",
        "2 rounds",
        "3 steps of warm-up, then 10 timed",
        "- ours-2: settings of ours-2",
    ):
        assert fact in text


def test_a_row_shows_every_figure(make, result):
    rows = [line for line in lines(render(make.conditions(), [result])) if line.startswith(("| ours-2", "| single"))]

    assert rows == [
        "| ours-2 | 10.0 | 9.0 | 12.0 | 0.800 | 20 | 2.1% | 2.00 | 1234 | 1234 | 1232 | 1.5000 | 1,000 |",
        "| single | 12.5 | 11.5 | 14.5 | 1.000 | 25 |  | 2.00 | 100 | 99 | 98 | 1.5000 | 1,000 |",
    ]


def test_a_missed_target_stands_out(make, result):
    text = render(make.conditions(), [result])

    assert "| step time, ours-2 / best rival | at most 0.75 | 0.800 | NO |" in text
    assert "| exchange and update / step, ours-2 | at most 0.03 | 0.021 | yes |" in text


def test_a_workload_without_targets_has_no_table_of_them(make):
    rows = WorkloadResult(workload=WORKLOADS["linear"], figures=(make.figures(make.contender("single")),))

    assert "reached" not in render(make.conditions(), [rows])


def test_who_could_not_run_has_a_row_and_a_reason(make, result):
    absence = Absence(workload="mobilenetv2", contender="jax-2", reason="no environment")
    text = render(make.conditions(), [replace(result, absences=(absence,))])

    (row,) = [line for line in lines(text) if line.startswith("| jax-2")]
    assert row.startswith("| jax-2 | not run |")
    assert row.count("|") == next(line for line in lines(text) if line.startswith("| ours-2")).count("|")
    assert "- jax-2: not run: no environment" in text


def test_another_number_of_parameters_is_pointed_out(make, result):
    other = make.figures(make.contender("tensorflow-2", role="peer"), trained=1002)
    same, differs = render(make.conditions(), [result]), replace(result, figures=(*result.figures, other))

    assert "Not the same model" not in same
    warning = "**Not the same model**: ours-2 trains 1,000 parameters, tensorflow-2 1,002."
    assert warning in render(make.conditions(), [differs])


def test_efficiencies_show_their_spread(make, result):
    efficiency = Efficiency(text="half alone / ours-2", rounds=(0.9, 0.97, 0.96), promised=True)
    text = render(make.conditions(), [replace(result, efficiencies=(efficiency,))])

    assert "| half alone / ours-2 | 0.960 | 0.900 | 0.970 |" in text
    assert "| parallel efficiency, half alone / ours-2 | at least 0.95 | 0.960 | yes |" in text


def test_the_versions_of_the_peers_are_in_the_head(make, result):
    text = render(replace(make.conditions(), peers=(("jax", "keras 3, jax 0.10"),)), [result])

    assert "- jax: keras 3, jax 0.10" in text
