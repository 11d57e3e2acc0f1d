"""The table from recorded numbers. The numbers are made up by this test: no GPU has given them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.gpu.device import DeviceFacts
from benchmarks.gpu.suite import comparisons_of, contenders_for, section_of
from benchmarks.gpu.workloads import TINY, gpu_workloads
from benchmarks.report import report_of
from benchmarks.results import Figures, figures_of

WORK = gpu_workloads(TINY)["mlm-bf16"]
MADE_UP = {
    "lockstep-1": (6.0, 6.1, 6.2),
    "eager": (10.0, 10.2, 10.4),
    "lockstep-4": (7.0, 7.1, 7.2),
    "ddp-4": (70.0, 71.0, 72.0),
    "compiled": (9.0, 9.1, 9.3),
    "lockstep-1 compiled": (5.0, 5.1, 5.2),
}


def figures(make: Any, *without: str) -> list[Figures]:
    samples = [
        replace(
            make.sample(name, *steps),
            workload=WORK.name,
            extra=({"reserved_mb": 4000.0, "used_mb": 5500.0, "of_limit": 0.25},),
            notes=("graph: captured after 3 steps",) if name == "lockstep-1" else (),
        )
        for name, steps in MADE_UP.items()
        if name not in without
    ]
    return figures_of(contenders_for(WORK, "cuda"), samples, WORK.name)


def test_each_comparison_has_its_limit_and_its_verdict(make: Any):
    found = {each.text: (each.limit, each.value, each.verdict) for each in comparisons_of("mlm-bf16", figures(make))}

    assert found == {
        "lockstep-1 / best eager loop": (1.0, pytest.approx(6.1 / 10.2), "yes"),
        "lockstep-1 or lockstep-1 compiled / best loop": (0.7, pytest.approx(5.1 / 9.1), "yes"),
        "lockstep-4 / lockstep-1, the same global batch": (1.15, pytest.approx(7.1 / 6.1), "NO"),
        "lockstep-4 / ddp-4": (0.2, pytest.approx(0.1), "yes"),
        "lockstep-4, memory of the fullest / its limit": (1.0, 0.25, "yes"),
        "lockstep-4, a step": (20.0, pytest.approx(7.1), "yes"),
    }
    assert not any("best loop" in each.text for each in comparisons_of("mobilenetv2-bf16", figures(make)))


def test_without_torch_compile_the_best_loop_is_not_known(make: Any):
    verdicts = {each.text: each.verdict for each in comparisons_of("mlm-bf16", figures(make, "compiled", "lockstep-4"))}

    assert verdicts["lockstep-1 or lockstep-1 compiled / best loop"] == "not measured"
    assert verdicts["lockstep-4, a step"] == verdicts["lockstep-4 / ddp-4"] == "not measured"
    assert verdicts["lockstep-1 / best eager loop"] == "yes"


def test_a_row_shows_every_figure(make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.gpu.suite.count_flops", lambda workload: 4e9)
    facts = DeviceFacts(name="A made-up GPU", memory_mb=81920.0, used_mb=500.0, matmul_flops={"bf16": 1e12})
    section = section_of(WORK, figures(make), [], facts, compared=True)
    text = report_of("gpu", make.conditions(), "GPU benchmark", [section], []).text

    assert "A step has 4.0 GFLOP, at least 4.00 ms on this device." in text
    assert "| lockstep-1 | 6.10 | 6.00 | 6.20 | 0.670 | 1.52 | 3.0 | 4000 | 5000 | 1.5000 | 1,000 | 1 |" in text
    assert "- lockstep-1 logged: graph: captured after 3 steps" in text
    unknown = section_of(WORK, figures(make), [], replace(facts, matmul_flops={}), compared=False)
    assert unknown.remark == "A step has 4.0 GFLOP."
    assert unknown.comparisons == ()
