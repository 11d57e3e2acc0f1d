"""The programs of ``examples/clients`` with other people's trainers print the same numbers on one device and on two."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "clients"
NAMES = ("seq2seq", "trl_sft", "trl_reward", "trl_dpo", "trl_kto", "trl_grpo", "sentence_embeddings")


@pytest.mark.parametrize("name", NAMES)
def test_it_prints_the_numbers_of_one_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_core: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    printed = []
    for devices in ("cpu:1", "cpu:2"):
        monkeypatch.setattr(sys, "argv", [name, devices])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        printed.append(capsys.readouterr().out.splitlines())
    numbers = [dict(line.split() for line in lines if line.startswith(("loss", "eval_"))) for lines in printed]
    assert set(numbers[0]) == set(numbers[1]) >= {"loss", "eval_loss"}
    for metric, value in numbers[0].items():
        assert float(numbers[1][metric]) == pytest.approx(float(value), abs=2e-4), metric
