"""Random kills of up to three of four workers, in trainings that must end with the bits of an undisturbed one.

python -m tests.elastic_campaign --kills 100 --seed 0     # about 15 s a kill

Workers are killed wherever they are: while they start, train, save or end.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

PROGRAM = Path(__file__).parent / "programs" / "elastic_training.py"
STEP = re.compile(r"step (\d+) ([\d.]+)")
LONGEST_PAUSE_S = 6.0  # between a step after a kill and the next kill
LIMIT_S = 600.0


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
    found = []
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in children.read_text().split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except FileNotFoundError:  # it has ended meanwhile
                continue
            if b"lockstep.launch.worker" in command:
                found.append(int(pid))
    return found


def train(folder: Path, *, steps: int, workers: str, kills: int, seed: int) -> Run:
    """Trains to the end, and kills workers at most so often on the way."""
    chosen, run = random.Random(seed), Run()
    words = ["run", "--workers", workers, str(PROGRAM), str(steps), f"backup-{seed}"]
    if ":" in workers:
        words[1:1] = ["--rejoin-s", "3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.cli", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=(folder / f"errors-{seed}.txt").open("w"),
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    end_s = time.monotonic() + LIMIT_S
    killed_at = due_s = None
    partial = ""
    try:
        while time.monotonic() < end_s:
            wait_s = 1.0 if due_s is None else max(0.0, due_s - time.monotonic())
            ready = selector.select(wait_s)
            if ready and not (read := process.stdout.read(1 << 16) or b""):
                break
            *lines, partial = (partial + (read.decode() if ready else "")).split("\n")
            for line in lines:
                if step := STEP.match(line):
                    if killed_at is not None and float(step[2]) > killed_at + 0.5:  # not of the step that was cut short
                        run.to_next_step_s.append(float(step[2]) - killed_at)
                        killed_at = None
                    if killed_at is None and due_s is None and len(run.killed) < kills:
                        due_s = time.monotonic() + chosen.uniform(0, LONGEST_PAUSE_S)
                elif line.startswith("fingerprint "):
                    run.fingerprint = line.split()[1]
            if due_s is not None and time.monotonic() >= due_s:
                present = workers_of(process.pid)
                number = chosen.randint(1, 3)
                if len(present) > number:
                    for pid in chosen.sample(present, number):
                        os.kill(pid, signal.SIGKILL)
                    run.killed.append(number)
                    killed_at, due_s = time.time(), None
        run.exit_code = process.wait(60)
    finally:
        process.kill()
        process.wait()
        selector.close()
        process.stdout.close()
    said = (folder / f"errors-{seed}.txt").read_text().splitlines()
    run.said = [line for line in said if line.startswith("lockstep: ")]
    return run


def main() -> int:
    """Prints a line for each training, and the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400, help="global batches of each training")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as name:
        undisturbed = train(Path(name), steps=asked.steps, workers="1", kills=0, seed=-1)
        print(f"undisturbed, one worker: {undisturbed.fingerprint}", flush=True)
        while (kills := sum(len(run.killed) for run in runs)) < asked.kills:
            seed = asked.seed + len(runs)
            run = train(Path(name), steps=asked.steps, workers="1:4", kills=asked.kills - kills, seed=seed)
            runs.append(run)
            load = os.getloadavg()[0]
            print(
                f"seed {seed}: {run.fingerprint} exit {run.exit_code}, killed {run.killed}, to the next step "
                f"{[round(each, 1) for each in run.to_next_step_s]} s, {len(run.said) - 1} restarts, load {load:.0f}",
                flush=True,
            )
            if run.fingerprint != undisturbed.fingerprint:
                print(*run.said, sep="\n")
    times = sorted(each for run in runs for each in run.to_next_step_s)
    equal = sum(run.fingerprint == undisturbed.fingerprint for run in runs)
    print(f"{sum(len(run.killed) for run in runs)} kills of {sum(sum(run.killed) for run in runs)} workers in {len(runs)}")
    print(f"trainings; {equal} ended bit-equal; to the next step: median {median(times):.1f} s, longest {times[-1]:.1f} s")
    return 0 if equal == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
