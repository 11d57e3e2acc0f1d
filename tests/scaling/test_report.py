from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.scaling.report import render_page, report_files, terminal_tables, write_scaling_report


def test_a_list_of_devices_is_a_name_too(tmp_path: Path):
    page, samples = report_files(tmp_path, date="2026-01-31", recipe="mlm", devices="cpu:0, cpu:1")

    assert page == tmp_path / "2026-01-31-scaling-mlm-cpu-0-cpu-1.html"
    assert samples == page.with_suffix(".json")


def test_the_json_holds_every_sample_and_the_figures(make, tmp_path: Path):
    result, files = make.result(), (tmp_path / "new" / "a.html", tmp_path / "new" / "a.json")
    write_scaling_report(files, result)
    record = json.loads(files[1].read_text())

    assert files[0].read_text() == render_page(result)
    assert len(record["samples"]) == 18
    assert record["samples"][0]["record"]["step_ms"] == [400.0, 402.0]
    assert record["rows"][2]["name"] == "2 replicas, same total"
    assert record["rows"][2]["efficiency"] == pytest.approx(result.rows[2].efficiency)
    assert (record["machine"]["commit"], record["config"]["size"]) == ("abc", 32)


def test_a_terminal_gets_both_tables(make):
    text = terminal_tables(make.result())

    assert text.count("4 replicas, same total") == 2
    assert "where the time of a step goes" in text
