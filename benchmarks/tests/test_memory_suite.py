from __future__ import annotations

import time
from dataclasses import replace

import pytest

from benchmarks.processes import SpawnedBody
from benchmarks.report import report_of
from benchmarks.results import figures_of
from benchmarks.step_timer import StepRecord, StepTimer
from benchmarks.suites.memory import FULL, ReviewsWork, contenders, measure_choices, section_of
from benchmarks.trial import Trial, Workload
from lockstep.errors import ConfigError

TINY = ReviewsWork(layers=2, hidden=64, heads=2, feed_forward=128, vocabulary=500, rows=4, tokens=8)
MB = 2**20


def test_the_table_has_ratios_of_the_same_round(make):
    def sample(name: str, peak_mb: float, step_ms: float, round_: int = 0):
        measured = {"peak_mb": peak_mb, "weights_mb": 400.4, "optimizer_mb": 12.6}
        return replace(make.sample(name, step_ms, round_=round_), workload="reviews", extra=(measured,))

    samples = [sample(FULL, 1000, 20), sample("LoRA", 500, 10), sample(FULL, 2000, 10, 1), sample("LoRA", 600, 10, 1)]
    figures = figures_of(contenders(TINY, ["LoRA"]), samples, "reviews")
    text = report_of("memory-cpu-2", make.conditions(), "Memory", [section_of(TINY, figures)], samples).text

    assert "| full, fp32 | 1,000 | 400 | 13 | 1,500 | 1.00 | 15.0 | 1.000 |" in text
    assert "| LoRA | 1,000 | 400 | 13 | 550 | 0.40 | 10.0 | 0.750 |" in text


def test_the_first_row_is_always_measured_and_unknown_ones_are_named():
    assert [each.name for each in contenders(TINY, ["LoRA", "bf16"])] == [FULL, "bf16", "LoRA"]
    with pytest.raises(ConfigError, match=r"^--only LORA is unknown; choose from 'full, fp32', 'bf16', .*'LoRA"):
        contenders(TINY, ["LORA"])


@pytest.mark.workers
def test_a_choice_is_measured_in_a_process_of_its_own(make):
    report = measure_choices(replace(make.conditions(), warm_up=1, steps=2, rounds=1), TINY, [FULL])

    assert report.ok
    (sample,) = report.record["samples"]
    assert sample["extra"][0]["peak_mb"] > 0
    assert len(sample["step_ms"]) == 2


@pytest.mark.usefixtures("fresh_devices")
def test_weights_and_optimizer_are_counted(monkeypatch: pytest.MonkeyPatch):
    records: list[StepRecord] = []
    for contender in contenders(TINY, ["LoRA"]):
        workload = Workload(name="reviews", title="")
        trial = Trial(workload=workload, contender=contender, warm_up=1, steps=1, cores=2)
        timer = StepTimer(warm_up=1, steps=1, started_s=time.monotonic(), report=records.append)
        assert isinstance(contender.launcher, SpawnedBody)
        contender.launcher.body(trial, None, timer)  # type: ignore[arg-type]
    full, lora = records

    weights = full.trained * 4 / MB
    assert full.extra["weights_mb"] == pytest.approx(weights)
    assert full.extra["optimizer_mb"] == pytest.approx(2 * weights, rel=0.01)
    assert lora.trained == 2 * 2 * 2 * 8 * 64 + 2 * 64 + 2
    assert lora.extra["optimizer_mb"] == pytest.approx(2 * lora.trained * 4 / MB, rel=0.01)
    assert lora.extra["weights_mb"] > weights
