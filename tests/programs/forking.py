"""Imports everything once, then forks a process for every request: a new interpreter takes seconds, a fork none.

A forked process leaves this program by its end, as any other does: with its traceback, its exit handlers and its exit
code. It has no thread and no state of any other one; of torch nothing has run before.

    every connection is served by a fork of its own, which answers
    {"words", "folder", "environment"}: begins what ``python WORDS`` does, and gives its process id
    {"file", "function", "arguments", "environment", "network"}: the same for a function of a file
    {"processes": true}: begins what multiprocessing forks its processes from
    {"wait": pid}: gives the exit code of one that has ended, negative for a signal
    with the first two come the files for stdout and stderr, with the third those where it is asked and how long
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing.forkserver
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import time
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
    "lockstep.strategies.losses",
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
)
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
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
        message, files, _, _ = socket.recv_fds(requests, 2**20, 2)
        if not message:
            return None
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        if not (pid := fork_here()):
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


def settle(request: Request, files: list[int]) -> None:
    """Makes a fork a process of its own: its output, folder, environment, network and signals."""
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    if "file" in request:
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


def run_python(first: str, *words: str) -> None:
    """``python FIRST WORDS``: ``-c`` and code, ``-m`` and a module, or a file. The program is ``__main__``."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = [first, *words]
    if first == "-m":
        sys.argv, sys.path[0] = list(words), str(Path.cwd())
        runpy._run_module_as_main(words[0])
        return
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        code = compile(words[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.path[0], main.__file__ = str(Path(first).resolve().parent), first
        code = compile(Path(first).read_bytes(), first, "exec", dont_inherit=True)
    exec(code, vars(main))


if __name__ == "__main__":
    listening, life = map(int, sys.argv[1:])
    connection = listen(socket.socket(fileno=listening), life)
    work = None if connection is None else serve(connection)
    if work is not None and "processes" in work:
        multiprocessing.forkserver.main(*work["files"], preload=[])
    elif work is not None and "words" in work:
        run_python(*work["words"])
    elif work is not None:
        try:
            runpy.run_path(work["file"])[work["function"]](*work["arguments"])
        except BaseException:
            os.write(1, f"\nraised at {time.monotonic()}\n".encode())
            raise
