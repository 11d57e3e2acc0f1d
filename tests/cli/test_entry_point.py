"""How an error becomes one line and an exit code."""

from __future__ import annotations

import os
import pty
import termios

import pytest

from lockstep.errors import CollectiveError, ConfigError, DataError, MissingExtraError
from lockstep_tools.cli.entry_point import failure_line, print_warning, report_failure


@pytest.mark.parametrize("error", [ConfigError("bad device"), DataError("bad device"), MissingExtraError("bad device")])
def test_what_was_asked_wrongly_is_two(error: Exception):
    assert failure_line(error) == ("lockstep: error: bad device", 2)


@pytest.mark.parametrize("error", [CollectiveError("replica 2 waits"), OSError("replica 2 waits")])
def test_what_failed_while_running_is_one(error: Exception):
    assert failure_line(error) == ("lockstep: error: replica 2 waits", 1)


def test_an_error_over_several_lines_with_notes_is_one_line():
    error = CollectiveError("replicas differ:\n  replica 0 waits")
    error.add_note("replica 0 on cpu:0")
    assert failure_line(error)[0] == "lockstep: error: replicas differ: replica 0 waits (replica 0 on cpu:0)"


def test_an_error_that_nobody_expected_is_named_and_says_how_to_see_more():
    line, exit_code = failure_line(KeyError("x"))
    assert line == "lockstep: error: KeyError: 'x'; run again with --traceback to see where"
    assert exit_code == 1


def test_ctrl_c_is_no_error():
    assert failure_line(KeyboardInterrupt()) == ("lockstep: interrupted", 130)


def test_the_line_goes_to_stderr_alone(capsys: pytest.CaptureFixture[str]):
    assert report_failure(ConfigError("bad device"), traceback=False) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "lockstep: error: bad device\n")


def test_the_traceback_comes_first_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]):
    report_failure(ConfigError("bad device"), traceback=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("ConfigError: bad device")
    assert lines[-1] == "lockstep: error: bad device"


def test_on_a_terminal_the_line_breaks_between_words(monkeypatch: pytest.MonkeyPatch):
    terminal, shown = pty.openpty()
    termios.tcsetwinsize(shown, (24, 30))
    with os.fdopen(shown, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        report_failure(ConfigError("expected a folder of images for each class"), traceback=False)
        monkeypatch.undo()
        read = os.read(terminal, 1000).decode()
    os.close(terminal)

    assert read.splitlines() == ["lockstep: error: expected a", "  folder of images for each", "  class"]


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]):
    print_warning(UserWarning("layers have\n no effect"), UserWarning, "mlm.py", 3)
    assert capsys.readouterr().err == "lockstep: warning: layers have no effect\n"
