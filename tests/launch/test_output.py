"""What is shown of the workers' output."""

from __future__ import annotations

import io
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest

from lockstep.launch.output import AllOutput, ChiefOutput, LastStates, OutputForwarder


def say(tmp_path: Path, output: str, *said: tuple[int, str, bytes]) -> None:
    """Lets workers say something through their pipes, one after the other."""
    with closing(OutputForwarder(logs=None, sink=AllOutput() if output == "all" else ChiefOutput())) as forwarder:
        pipes_of = {worker: forwarder.open(worker, 0) for worker in {each[0] for each in said}}
        for worker, stream, data in said:
            with Path(pipes_of[worker][stream]).open("wb", buffering=0) as pipe:
                pipe.write(data)


def test_the_chief_is_passed_on_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    word = "naïve".encode()
    say(tmp_path, "chief", (0, "out", b"\r 1%" + word[:3]), (1, "out", b"no"), (0, "out", word[3:]), (0, "err", b"e\n"))
    assert capsys.readouterr() == ("\r 1%naïve", "e\n")


def test_all_are_passed_on_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    say(tmp_path, "all", (0, "out", b"a\nb"), (1, "err", b"\r1%\r2%\n"), (0, "out", b"c\n"), (1, "out", b"no end"))
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] a", "[0] bc", "[1] no end"]
    assert err == "[1] 2%\n"


def test_logs_hold_both_forwarder_and_restarts_have_their_own(tmp_path: Path):
    with closing(OutputForwarder(logs=tmp_path, sink=ChiefOutput())) as forwarder:
        for attempt in (0, 1):
            pipes = forwarder.open(3, attempt)
            for path, data in ((pipes["out"], b"out\n"), (pipes["err"], b"err\n")):
                handle = os.open(path, os.O_WRONLY)
                os.write(handle, data)
                os.close(handle)

    for name in ("worker-3.log", "worker-3.attempt-1.log"):
        assert sorted((tmp_path / name).read_text().splitlines()) == ["err", "out"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_log_has_the_last_state_of_a_line_that_overwrites_itself(size: int):
    data = b"begin\n\r 1%\r 2%\r   \repoch 1\nof Windows\r\n\r 3%\r 4%"
    states = LastStates()
    taken = b"".join(states.take(data[place : place + size]) for place in range(0, len(data), size))
    assert taken == b"begin\nepoch 1\nof Windows\r\n"
    assert states.finish() == b" 4%"


def test_a_log_has_a_line_that_is_not_complete_at_once():
    assert LastStates().take(b"downloading ...") == b"downloading ..."


class Broken(io.StringIO):
    """A stream that takes no more, as a pipe that nobody reads."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("output", ["chief", "all"])
@pytest.mark.parametrize(
    "stream",
    [
        Broken(BrokenPipeError(32, "Broken pipe")),
        Broken(OSError(28, "No space left on device")),
        Broken(RuntimeError("a notebook's own")),
        None,
    ],
)
def test_pipes_are_read_on_where_what_they_say_cannot_be_passed_on_and_that_is_said_once(
    output: str, stream: Broken | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
):
    monkeypatch.setattr(sys, "stdout", stream)
    say(tmp_path, output, *[(0, "out", b"x" * 2**16 + b"\n")] * 4, (0, "err", b"heard\n"))  # more than a pipe holds
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    told = lines[1 - lines.index("heard" if output == "chief" else "[0] heard")]
    assert "standard output" in told
    assert stream is None or str(stream.error) in told


@pytest.mark.parametrize(("output", "before"), [("chief", ""), ("all", "[0] ")])
def test_a_character_that_the_terminal_lacks_is_escaped(
    output: str, before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    say(tmp_path, output, (0, "out", "naïve\n".encode()), (0, "out", b"more\n"))
    assert terminal.buffer.getvalue().decode() == f"{before}na\\xefve\n{before}more\n"
    assert capsys.readouterr().err == ""


def test_a_log_that_cannot_be_written_is_told_once_and_all_is_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    with (
        closing(OutputForwarder(logs=tmp_path, sink=ChiefOutput())) as forwarder,
        Path(forwarder.open(0, 0)["out"]).open("wb", buffering=0) as pipe,
    ):
        pipe.write(b"a\n")
        pipe.write(b"b\n")

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("a\nb\n", 1)
    assert str(tmp_path / "worker-0.log") in err
