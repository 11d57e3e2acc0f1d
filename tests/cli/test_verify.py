"""``lockstep verify`` as a person meets it: the table, the verdict, the exit code, Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Start

from lockstep_tools.cli import main
from lockstep_tools.cli.verify import find_program

PROGRAMS = Path(__file__).parents[1] / "verify" / "programs"


def test_equal_programs_are_said_to_be_and_end_in_0(capsys: pytest.CaptureFixture[str]):
    words = ["verify", "--devices", "cpu:2", "--steps", "2", str(PROGRAMS / "sound_loop.py")]

    assert main([*words, "--hidden", "4"]) == 0  # what comes after the program is its own

    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "sound_loop.py: 2 updates on 2 replicas (cpu:0, cpu:1) and on one"
    assert lines[2].split() == ["step", "what", "name", "differs", "by", "relative", "rounding"]
    assert lines[-1].startswith(
        "equal within rounding: nothing differs by more than 7.6e-06 of a tensor's largest value"
    )
    assert printed.err == "comparing all replicas with one, as written ...\n"


def test_a_difference_is_named_with_its_cause_and_ends_in_1(capsys: pytest.CaptureFixture[str]):
    words = ["--quiet", "--devices", "cpu:2", str(PROGRAMS / "mean_over_shard.py")]
    assert main(["verify", *words]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "different: step 1, loss total is the first that differs by 1 of its size" in printed.out
    assert "cause: mean over a shard" in printed.out
    assert "ls.compute_average_loss(per_example, global_batch_size=...)" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0", str(PROGRAMS / "raises.py")], "steps=0 was given"),
        (["no-such.py"], "the script 'no-such.py' does not exist, expected a Python file or the name of a recipe"),
        ([], "Missing argument 'SCRIPT_OR_RECIPE'; see lockstep verify --help"),
        (["--quiet", str(PROGRAMS / "raises.py")], "fails by itself: ValueError: the data folder is empty"),
    ],
)
def test_what_was_asked_wrongly_is_one_line_and_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", *words]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err


def test_the_traceback_of_a_program_is_there_for_who_asks(capsys: pytest.CaptureFixture[str]):
    main(["verify", "--quiet", str(PROGRAMS / "raises.py"), "--traceback"])
    assert 'raise ValueError("the data folder is empty")' in capsys.readouterr().err


def test_a_recipe_is_the_command_that_trains_it():
    program = find_program("mlm", ("--layers", "1"))
    assert (program.kind, program.target, program.scratch_flag) == ("module", "lockstep_tools.cli", "--output")
    assert program.arguments == ("train", "mlm", "--quiet", "--layers", "1")


def test_a_recipe_s_own_words_are_its_own_to_refuse(capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--quiet", "--devices", "cpu:2", "mlm", "--epochs", "0"]) == 2
    assert "mlm fails by itself: exit code 2: lockstep: error: epochs=0 was given" in capsys.readouterr().err


def test_ctrl_c_ends_the_runs_too(start_lockstep: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start_lockstep("verify", "--devices", "cpu:2", str(PROGRAMS / "hangs.py"))
    assert process.stderr.readline() == "comparing all replicas with one, as written ...\n"
    process.send_signal(signal.SIGINT)

    assert process.wait(60) == 130
    assert process.stderr.read() == "lockstep: interrupted\n"
    # The server of the runs may just be trying out whether it can write there.
    until, pause = time.monotonic() + 30, threading.Event()
    while list(tmp_path.iterdir()) and time.monotonic() < until:
        pause.wait(0.05)
    assert list(tmp_path.iterdir()) == []
