"""A process that torchrun starts: the original Trainer, which finds the others by torchrun's variables.

Run as ``torchrun ... under_torchrun.py JOB``; the job is what ``bench.programs`` gives every program.
"""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.step_timer import StepRecord, StepTimer
from benchmarks.suites.trainer_loop import train_original
from lockstep.parent_death import die_with


def main() -> None:
    """Trains, and reports inside the last step; stays there until the harness has read its memory."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    die_with(job["guard"])
    with socket.socket(socket.AF_UNIX) as harness:
        harness.connect(job["socket"])

        def report(record: StepRecord) -> None:
            harness.sendall(json.dumps(asdict(record)).encode() + b"\n")
            harness.recv(1)  # says nothing; ends when the other end closes

        timer = StepTimer(warm_up=job["warm_up"], steps=job["steps"], started_s=job["started_s"], report=report)
        train_original(timer, processes=job["replicas"])


if __name__ == "__main__":
    main()
