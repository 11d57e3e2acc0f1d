from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.scaling.report import render_markdown, render_page, report_files, write_scaling_report


def test_three_files_are_named_by_date_recipe_and_devices(make, tmp_path: Path):
    result = make.result()
    files = write_scaling_report(tmp_path / "new", result)

    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        f"2026-01-31-scaling-images-cpu-4.{suffix}" for suffix in ("html", "json", "md")
    ]
    assert files.markdown.read_text() == render_markdown(result)
    assert files.page.read_text() == render_page(result)


def test_a_list_of_devices_is_a_name_too(tmp_path: Path):
    files = report_files(tmp_path, date="2026-01-31", recipe="mlm", devices="cpu:0, cpu:1")

    assert files.page == tmp_path / "2026-01-31-scaling-mlm-cpu-0-cpu-1.html"


def test_the_json_holds_every_sample_and_the_figures(make, tmp_path: Path):
    result = make.result()
    record = json.loads(write_scaling_report(tmp_path, result).json.read_text())

    assert len(record["samples"]) == 18
    assert record["samples"][0]["record"]["step_ms"] == [400.0, 402.0]
    assert record["rows"][2]["name"] == "2 replicas, same total"
    assert record["rows"][2]["efficiency"] == pytest.approx(result.rows[2].efficiency)
    assert (record["machine"]["commit"], record["config"]["size"]) == ("abc", 32)


def test_what_cannot_be_shown_writes_nothing(make, tmp_path: Path):
    with pytest.raises(ValueError, match="no recipe is called 'tulips'"):
        write_scaling_report(tmp_path / "new", replace(make.result(), recipe="tulips"))

    assert not (tmp_path / "new").exists()
