"""Runs the program twice at once, each in a fresh process, and pairs their records as they come.

    process of one run   ----messages---->  records(): (start, start), (update, update), ...
    process of the other ----messages---->

After the ``with`` block of ``run_pair`` both processes, all that they started, and their files are gone.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback as tracebacks
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lockstep.config import request_devices
from lockstep.errors import ReplicaError
from lockstep.parent_death import die_with_parent
from lockstep_tools.verify.config import Program, RunConfig, VerifyConfig
from lockstep_tools.verify.interventions import without_randomness
from lockstep_tools.verify.recorder import EnoughRecordedError, Recorder, recording
from lockstep_tools.verify.trace import EndRecord, Message, ReadyRecord, StartRecord, UpdateRecord

START_TIMEOUT_S = 120.0
"""Time limit for a process to start, before its program begins."""
_EXIT_TIMEOUT_S = 5.0
_SEED = 0
_OUTPUT_CHARACTERS = 4000
# These imports cost 3 s of processor time, more than the few steps of most programs: one fork server makes them once.
# torch's optimizers import torch._dynamo at their first step, whether anything is compiled or not.
_PRELOADED = ["torch", "torch._dynamo", "lockstep", "lockstep_tools.verify.runner"]
_LIBRARIES = tuple(str(path) + os.sep for path in (Path(__file__).parents[1], Path(torch.__file__).parent))


class RunProcess:
    """The process of one run; ``folder`` is empty, for its output."""

    def __init__(self, config: VerifyConfig, run: RunConfig, folder: Path) -> None:
        self.run = run
        self.end: EndRecord | None = None
        self._timeout_s = config.timeout_s
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self._output = folder / "output"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._connection, far = context.Pipe(duplex=False)
        self._process = context.Process(target=_child_main, args=(config, run, folder, far))
        self._process.start()
        far.close()

    def next_record(self) -> StartRecord | UpdateRecord | None:
        """The next record, or None at the end of the run. Raises ReplicaError after the time limit."""
        message = None if self.end is not None else self.receive()
        return message if isinstance(message, StartRecord | UpdateRecord) else None

    def receive(self) -> Message:
        if not self._connection.poll(max(0.0, self.deadline - time.monotonic())):
            which = "all replicas" if self.run.all_replicas else "one replica"
            output = self.last_output()
            raise ReplicaError(
                f"the run on {which} did not finish within {self._timeout_s:g} s; give it more with --timeout-s, "
                f"or fewer --steps" + (f"; its last output: {output.splitlines()[-1]}" if output else "")
            )
        try:
            # The bytes are those of our own child over a pipe that nobody else has.
            message: Message = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            self._process.join(_EXIT_TIMEOUT_S)
            code = self._process.exitcode
            message = EndRecord(error=f"the process ended with exit code {code} in the middle of the run")
        if isinstance(message, EndRecord):
            self.end = message
        return message

    def last_output(self) -> str:
        """The end of what the program printed."""
        if not self._output.exists():
            return ""
        return self._output.read_text(errors="replace")[-_OUTPUT_CHARACTERS:].strip()

    def stop(self) -> None:
        """Waits for a process that has sent its last message; kills any other, and all that the program started."""
        if self.end is not None:
            self._process.join(_EXIT_TIMEOUT_S)
        self._connection.close()
        if self._process.pid is not None:
            # Refused where the whole group has ended, or where the process has no group of its own yet.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process.close()


class RunPair:
    """The two runs of a comparison."""

    def __init__(self, left: RunProcess, right: RunProcess, timeout_s: float) -> None:
        self.left, self.right = left, right
        self._timeout_s = timeout_s
        self.extra = 0  # records of the left run without a counterpart; negative if the right one made more

    def records(self) -> Iterator[tuple[StartRecord | UpdateRecord, StartRecord | UpdateRecord]]:
        """The records of both runs in pairs. A run that is ahead blocks as it sends, so memory stays small."""
        for process in (self.left, self.right):
            process.receive()  # a ReadyRecord
        self.left.deadline = self.right.deadline = time.monotonic() + self._timeout_s
        while True:
            candidate, reference = self.left.next_record(), self.right.next_record()
            if candidate is None and reference is None:
                return
            if candidate is not None and reference is not None:
                yield candidate, reference
            else:
                self.extra += 1 if reference is None else -1


@contextmanager
def run_pair(config: VerifyConfig, left: RunConfig, right: RunConfig) -> Iterator[RunPair]:
    """Starts both runs. After the block, however it ends, their processes and files are gone."""
    with ExitStack() as stack:
        folder = Path(tempfile.gettempdir(), f"lockstep-verify-{uuid.uuid4().hex}")
        # Registered before the folder exists: Ctrl-C may come between any two lines.
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        processes = []
        for name, run in (("left", left), ("right", right)):
            (folder / name).mkdir()
            processes.append(RunProcess(config, run, folder / name))
            stack.callback(processes[-1].stop)
        yield RunPair(processes[0], processes[1], config.timeout_s)


# In the child process.


def _child_main(config: VerifyConfig, run: RunConfig, folder: Path, connection: Connection) -> None:
    """Runs the program and sends what is recorded, last an ``EndRecord``."""
    die_with_parent()  # in a process group of its own, so that whatever the program starts can be killed with it
    _redirect_output(folder / "output")
    # The child inherits the start method that it was started by; the program's own workers get Python's default.
    multiprocessing.set_start_method(None, force=True)

    def send(message: Message) -> None:
        connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    # The time limit of a run begins after this: imports take seconds on a busy machine, and are not the program's.
    send(ReadyRecord())
    recorder = Recorder(run, steps=config.steps, send=send)
    error: BaseException | None = None
    try:
        _run_observed(config, run, recorder, folder / "scratch")
    except EnoughRecordedError:
        pass
    except SystemExit as end:
        error = end if end.code not in (None, 0) else None
    except BaseException as raised:  # noqa: BLE001 - whatever the program raises is reported
        error = raised
    send(_with_error(recorder.finish(), error))
    connection.close()


def _run_observed(config: VerifyConfig, run: RunConfig, recorder: Recorder, scratch: Path) -> None:
    changes = run.interventions
    if changes.threads is not None:
        torch.set_num_threads(changes.threads)
    if config.devices is not None:
        request_devices(config.devices)
    # The same seeds in both runs: otherwise a program without seeds of its own would begin with different weights.
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    with recording(recorder), without_randomness(changes.randomness):
        _run_program(config.program, scratch)


def _run_program(program: Program, scratch: Path) -> None:
    extra = () if program.scratch_flag is None else (program.scratch_flag, str(scratch))
    sys.argv = [program.target, *program.arguments, *extra]
    if program.kind == "module":
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(program.target).resolve().parent))
    runpy.run_path(program.target, run_name="__main__")


def _with_error(end: EndRecord, error: BaseException | None) -> EndRecord:
    if error is None:
        return end
    text = " ".join(str(error).split())
    exits = isinstance(error, SystemExit)
    return replace(
        end,
        error=f"exit code {text}" if exits else f"{type(error).__name__}: {text}".removesuffix(": "),
        location=_location(error),
        traceback="".join(tracebacks.format_exception(error)),
    )


def _location(error: BaseException) -> str:
    """The innermost line of the program itself, not of this package, torch or runpy."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [
        frame
        for frame in tracebacks.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_LIBRARIES, "<frozen")) and Path(frame.filename).name != "runpy.py"
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _redirect_output(path: Path) -> None:
    """Redirects the file descriptors of standard output and error, so that C libraries' output goes there too."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
