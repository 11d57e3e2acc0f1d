"""The life of the process of one run: prepare, run the program as a person would start it, report how it ended.

Its standard output and error go to a file of the parent's. It is the first of a process group of its own, so that what
the program starts can be ended with it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import runpy
import sys
import traceback as tracebacks
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lockstep.config import apply_device_request, parse_device_request
from lockstep.parent_death import end_with_pipe
from lockstep.verify.config import Program, Side
from lockstep.verify.one_shard import one_shard
from lockstep.verify.randomness import without_randomness
from lockstep.verify.record import EndRecord, Message, ReadyRecord
from lockstep.verify.recorder import EnoughSeenError, Recorder
from lockstep.verify.watching import watching

SEED = 0
_OURS = tuple(str(path) + os.sep for path in (Path(__file__).parents[1], Path(torch.__file__).parent))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is given.

    Args:
        program: what to run.
        side: on all replicas or one, and what is switched.
        steps: updates to record.
        devices: how to divide the devices before.
        output: the file for standard output and error.
        scratch: a folder for what the program is told to write.
    """

    program: Program
    side: Side
    steps: int
    devices: str | None
    output: str
    scratch: str


def occupy(job: Job, connection: Connection) -> None:
    """Runs the program of ``job`` and sends what is recorded, last an ``EndRecord``. The target of the process."""
    os.setsid()
    parent = parent_process()
    if parent is not None:
        end_with_pipe(parent.sentinel)
    _redirect(job.output)
    # A process begins with the start method that it was started by; the program's own workers get Python's default.
    multiprocessing.set_start_method(None, force=True)

    def send(message: Message) -> None:
        connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    send(ReadyRecord())
    recorder = Recorder(job.side, steps=job.steps, send=send)
    send(_run(job, recorder))
    connection.close()


def _run(job: Job, recorder: Recorder) -> EndRecord:
    error: BaseException | None = None
    try:
        _prepare(job)
        switches = job.side.switches
        with (
            watching(recorder),
            without_randomness(switches.randomness),
            one_shard(switches.shard, switches.shards),
        ):
            _start(job.program, job.scratch)
    except EnoughSeenError:
        pass
    except SystemExit as end:
        error = end if end.code not in (None, 0) else None
    except BaseException as raised:  # noqa: BLE001 - the program's own, whatever it is; the report names it
        error = raised
    return _with_error(recorder.finish(), error)


def _prepare(job: Job) -> None:
    if job.side.switches.threads is not None:
        torch.set_num_threads(job.side.switches.threads)
    if job.devices is not None:
        apply_device_request(parse_device_request(job.devices))
    torch.manual_seed(SEED)
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


def _start(program: Program, scratch: str) -> None:
    extra = () if program.scratch_flag is None else (program.scratch_flag, scratch)
    sys.argv = [program.target, *program.arguments, *extra]
    if program.kind == "module":
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(program.target).resolve().parent))
    runpy.run_path(program.target, run_name="__main__")


def _with_error(end: EndRecord, error: BaseException | None) -> EndRecord:
    if error is None:
        return end
    said = " ".join(str(error).split())
    name = "exit code" if isinstance(error, SystemExit) else type(error).__name__
    return replace(
        end,
        error=f"{name}{' ' if name == 'exit code' else ': '}{said}".removesuffix(": "),
        place=_place(error),
        traceback="".join(tracebacks.format_exception(error)),
    )


def _place(error: BaseException) -> str:
    """The innermost line of the program's own: not of this package, of torch or of Python's starter."""
    frames = [
        frame
        for frame in tracebacks.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_OURS, "<frozen")) and Path(frame.filename).name != "runpy.py"
    ]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _redirect(path: str) -> None:
    """Standard output and error, of what is written past Python too, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
