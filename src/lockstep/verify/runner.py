"""Two runs at once, each in a fresh process, handed over record by record. All ends with the ``with`` block.

child of one side ----bytes---->  pair(start, start), pair(update, update) ...  both ends
child of the other --bytes---->
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
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

from lockstep.config import apply_device_request, parse_device_request
from lockstep.errors import ReplicaError
from lockstep.lifeline import end_with_pipe
from lockstep.verify.config import Program, Side, VerifyConfig
from lockstep.verify.interventions import one_shard, without_randomness
from lockstep.verify.recorder import EnoughSeenError, Recorder, watching
from lockstep.verify.trace import EndRecord, Message, ReadyRecord, StartRecord, UpdateRecord

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


AHEAD = 2
"""Records that one run may be ahead of the other: its process waits then, and memory stays small."""
START_LIMIT_S = 120.0
"""Seconds that a process has to begin, before its program is started."""
_END_LIMIT_S = 5.0
# torch's optimizers import the second at their first step, whether anything is compiled or not.
_PRELOADED = ("torch", "torch._dynamo", "lockstep", "lockstep.verify.runner")
_OUTPUT_CHARACTERS = 4000


class Child:
    """One run's process."""

    def __init__(self, config: VerifyConfig, side: Side, folder: Path) -> None:
        self.side = side
        self.output = folder / "output"
        scratch = folder / "scratch"
        context = _fresh_processes()
        self.connection, far = context.Pipe(duplex=False)
        job = Job(
            program=config.program,
            side=side,
            steps=config.steps,
            devices=config.devices,
            output=str(self.output),
            scratch=str(scratch),
        )
        self._process = context.Process(target=occupy, args=(job, far))
        self._process.start()
        far.close()
        self.is_ready = False
        self.waiting: deque[StartRecord | UpdateRecord] = deque()
        self.end: EndRecord | None = None

    def receive(self) -> None:
        """Takes one message."""
        try:
            message: Message = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self._process.join(_END_LIMIT_S)
            code = self._process.exitcode
            message = EndRecord(error=f"the process ended with exit code {code} in the middle of the run")
        if isinstance(message, ReadyRecord):
            self.is_ready = True
        elif isinstance(message, EndRecord):
            self.end = message
        else:
            self.waiting.append(message)

    def said(self) -> str:
        """The last of what the program printed."""
        if not self.output.exists():
            return ""
        return self.output.read_text(errors="replace")[-_OUTPUT_CHARACTERS:].strip()

    def stop(self) -> None:
        """Waits for the process where it has said its last word; ends it, and all that it started, where not."""
        if self.end is not None:
            wait([self._process.sentinel], _END_LIMIT_S)
        self.connection.close()
        pid = self._process.pid
        if pid is not None:
            _end_group(pid)
        self._process.kill()
        self._process.join()
        self._process.close()


class Pair:
    """The two runs of a comparison."""

    def __init__(self, children: Sequence[Child], limit_s: float) -> None:
        self.left, self.right = children
        self._limit_s = limit_s
        self._deadline = time.monotonic() + START_LIMIT_S

    def records(self) -> Iterator[tuple[StartRecord | UpdateRecord, StartRecord | UpdateRecord]]:
        """The records of both, side by side; what one has more than the other is left in ``waiting``.

        Raises:
            ReplicaError: a run took longer than the limit.
        """
        while starting := [child for child in (self.left, self.right) if not child.is_ready and child.end is None]:
            for child in self._ready(starting):
                child.receive()
        self._deadline = time.monotonic() + self._limit_s
        while True:
            while self.left.waiting and self.right.waiting:
                yield self.left.waiting.popleft(), self.right.waiting.popleft()
            running = [child for child in (self.left, self.right) if child.end is None]
            if not running:
                return
            # Where the other has ended, what comes has no partner, and only its number is of interest.
            hungry = [child for child in running if len(child.waiting) < AHEAD or len(running) == 1]
            for child in self._ready(hungry):
                child.receive()

    def _ready(self, children: Sequence[Child]) -> list[Child]:
        connections: list[Connection] = [child.connection for child in children]
        ready = wait(connections, max(0.0, self._deadline - time.monotonic()))
        if not ready:
            which = "all replicas" if children[0].side.all_replicas else "one replica"
            said = children[0].said()
            raise ReplicaError(
                f"the run on {which} was not done after {self._limit_s:g} s; give it more with --timeout-s, "
                f"or fewer --steps" + (f"; it said last: {said.splitlines()[-1]}" if said else "")
            )
        return [child for child in children if child.connection in ready]


@contextmanager
def running(config: VerifyConfig, left: Side, right: Side) -> Iterator[Pair]:
    """Starts both runs; after the block, whatever happens in it, processes and files are gone."""
    with ExitStack() as stack:
        folder = Path(tempfile.gettempdir(), f"lockstep-verify-{uuid.uuid4().hex}")
        # Before there is one: a Ctrl-C may come between any two lines.
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        children = []
        for name, side in (("left", left), ("right", right)):
            own = Path(tempfile.mkdtemp(prefix=name, dir=folder))
            child = Child(config, side, own)
            stack.callback(child.stop)
            children.append(child)
        yield Pair(children, config.timeout_s)


def _fresh_processes() -> ForkServerContext:
    """Processes that begin where Python has imported torch and this package, and nothing else has happened.

    Those imports take 3 s of processor time, more than the few steps of most programs; one server makes them once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # all of it has ended, or the process had not made its group yet and is killed alone
