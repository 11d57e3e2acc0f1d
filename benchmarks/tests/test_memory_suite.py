from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.report import write_report
from benchmarks.suites.memory import (
    FULL,
    Measured,
    MemoryTrial,
    ReviewsWork,
    Row,
    chosen,
    measure_choice,
    measure_choices,
    measured,
    render_choices,
    row_of,
)
from benchmarks.trial import Conditions
from lockstep.errors import ConfigError
from lockstep.scaling.machine import this_machine
from lockstep.strategies.mirrored import MirroredStrategy

TINY = ReviewsWork(layers=2, hidden=64, heads=2, feed_forward=128, vocabulary=500, rows=4, tokens=8)
MB = 2**20


def conditions(**settings: Any) -> Conditions:
    how = {"warm_up": 1, "steps": 2, "rounds": 1, **settings}
    return Conditions(date="2026-11-21", machine=this_machine(), command="the command", **how)


def took(peak_mb: float, *step_ms: float) -> Measured:
    return Measured(peak_mb=peak_mb, weights_mb=400.4, optimizer_mb=12.6, trained=1234, step_ms=step_ms)


def test_ratios_are_of_the_same_round_and_then_the_median():
    choices = chosen(["LoRA"])
    rounds = [
        {FULL: took(1000, 10, 20, 90), "LoRA": took(500, 10)},
        {FULL: took(1000, 40), "LoRA": took(400, 10)},
        {FULL: took(2000, 10), "LoRA": took(600, 10)},
    ]
    full, lora = (row_of(choice, rounds, "") for choice in choices)

    assert (full.peak_ratio, full.step_ratio) == (1, 1)
    assert (lora.peak_ratio, lora.step_ratio) == (0.4, 0.5)
    assert [sample.peak_mb for sample in lora.samples] == [500, 400, 600]


def test_the_table_says_what_was_not_run_and_why():
    rows = [
        Row(name=FULL, samples=(took(5000, 1000),), peak_ratio=1, step_ratio=1),
        Row(name="LoRA", samples=(took(500, 10, 30), took(700, 50)), peak_ratio=0.123, step_ratio=0.5),
        Row(name="LoRA + 4-bit", reason="it needs a GPU"),
    ]
    text = render_choices(conditions(), ReviewsWork(), rows)

    assert "| full, fp32 | 1,234 | 400 | 13 | 5,000 | 1.00 | 1,000 | 1.00 |" in text
    assert "| LoRA | 1,234 | 400 | 13 | 600 | 0.12 | 35 | 0.50 |" in text
    assert "| LoRA + 4-bit | not run |  |" in text
    assert "\n- LoRA + 4-bit: not run: it needs a GPU\n" in text
    assert "command: `the command`" in text
    assert "12 layers of width 768, 21,128 tokens in its vocabulary, 16 reviews of 128 tokens on 2 replicas" in text


def test_the_first_row_is_always_measured_and_unknown_ones_are_named():
    assert [choice.name for choice in chosen(["LoRA", "bf16"])] == [FULL, "bf16", "LoRA"]
    with pytest.raises(ConfigError, match=r"^--only LORA is unknown; choose from 'full, fp32', 'bf16', .*'LoRA"):
        chosen(["LORA"])


@pytest.mark.workers
def test_a_choice_is_measured_in_a_process_of_its_own_and_written_down(tmp_path: Path):
    report = measure_choices(conditions(), TINY, ["LoRA + 8-bit"])
    table = write_report(tmp_path, report)

    full, absent = json.loads(table.with_suffix(".json").read_text())["rows"]
    assert full["samples"][0]["peak_mb"] > 0
    assert len(full["samples"][0]["step_ms"]) == 2
    assert "needs a GPU" in absent["reason"]
    assert table.name == f"2026-11-21-memory-cpu-{this_machine().cores}.md"
    assert table.read_text() == report.text


def test_weights_and_optimizer_are_counted(make_strategy: Callable[..., MirroredStrategy]):
    strategy = make_strategy(2)
    full, lora = (
        measure_choice(MemoryTrial(choice=choice, work=TINY, warm_up=0, steps=1), strategy)
        for choice in chosen(["LoRA"])
    )

    weights = full.trained * 4 / MB
    assert full.weights_mb == pytest.approx(weights)
    assert full.optimizer_mb == pytest.approx(2 * weights, rel=0.01)
    assert lora.trained == 2 * 2 * 2 * 8 * 64 + 2 * 64 + 2
    assert lora.optimizer_mb == pytest.approx(2 * lora.trained * 4 / MB, rel=0.01)
    assert lora.weights_mb > weights


def test_a_step_of_no_rows_is_refused():
    with pytest.raises(ConfigError, match=r"^rows=1 was given, expected at least 2$"):
        ReviewsWork(rows=1)
    with pytest.raises(ConfigError, match=r"^steps=0 was given, expected at least 1$"):
        measured(MemoryTrial(choice=chosen(None)[0], work=TINY, warm_up=1, steps=0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "less"], "--only less is unknown; choose from 'full, fp32'"),
        (["--rounds", "0"], "rounds=0 was given, expected at least 1"),
    ],
)
def test_bad_words_are_one_line_and_write_nothing(
    words: list[str], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert main(["memory", *words, "--output", str(tmp_path)]) == 1

    (line,) = caplog.messages
    assert line.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []
