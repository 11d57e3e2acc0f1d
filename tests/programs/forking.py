"""Imports everything once, then forks a process for every request: a new interpreter takes seconds, a fork none.

A forked process leaves this program by its end, as any other does: with its traceback, its exit handlers and its exit
code. It has no thread and no state of any other one; of torch nothing has run before.

    every connection is served by a fork of its own, which answers
    {"words", "folder", "environment"}: begins what ``python WORDS`` does, and gives its process id; with "orphan" it
        leads a session, and the next process above that takes orphans in is its parent; with "asks" it has no server
        below it, and asks for forks itself
    {"file", "function", "arguments", "environment", "network"}: the same for a function of a file
    {"processes": true}: begins what multiprocessing forks its processes from
    {"wait": pid}: gives the exit code of one that has ended, negative for a signal
    with the first two come the files for stdout and stderr, and for stdin if it is to have one, with the third those
        where it is asked and how long

``forking.py as SOCKET WORDS`` is for whoever starts ``python WORDS`` by a command of its own: it asks for that process
at the socket, gives it its own stdin, stdout, stderr, folder and environment, and ends as it does. Processes of
pytest-xdist begin so: three of them imported the same for 8 s each.

A program has a server below it, of which multiprocessing's server is forked and, with "forks_workers", the workers of
``lockstep run``. These print before their launcher has started all of them, which a new interpreter is too slow for.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address
from pathlib import Path
from types import ModuleType
from typing import Any

# What processes under test import, so that none of them has to; without an extra, those that need it do without.
PRELOADED = (
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.utils.serialization.config",
    "lockstep_tools.cli.bench",
    "lockstep_tools.cli.data",
    "lockstep_tools.cli.train",
    "lockstep_tools.cli.verify",
    "lockstep.integrations.transformers",
    "lockstep.launch.jobs",
    "lockstep.parallel.fsdp",
    "lockstep.parallel.pipeline",
    "lockstep.strategies.average_loss",
    "lockstep.strategies.parallel",
    "matplotlib.pyplot",
    "PIL.Image",
    "safetensors.torch",
    "tabulate",  # which dynamo imports at exit; Python forgets then that it ends by KeyboardInterrupt
    "tensorboard.compat.proto.event_pb2",
    "torch.utils.tensorboard",
    "torchmetrics.classification",
    "tqdm",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "typer._adapters",  # which typer imports when a command is called: 0.07 s of each of some hundred
)
WORKER = "lockstep.launch.worker"
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

Request = dict[str, Any]


def listen(listener: socket.socket, life: int) -> socket.socket | None:
    """Forks one that serves for everyone who connects, until the other end of ``life`` is closed; in it, connected."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a test may send one to all children of its process
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those that serve have ended
    while life not in select.select([listener, life], [], [])[0]:
        connection, _ = listener.accept()
        if fork_here():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        os.close(life)
        return connection
    return None


def preload() -> None:
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    # Else every process looks through all that was imported when it ends, and copies the memory: 1.5 s of a core.
    gc.collect()
    gc.freeze()


def serve(requests: socket.socket) -> Request | None:
    """Answers requests until there are no more; in a forked process it returns what to do."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 2**20, 3)
        if not message:
            return None
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        if not (pid := fork_orphan() if "orphan" in request else fork_here()):
            requests.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if "processes" not in request:
                settle(request, files)
            return {**request, "files": files}
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())


def fork_here() -> int:
    """As ``os.fork``; the fork ends with this process."""
    parent = os.getpid()
    if not (pid := os.fork()):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    return pid


def fork_orphan() -> int:
    """As ``os.fork``; the fork leads a session, and its parent has ended."""
    reading, writing = os.pipe()
    if middle := os.fork():
        os.close(writing)
        os.waitpid(middle, 0)
        with open(reading) as file:  # noqa: PTH123 - a pipe
            return int(file.read())
    if pid := os.fork():
        os.write(writing, b"%d" % pid)
        os._exit(0)
    os.setsid()
    os.close(reading)
    os.close(writing)
    return 0


def settle(request: Request, files: list[int]) -> None:
    """Makes a fork a process of its own: its output, folder, environment, network and signals."""
    for file, number in zip(files, (1, 2, 0), strict=False):
        os.dup2(file, number)
        os.close(file)
    if "file" in request or request["environment"].get("PYTHONFAULTHANDLER"):
        faulthandler.enable(sys.stderr)  # so that SIGABRT has it say where it stands
    if request.get("network"):
        with Path("/run/netns", request["network"]).open() as namespace:
            if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), request["network"])
    if "words" in request:
        os.environ.clear()
        os.chdir(request["folder"])
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it is looked up once
    torch = importlib.import_module("torch")
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has been loaded, and reads it no more
    # What every new interpreter draws for itself.
    random.seed()
    torch.seed()


def begin_below(work: Request) -> Request | None:
    """Forks a server for this program alone; in what is forked of that, what to do."""
    requests, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not fork_here():
        requests.close()
        return serve(connection) or os._exit(0)
    connection.close()

    def begin(request: Request, files: Sequence[int]) -> int:
        socket.send_fds(requests, [json.dumps(request).encode()], files)
        return int(requests.recv(2**16))

    if work.get("forks_workers"):
        begin_workers_with(begin)
    begin_processes_with(begin)
    return None


def begin_workers_with(begin: Callable[[Request, Sequence[int]], int]) -> None:
    """Has subprocess fork the workers of ``lockstep run`` by that function."""
    execute = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork(command: Sequence[bytes], *rest: Any) -> int:
        words = [os.fsdecode(word) for word in command[1:]]
        if WORKER not in words[:3]:
            return execute(command, *rest)
        environment = dict(os.fsdecode(variable).split("=", 1) for variable in rest[4])
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        pid = begin({"words": words, "folder": str(Path.cwd()), "environment": environment, "orphan": True}, [1, 2])
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return pid

    subprocess._fork_exec = fork  # type: ignore[attr-defined]


def begin_processes_with(begin: Callable[[Request, Sequence[int]], int]) -> None:
    """Has multiprocessing fork its processes of one that is begun by that function, when the first is wanted."""
    own = forkserver._forkserver

    def ensure_running() -> None:
        if own._forkserver_address is not None:
            return
        own._forkserver_address = arbitrary_address("AF_UNIX")
        until, own._forkserver_alive_fd = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(own._forkserver_address)
            listener.listen()
            begin({"processes": True}, [listener.fileno(), until])
        os.close(until)

    own.ensure_running = ensure_running  # type: ignore[method-assign]


def run_python(words: list[str]) -> None:
    """``python WORDS``: ``-c`` and code, ``-m`` and a module, or a file. The program is ``__main__``."""
    first, *words = words
    if first == "-u":
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
        first, *words = words
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = [first, *words]
    if first == "-m":
        sys.argv, sys.path[0] = words, str(Path.cwd())
        if words[0] == WORKER:
            del sys.modules[WORKER]  # runpy warns of a module that is there already
        runpy._run_module_as_main(words[0])
        return
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        code = compile(words[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.path[0], main.__file__ = str(Path(first).resolve().parent), first
        code = compile(Path(first).read_bytes(), first, "exec", dont_inherit=True)
    exec(code, vars(main))


def run_as(path: str, words: Sequence[str]) -> int:
    """Has a fork do what ``python WORDS`` does, in the place of this process; its exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests:
        requests.connect(path)
        request = {"words": list(words), "folder": str(Path.cwd()), "environment": dict(os.environ), "asks": True}
        socket.send_fds(requests, [json.dumps(request).encode()], [1, 2, 0])
        pid = int(requests.recv(2**16))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):  # else nobody sees that the fork has closed its own
            os.dup2(nowhere, number)
        select.select([os.pidfd_open(pid)], [], [])  # if this process is killed meanwhile, the fork ends too
        requests.send(json.dumps({"wait": pid}).encode())
        return int(requests.recv(2**16))


def run(work: Request) -> None:
    """Does what a fork was asked for."""
    if "processes" in work:
        forkserver.main(*work["files"], preload=[])
    elif "words" in work:
        below = None if "orphan" in work or "asks" in work else begin_below(work)
        if below is None:
            run_python(work["words"])
        else:
            run(below)
    else:
        sys.path[0] = str(Path(__file__).parents[2])  # for ``from tests import ...``
        try:
            runpy.run_path(work["file"])[work["function"]](*work["arguments"])
        except BaseException:
            os.write(1, f"\nraised at {time.monotonic()}\n".encode())
            raise


if __name__ == "__main__":
    if sys.argv[1] == "as":
        code = run_as(sys.argv[2], sys.argv[3:])
        sys.exit(code if code >= 0 else 128 - code)
    listening, life = map(int, sys.argv[1:])
    connection = listen(socket.socket(fileno=listening), life)
    work = None if connection is None else serve(connection)
    if work is not None:
        run(work)
