"""The report of the suites: its tables as Markdown, its samples as JSON, and that it is written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import Absence, Rounds
from benchmarks.report import Report, Section, report_of, write_report
from benchmarks.results import Figures
from benchmarks.suites import cpu, workers


@pytest.fixture
def figures(make) -> list[Figures]:
    ours, baseline = make.contender("ours-2", role="ours", replicas=2), make.contender("single")
    return [
        make.figures(ours, ratio=0.8, median_ms=10.0, share=0.0212, peak_mb=1234.5),
        make.figures(baseline, median_ms=12.5),
    ]


@pytest.fixture
def render(make):
    def render(*sections: Section, samples: Sequence[object] = (), **changes: object) -> Report:
        conditions = replace(make.conditions(), **changes)
        return report_of("cpu-2", conditions, "CPU benchmark", sections, samples)  # type: ignore[arg-type]

    return render


def test_the_report_says_where_and_how(render, figures):
    text = render(cpu.section_of("mobilenetv2", figures), facts=(("jax", "keras 3, jax 0.10"),)).text

    for fact in (
        "# CPU benchmark, 2026-01-31",
        "A processor, 2 cores, 24 GB, Linux 6; load average before the run 0.25",
        "Python 3.11.7, torch 2.13.0, transformers 5.0",
        "- commit: abc",
        "- command: `python -m benchmarks`",
        "- jax: keras 3, jax 0.10",
        "2 rounds",
        "3 warm-up steps, 10 timed",
        "- ours-2: settings of ours-2",
    ):
        assert fact in text


def test_a_row_shows_every_figure(render, figures):
    text = render(cpu.section_of("mobilenetv2", figures)).text

    assert "| ours-2 | 10.0 | 10.0 | 10.0 | 0.800 | 20 | 2.1% | 2.00 | 1234 | 1232 | 1.5000 | 1,000 |" in text
    assert "| single | 12.5 | 12.5 | 12.5 | 1.000 | 25 |  | 2.00 | 100 | 98 | 1.5000 | 1,000 |" in text
    assert "| step time, ours-2 / best baseline | at most 0.75 | 0.800 | 0.800 | 0.800 | NO |" in text
    for column in ("step ms", "ratio", "CPU ms", "loss", "parameters"):
        assert f"\n- {column}: " in text


def test_a_workload_without_comparisons_has_no_table_of_them(render, figures):
    assert "reached" not in render(cpu.section_of("linear", figures)).text


def test_who_could_not_run_has_a_row_and_a_reason(render, figures):
    absence = Absence(workload="mobilenetv2", contender="jax-2", reason="no environment")
    text = render(cpu.section_of("mobilenetv2", figures, [absence])).text

    rows = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert rows["| jax-2"].startswith("| jax-2 | not run |")
    assert rows["| jax-2"].count("|") == rows["| ours-2"].count("|")
    assert "- jax-2: not run: no environment" in text


def test_another_number_of_parameters_is_pointed_out(make, render, figures):
    other = make.figures(make.contender("tensorflow-2", role="peer"), trained=1002)

    assert "Not the same model" not in render(cpu.section_of("mlm", figures)).text
    warning = "**Not the same model**: ours-2 trains 1,000 parameters, tensorflow-2 1,002."
    assert warning in render(cpu.section_of("mlm", [*figures, other])).text


def test_two_hosts_show_what_is_sent_and_one_host_does_not(make, render):
    ours = make.contender("workers-2", role="ours")
    ran = Rounds(samples=(make.sample("workers-2", 10.0),), absences=())
    two = workers.section_of("mlm", [ours], ran, link="1000 Mbit/s", reason="")
    away = workers.section_of("mlm", [ours], Rounds(samples=(), absences=()), link="1 Mbit/s", reason="it would not")
    text = render(two, away, workers.section_of("mlm", [ours], ran, link="", reason="")).text

    assert "## Two hosts, link 1000 Mbit/s: bert_tiny" in text
    assert "| contender | step ms | p10 | p90 | sent MB | CPU ms |" in text
    assert "- workers-2: not run: it would not" in text
    assert "## One host: bert_tiny" in text
    assert "| contender | step ms | p10 | p90 | CPU ms |" in text


def test_a_contender_of_ours_that_failed_fails_the_command(render, figures):
    absence = Absence(workload="mlm", contender="lockstep-4", reason="it broke", failed=True)

    assert render(cpu.section_of("mlm", figures)).ok
    assert not render(cpu.section_of("mlm", figures, [absence])).ok


def test_both_files_are_named_by_date_and_cores(render, figures, tmp_path: Path):
    written = render(cpu.section_of("mlm", figures))
    path = write_report(tmp_path / "new", written)

    assert path == tmp_path / "new" / "2026-01-31-cpu-2.md"
    assert path.read_text() == written.text
    assert sorted(file.name for file in path.parent.iterdir()) == ["2026-01-31-cpu-2.json", "2026-01-31-cpu-2.md"]


def test_the_json_holds_every_sample_and_the_verdicts(make, render, figures, tmp_path: Path):
    path = write_report(tmp_path, render(cpu.section_of("mlm", figures), samples=[make.sample("ours-2", 1, 2)]))
    record = json.loads(path.with_suffix(".json").read_text())

    assert record["samples"][0]["step_ms"] == [1, 2]
    assert record["samples"][0]["memory"]["peak_mb"] == 100.0
    assert record["samples"][0]["trained"] == 1000
    assert record["absences"] == []
    assert record["conditions"]["machine"]["commit"] == "abc"
    assert [(each["workload"], each["value"], each["verdict"]) for each in record["comparisons"]] == [
        ("mlm", 0.8, "yes")
    ]
