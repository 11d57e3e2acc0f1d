from __future__ import annotations

import logging
from pathlib import Path

import pytest

from benchmarks.__main__ import SUITES, main


def test_one_command_measures_and_writes_the_table(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    words = ["cpu", "--workload", "linear", "--only", "single", "--rounds", "1", "--steps", "2", "--warm-up", "1"]

    assert main([*words, "--output", str(tmp_path)]) == 0

    (table,) = tmp_path.glob("*.md")
    assert "| single |" in table.read_text()
    assert f"command: `python -m benchmarks {' '.join(words)}" in table.read_text()
    assert caplog.messages[0].startswith("round 1  linear           single")
    assert caplog.messages[-1] == f"written to {table}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("cpu --only tpu", "--only tpu is unknown; choose from 'lockstep-2', 'lockstep-4', 'half alone', 'halves"),
        ("cpu --rounds 0", "rounds=0 was given, expected at least 1"),
        ("cpu --steps 0", "steps=0 was given, expected at least 1"),
        ("steps --steps 60", "steps=60 was given, expected a multiple of 25, the steps of a burst"),
        ("steps --only ddp-8", "--only ddp-8 is unknown; choose from 'plain', 'lockstep-1', 'lockstep-2', "),
        ("trainer --only ddp-2", "--only ddp-2 is unknown; choose from 'lockstep-1', 'lockstep-2', "),
        ("memory --only less", "--only less is unknown; choose from 'full, fp32'"),
        ("layouts --only data=9", "--only data=9 is unknown; choose from 'one worker', 'data=4', "),
        ("control --only members-9", "--only members-9 is unknown; choose from 'members-4', "),
        ("workers --only ddp-4", "--only ddp-4 is unknown; choose from 'workers-2', 'ddp-2'"),
        ("workers --link-mbit 0", "link_mbit=0.0"),
    ],
)
def test_bad_arguments_are_one_line_and_write_nothing(
    arguments: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert main([*arguments.split(), "--output", str(tmp_path)]) == 1

    (line,) = caplog.messages
    assert line.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_frameworks_without_environments_are_rows_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.frameworks.ENVIRONMENTS", tmp_path / "none")
    words = ["peers", "--workload", "mlm", "--only", "fabric-2", "jax-2", "--output", str(tmp_path / "out")]

    assert main(words) == 0

    (table,) = (tmp_path / "out").glob("*.md")
    for name in ("fabric-2", "jax-2"):
        assert f"| {name} | not run |" in table.read_text()
        assert f"- {name}: not run: {tmp_path / 'none'}" in table.read_text()


def test_without_a_suite_the_suites_are_listed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([])

    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in SUITES)


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_a_help_with_its_defaults(suite: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([suite, "--help"])

    assert ended.value.code == 0
    assert "rows of the table to measure" in capsys.readouterr().out


def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["tpu"])

    assert ended.value.code == 2
    assert "invalid choice: 'tpu'" in capsys.readouterr().err
