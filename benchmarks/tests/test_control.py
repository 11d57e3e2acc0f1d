from __future__ import annotations

from dataclasses import replace

from benchmarks.report import report_of
from benchmarks.results import figures_of
from benchmarks.suites.control import SIZES, contenders, section_of


def test_the_last_process_counts_for_each_time_and_all_of_them_for_cores(make):
    chosen = [each for each in contenders() if each.name == "members-64"]
    chief = {"arrived_s": 10.0, "through_s": 13.0, "killed_s": 0.0, "named_s": 41.0}
    others = {"arrived_s": 11.5, "through_s": 12.75, "killed_s": 29.0, "named_s": 41.5}
    processes = (
        chief | {"chief_cores": 0.125, "member_cores": 0.0},
        *[others | {"chief_cores": 0.0, "member_cores": 0.5}] * 2,
    )
    sample = replace(make.sample("members-64", 1000.0), workload="members", extra=processes)
    section = section_of(figures_of(chosen, [sample], "members"))

    text = report_of("control", make.conditions(), "Control", [section], [sample]).text

    assert "| members-64 | 1.50 | 0.125 | 1.000 | 12.5 |" in text
    assert [each.verdict for each in section.comparisons] == ["yes", "yes", "yes"]


def test_every_process_but_the_chief_s_has_members_beside_the_one_that_is_killed():
    assert [each.replicas for each in contenders()] == list(SIZES)
    assert all(2 <= each.processes <= each.replicas - 1 for each in contenders())
