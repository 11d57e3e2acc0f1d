"""Random kills of up to three of four workers, in trainings that must end with the bits of an undisturbed one.

python -m tests.elastic_campaign --kills 100 --seed 0     # 10 to 20 s a kill on two cores

Workers are killed wherever they are: while they start, train, save or end.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "elastic_training.py"
STEP = re.compile(r"step (\d+) ([\d.]+)")
LONGEST_PAUSE_S = 4.0  # between a step after a kill and the next kill
LIMIT_S = 600.0
_log = logging.getLogger("campaign")


@dataclass(kw_only=True)
class Run:
    """What happened in one training."""

    fingerprint: str = ""  # at its end
    exit_code: int = -1
    killed: list[int] = field(default_factory=list)  # how many workers each kill took
    to_next_step_s: list[float] = field(default_factory=list)  # after each kill, unless another one came before it
    said: list[str] = field(default_factory=list)  # by the launcher


def workers_of(launcher: int) -> list[int]:
    """The processes of the workers that a launcher has at the moment."""
    # torch's agent starts all of them in its main thread, each in a session of its own.
    pids = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    return [pid for pid in pids if leads_a_session(pid)]


def leads_a_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:  # it has ended meanwhile
        return False


def start_python(*words: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


class Killer:
    """Kills some of a launcher's workers, a while after the training has gone on."""

    def __init__(self, launcher: int, run: Run, *, kills: int, seed: int) -> None:
        self._launcher, self._run, self._kills = launcher, run, kills
        self._random = random.Random(seed)
        self._killed_at: float | None = None  # by ``time.time``
        self._due_s: float | None = None  # by ``time.monotonic``

    @property
    def wait_s(self) -> float:
        """How long there is nothing to do."""
        return 1.0 if self._due_s is None else max(0.0, self._due_s - time.monotonic())

    def hear(self, ended_at: float) -> None:
        """A step has ended at that time."""
        if self._killed_at is not None:
            if ended_at < self._killed_at + 0.5:
                return  # it is the step that was cut short
            self._run.to_next_step_s.append(ended_at - self._killed_at)
            self._killed_at = None
        if self._due_s is None and len(self._run.killed) < self._kills:
            self._due_s = time.monotonic() + self._random.uniform(0, LONGEST_PAUSE_S)

    def strike(self) -> None:
        """Kills, if it is time, one to three workers, but never all."""
        if self._due_s is None or time.monotonic() < self._due_s:
            return
        present, number = workers_of(self._launcher), self._random.randint(1, 3)
        if len(present) <= number:
            return
        for pid in self._random.sample(present, number):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self._run.killed.append(number)
        self._killed_at, self._due_s = time.time(), None


def train(
    folder: Path, *, steps: int, workers: str, kills: int, seed: int, start: Callable[..., Any] = start_python
) -> Run:
    """Trains to the end, and kills workers at most so often on the way. ``start`` starts Python in the folder."""
    run = Run()
    words = ["--workers", workers, *(["--rejoin-s", "3"] if ":" in workers else []), str(PROGRAM), str(steps)]
    process = start("-m", "lockstep_tools.cli", "run", *words, f"backup-{seed}", folder=folder)
    killer = Killer(process.pid, run, kills=kills, seed=seed)
    try:
        for line in lines_of(process, killer):
            if step := STEP.match(line):
                killer.hear(float(step[2]))
            elif line.startswith("fingerprint "):
                run.fingerprint = line.split()[1]
        run.exit_code = process.wait(LIMIT_S)
        run.said = [line for line in process.stderr.read().splitlines() if line.startswith("lockstep: ")]
    finally:
        process.kill()
        process.wait()
    return run


def lines_of(process: Any, killer: Killer) -> Iterator[str]:
    """What the process prints, to its end; meanwhile the killer strikes when it is time."""
    end_s, partial = time.monotonic() + LIMIT_S, ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < end_s:
            if selector.select(killer.wait_s):
                if not (read := os.read(process.stdout.fileno(), 1 << 16)):
                    return
                *lines, partial = (partial + read.decode()).split("\n")
                yield from lines
            killer.strike()


def summary(runs: Sequence[Run], expected: str) -> str:
    """The figures of a campaign."""
    times = sorted(each for run in runs for each in run.to_next_step_s)
    kills, workers = sum(len(run.killed) for run in runs), sum(sum(run.killed) for run in runs)
    equal = sum(run.fingerprint == expected for run in runs)
    return (
        f"{kills} kills of {workers} workers in {len(runs)} trainings, {equal} of them bit-equal; from a kill to the "
        f"next step: median {median(times):.1f} s, longest {times[-1]:.1f} s; load {os.getloadavg()[0]:.0f}"
    )


def main() -> int:
    """Logs a line for each training, and the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400, help="global batches of each training")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as name:
        undisturbed = train(Path(name), steps=asked.steps, workers="1", kills=0, seed=-1)
        _log.info("undisturbed, one worker: %s", undisturbed.fingerprint)
        while (kills := sum(len(run.killed) for run in runs)) < asked.kills:
            seed = asked.seed + len(runs)
            run = train(Path(name), steps=asked.steps, workers="1:4", kills=asked.kills - kills, seed=seed)
            runs.append(run)
            times = ", ".join(f"{each:.1f}" for each in run.to_next_step_s)
            _log.info("seed %d: %s, killed %s, to the next step %s s", seed, run.fingerprint, run.killed, times)
            if run.fingerprint != undisturbed.fingerprint:
                _log.error("%s", "\n".join(run.said))
    _log.info("%s", summary(runs, undisturbed.fingerprint))
    equal = all(run.fingerprint == undisturbed.fingerprint for run in runs)
    return 0 if equal else 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main())
