"""The table from recorded numbers. The numbers are made up by this test: no GPU has given them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.gpu.contenders import entrants
from benchmarks.gpu.gpu_tests import SuiteOutcome
from benchmarks.gpu.loops import Pace
from benchmarks.gpu.report import GpuConditions, render_gpu, section_of
from benchmarks.gpu.roofline import DeviceFacts, StepCost
from benchmarks.gpu.suite import slug
from benchmarks.gpu.workloads import FULL, gpu_workloads
from benchmarks.harness import Absence, Sample
from benchmarks.report import Section
from benchmarks.trial import Contender

PACE = Pace(warm_up=10, lap_steps=10, laps=3)
WORK = gpu_workloads(FULL)
MADE_UP = {
    "lockstep-1": (6.0, 6.1, 6.2),
    "eager": (10.0, 10.2, 10.4),
    "lockstep-4": (7.0, 7.1, 7.2),
    "ddp-4": (70.0, 71.0, 72.0),
    "compiled": (9.0, 9.1, 9.3),
    "lockstep-1 compiled": (5.0, 5.1, 5.2),
    "fabric": (11.0, 11.0, 11.0),
    "trainer": (6.1, 6.1, 6.1),
}
FACTS = DeviceFacts(
    name="A made-up GPU, of a test",
    memory_mb=81920.0,
    used_mb=500.0,
    capability="9.0",
    matmul_flops={"bf16": 600e12, "fp32": 300e12},
    copy_bytes_s=3e12,
    costs={"mlm-bf16": StepCost(flops=600e9, traffic_bytes=12e9)},
)


def contenders() -> list[Contender]:
    return [one.contender for one in entrants(WORK["mlm-bf16"], "cuda", PACE)]


def samples(make: Any, recorded: dict[str, tuple[float, ...]]) -> list[Sample]:
    return [
        replace(
            make.sample(name, *steps),
            workload="mlm-bf16",
            device_reserved_mb=4000.0,
            device_used_mb=5500.0,
            notes=("graph: captured after 3 steps",) if name == "lockstep-1" else (),
        )
        for name, steps in recorded.items()
    ]


def section(make: Any, recorded: dict[str, tuple[float, ...]], facts: DeviceFacts = FACTS) -> Section:
    away = Absence(workload="mlm-bf16", contender="accelerate", reason="accelerate is not installed")
    absences = [away, replace(away, workload="mlm-fp32")]
    return section_of(WORK["mlm-bf16"], contenders(), samples(make, recorded), absences=absences, facts=facts)


def conditions(make: Any, **changes: Any) -> GpuConditions:
    return replace(
        GpuConditions(
            date="2026-01-31",
            machine=make.conditions().machine,
            device="cuda",
            facts=FACTS,
            command="python -m benchmarks gpu",
            pace=PACE,
            budget="budget 600 s",
            spent_s=432.1,
            suite=SuiteOutcome(passed=20, skipped=1, failed=("tests.a::test_b",), seconds=61.0),
        ),
        **changes,
    )


def test_each_comparison_has_its_limit_and_its_verdict(make: Any):
    targets = {target.text: target for target in section(make, MADE_UP).comparisons}
    found = {text: (target.limit, target.value, target.verdict) for text, target in targets.items()}

    assert found == {
        "lockstep-1 / best eager loop": (1.0, pytest.approx(6.1 / 10.2), "yes"),
        "lockstep-1 or lockstep-1 compiled / best loop": (0.7, pytest.approx(5.1 / 9.1), "yes"),
        "lockstep-4 / lockstep-1, the same global batch": (1.15, pytest.approx(7.1 / 6.1), "NO"),
        "lockstep-4 / ddp-4": (0.2, pytest.approx(0.1), "yes"),
        "lockstep-4, a step": (20.0, pytest.approx(7.1), "yes"),
        "lockstep-1 / accelerate": (1.0, None, "not measured"),
        "lockstep-1 / fabric": (1.0, pytest.approx(6.1 / 11.0), "yes"),
        "lockstep-1 / trainer": (1.0, 1.0, "NO"),  # as fast is not slower
    }


def test_without_torch_compile_the_best_loop_is_not_known(make: Any):
    recorded = {
        name: steps for name, steps in MADE_UP.items() if name not in ("compiled", "lockstep-4")
    }  # ours alone is compiled
    verdicts = {target.text: target.verdict for target in section(make, recorded).comparisons}

    assert verdicts["lockstep-1 or lockstep-1 compiled / best loop"] == "not measured"
    assert verdicts["lockstep-4, a step"] == verdicts["lockstep-4 / ddp-4"] == "not measured"
    assert verdicts["lockstep-1 / best eager loop"] == "yes"


def test_other_models_than_bert_tiny_have_no_limits_of_its_own():
    own = [one.contender for one in entrants(WORK["mobilenetv2-fp32"], "cuda", PACE)]
    texts = [target.text for target in section_of(WORK["mobilenetv2-fp32"], own, [], facts=FACTS).comparisons]

    assert texts[:3] == [
        "lockstep-1 / best eager loop",
        "lockstep-4 / lockstep-1, the same global batch",
        "lockstep-4 / ddp-4",
    ]
    assert not any("a step" in text or "best loop" in text for text in texts)


def test_the_table_shows_everything(make: Any):
    text = render_gpu(conditions(make), [section(make, MADE_UP)])

    assert text.startswith("# GPU benchmark, 2026-01-31: A made-up GPU, of a test\n")
    assert "compute capability 9.0; 500 MB were taken before the run" in text
    assert "its rates: matrix products bf16 600.0 TFLOP/s, fp32 300.0 TFLOP/s; copies 3000 GB/s" in text
    assert "tests that need a GPU: 20 passed, 1 failed, 1 skipped in 61 s" in text
    assert "**Tests that failed**:\n\n- tests.a::test_b" in text
    assert "600.0 GFLOP at 600.0 TFLOP/s are 1.00 ms; the eager step's 12.00 GB at 3000 GB/s are 4.00 ms." in text
    assert "| lockstep-4 / lockstep-1, the same global batch | at most 1.15 | 1.164 | 1.164 | 1.164 | NO |" in text
    assert "| lockstep-4, a step | below 20.00 ms | 7.100 ms | 7.100 ms | 7.100 ms | yes |" in text
    assert "| lockstep-1 / accelerate | below 1.00 |  |  |  | not measured |" in text
    # 6.1 ms against the 9.1 of the compiled loop, and against a roofline of 4 ms; 5500 MB less the 500 of others
    assert "| lockstep-1 | 6.10 | 6.00 | 6.20 | 0.670 | 1.525 | 3.0 | 4000 | 5000 | 1.5000 | 1,000 | 1 |" in text
    assert "- lockstep-1 logged: graph: captured after 3 steps" in text
    assert "| accelerate | not run |" in text
    assert "- accelerate: not run: accelerate is not installed" in text
    assert "budget 600 s; spent 432" in text


def test_rates_that_are_missing_are_said_and_the_rest_goes_on(make: Any):
    facts = replace(FACTS, matmul_flops={}, costs={}, trouble="no answer within 90 s")
    text = render_gpu(conditions(make, facts=facts), [section(make, MADE_UP, facts)])

    assert "- its rates: not measured; no answer within 90 s" in text
    assert "The roofline of a step" not in text
    assert "| lockstep-1 | 6.10 |" in text


def test_a_table_of_a_cpu_says_that_it_has_no_figure_of_a_gpu(make: Any):
    tried = conditions(make, device="cpu", suite=None)

    text = render_gpu(tried, [section(make, MADE_UP)])

    assert text.startswith("# The GPU benchmark's programs tried on a CPU, 2026-01-31: no figure of a GPU\n")
    assert "tests that need a GPU: not asked for" in text
    assert "reached" not in text
    assert slug(tried) == "programs-tried-on-a-cpu"
    assert slug(conditions(make)) == "a-made-up-gpu-of-a-test"
