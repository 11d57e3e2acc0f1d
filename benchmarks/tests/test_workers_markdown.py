from __future__ import annotations

from benchmarks.harness import Absence
from benchmarks.suites.workers import Comparison, Place, Row, Section, render_workers
from benchmarks.workloads import WORKLOADS


def section(make, place: Place, *rows: Row, absences: tuple[Absence, ...] = ()) -> Section:
    comparisons = (
        Comparison(text="ours / ddp", rounds=(0.5, 0.7, 0.6), limit=0.55),
        Comparison(text="ours bf16 / ddp fp16", rounds=(0.5,), limit=None),
    )
    return Section(
        workload=WORKLOADS["linear"],
        place=place,
        link="1000 Mbit/s",
        rows=rows,
        comparisons=comparisons,
        absences=absences,
    )


def test_two_hosts_show_what_the_link_takes(make):
    row = Row(figures=make.figures(make.contender("ours"), share=0.25), free_ms=8.0, link_ms=2.04, sent_mb=17.6)
    text = render_workers(make.conditions(), [section(make, "two hosts", row)])

    assert "## Two hosts, link 1000 Mbit/s: one linear layer" in text
    assert (
        "| contender | step ms | p10 | p90 | link not slowed ms | for the link ms | sent MB | CPU ms "
        "| exchange + update | first step s | peak MB | loss |" in text
    )
    assert "| ours | 10.0 | 9.0 | 12.0 | 8.0 | 2.0 | 17.6 | 20 | 25.0% | 2.00 | 100 | 1.5000 |" in text
    assert "| ours / ddp | at most 0.55 | 0.600 | 0.500 | 0.700 | NO |" in text
    assert "| ours bf16 / ddp fp16 |  | 0.500 | 0.500 | 0.500 |  |" in text
    assert "- ours: settings of ours" in text


def test_one_host_has_no_link(make):
    row = Row(figures=make.figures(make.contender("ours")))
    absence = Absence(workload="linear", contender="ddp", reason="it would not")
    text = render_workers(make.conditions(), [section(make, "one host", row, absences=(absence,))])

    assert "## One host: one linear layer" in text
    assert "| contender | step ms | p10 | p90 | CPU ms |" in text
    assert "| ddp | not run |  |  |  |  |  |  |  |\n" in text
    assert "- ddp: not run: it would not" in text
