from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep_tools.scaling.report import render_page, report_files, terminal_tables, write_scaling_report


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


@pytest.mark.parametrize("show", [terminal_tables, render_page], ids=["terminal", "page"])
def test_the_final_loss_is_explained_where_it_is_shown(make, show):
    text = show(make.result())
    assert text.index("final loss") < text.index("Loss of the last timed step.")
    for reason in ("differ by dropout masks and batch statistics alone", "different batches cannot be compared"):
        assert reason in text


@pytest.mark.parametrize(("load", "busy"), [(0.25, False), (16.0, True)])
def test_the_report_of_a_busy_machine_begins_with_a_warning(make, load: float, busy: bool):
    result = make.result()
    result = replace(result, machine=replace(result.machine, load=load))
    page = render_page(result)
    assert ("load average before the run was 16.0 on 4 cores" in page.partition('<ul class="cards')[0]) is busy
    assert ("load average before the run was 16.0 on 4 cores" in terminal_tables(result)) is busy
