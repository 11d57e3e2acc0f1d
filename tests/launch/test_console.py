"""What is shown of the workers' output."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from lockstep.launch.console import reader_for
from lockstep.launch.streams import Streams


def say(tmp_path: Path, output: str, *said: tuple[int, str, bytes]) -> None:
    """Lets workers say something through their pipes, one after the other."""
    with closing(Streams(tmp_path, logs=None, reader=reader_for(output))) as streams:
        channels = {worker: streams.open(worker, 0, named=False) for worker in {each[0] for each in said}}
        for worker, stream, data in said:
            path = channels[worker].out if stream == "out" else channels[worker].err
            with Path(path).open("wb", buffering=0) as pipe:
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


def test_nobody_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    say(tmp_path, "none", (0, "out", b"a\n"))

    assert capsys.readouterr() == ("", "")


def test_logs_hold_both_streams_and_restarts_have_their_own(tmp_path: Path):
    with closing(Streams(tmp_path, logs=tmp_path, reader=reader_for("none"))) as streams:
        for attempt in (0, 1):
            channel = streams.open(3, attempt, named=True)
            for path, data in ((channel.out, b"out\n"), (channel.err, b"err\n")):
                handle = os.open(path, os.O_WRONLY)
                os.write(handle, data)
                os.close(handle)

    for name in ("worker-3.log", "worker-3.attempt-1.log"):
        assert sorted((tmp_path / name).read_text().splitlines()) == ["err", "out"]
