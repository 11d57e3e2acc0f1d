from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import write_report
from benchmarks.suites.cpu import WorkloadResult, render, report_of
from benchmarks.workloads import WORKLOADS


@pytest.fixture
def results(make):
    rival = make.figures(make.contender("single"), ratio=1.0)
    rows = (make.figures(make.contender("ours-2", role="ours", shares=2), ratio=0.9), rival)
    return [WorkloadResult(workload=WORKLOADS["mlm"], figures=rows)]


def test_both_files_are_named_by_date_and_cores(make, results, tmp_path: Path):
    path = write_report(tmp_path / "new", report_of(make.conditions(), results, [make.sample("ours-2", 1, 2)]))

    assert path == tmp_path / "new" / "2026-01-31-cpu-2.md"
    assert path.read_text() == render(make.conditions(), results)
    assert sorted(file.name for file in path.parent.iterdir()) == ["2026-01-31-cpu-2.json", "2026-01-31-cpu-2.md"]


def test_the_json_holds_every_sample_and_the_verdicts(make, results, tmp_path: Path):
    path = write_report(tmp_path, report_of(make.conditions(), results, [make.sample("ours-2", 1, 2)]))
    record = json.loads(path.with_suffix(".json").read_text())

    assert record["samples"][0]["step_ms"] == [1, 2]
    assert record["samples"][0]["memory"]["peak_mb"] == 100.0
    assert record["samples"][0]["trained"] == 1000
    assert (record["efficiencies"], record["absences"]) == ([], [])
    assert record["conditions"]["machine"]["commit"] == "abc"
    assert [(target["workload"], target["value"], target["reached"]) for target in record["targets"]] == [
        ("mlm", 0.9, True)
    ]


def test_a_report_that_cannot_be_written_leaves_the_old_one(make, results, tmp_path: Path, monkeypatch):
    write_report(tmp_path, report_of(make.conditions(), results, []))
    before = contents(tmp_path)

    def full(self: Path, *args: object, **kwargs: object) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(report.Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        write_report(tmp_path, report_of(replace(make.conditions(), command="another"), results, []))

    assert contents(tmp_path) == before


def test_a_sample_that_is_no_json_writes_nothing(make, results, tmp_path: Path):
    report = report_of(make.conditions(), results, [replace(make.sample("a", 1), loss=object())])
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_report(tmp_path / "new", report)

    assert not (tmp_path / "new").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}
