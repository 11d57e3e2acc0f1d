"""What a peer's program gets from the benchmark: its job, the batches, and the step timer of every contender.

    harness  -- job, as JSON on the command line -->  program
    harness  <-- one line of JSON on a socket --      each process of it, inside its last step; it waits there until
                                                      the harness, which reads its memory, closes the socket

Needs numpy alone: some of the environments have no torch. The step timer is the file of the package itself.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to do."""

    workload: str
    replicas: int  # among how many the global batch is divided
    warm_up: int  # steps before the timed ones
    steps: int  # timed steps
    lap: int  # steps between two readings of the clock
    layout: str  # memory format of the torch programs: "contiguous" or "channels_last"
    threads: int  # of each replica: an equal part of the cores, at least one
    learning_rate: float  # Adam's
    count: int  # how many examples, or masked tokens, the loss of a global batch is divided by
    inputs: str  # path of the batches, an .npz file
    source: str  # folder that the packages ``lockstep``, ``lockstep_tools`` and ``benchmarks`` lie in
    socket: str  # path at which the harness listens
    started_s: float  # ``time.monotonic()`` of the machine when the program was started
    guard: str  # path of the guard that ends each process with the benchmark


def take_job() -> Job:
    """The job on the command line, the only argument. From here on this process ends with the benchmark."""
    job = Job(**json.loads(sys.argv[1]))
    _load(Path(job.source) / "lockstep" / "parent_death.py").die_with(job.guard)
    return job


def load_batches(job: Job) -> list[dict[str, np.ndarray]]:
    """The different global batches, in order; training goes through them again and again.

    Each is a dict of arrays: ``y``, and ``x`` or, where the model has several inputs, one for each.
    """
    with np.load(job.inputs) as stored:
        arrays = {name: stored[name] for name in stored.files}
    return [{name: array[index] for name, array in arrays.items()} for index in range(len(arrays["y"]))]


def start_timer(job: Job, *, trained: int) -> Any:
    """The step timer of this process: call ``record_step(loss)`` after every step, ``total`` times."""
    module = _load(Path(job.source) / "benchmarks" / "step_timer.py")
    timer = module.StepTimer(
        warm_up=job.warm_up, steps=job.steps, started_s=job.started_s, report=_reporter(job), lap=job.lap
    )
    timer.trained = trained
    return timer


def _reporter(job: Job) -> Callable[[Any], None]:
    """Connects to the harness, which thereby knows that this process is one of the contender's."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(job.socket)

    def report(record: Any) -> None:
        connection.sendall(json.dumps(asdict(record)).encode() + b"\n")
        connection.recv(1)  # says nothing; ends when the memory has been read
        connection.close()

    return report


def _load(path: Path) -> Any:
    """The module in that file, without the package around it, which imports torch."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python module; expected the benchmark's step timer")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module
