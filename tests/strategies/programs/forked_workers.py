"""Imports everything once, then forks a worker for every request: a new interpreter takes seconds, a fork none.

A forked worker leaves this program by its end, as any other program does: with its traceback, its exit handlers and its
exit code. It has no thread and no state of any other worker; of torch nothing has run before.

    request: {"file", "function", "arguments", "environment", "network"}, with the files for stdout and stderr
             {"wait": pid}
    answer:  the worker's process id; the exit code of one that has ended, negative for a signal
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest  # noqa: F401  what the files of the functions import, so that no worker has to
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.checkpoint.hf_storage

import lockstep  # noqa: F401

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Answers requests until there are no more; in a forked worker it returns what to do."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 2**16, 2)
        if not message:
            return None
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        parent = os.getpid()
        if not (pid := os.fork()):
            requests.close()
            settle(request, files, parent)
            return dict(request)
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())


def settle(request: dict[str, Any], files: list[int], parent: int) -> None:
    """Makes a fork a process of its own: its output, environment, network and signals."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(sys.stderr)  # so that SIGABRT has it say where it stands
    if request["network"]:
        with Path("/run/netns", request["network"]).open() as namespace:
            if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), request["network"])
    os.environ.update(request["environment"])
    # What every new interpreter draws for itself.
    random.seed()
    torch.seed()


if __name__ == "__main__":
    # Else every worker looks through all that was imported when it ends, and copies the memory: 1.5 s of a core.
    gc.freeze()
    work = serve(socket.socket(fileno=int(sys.argv[1])))
    if work is not None:
        try:
            runpy.run_path(work["file"])[work["function"]](*work["arguments"])
        except BaseException:
            os.write(1, f"\nraised at {time.monotonic()}\n".encode())
            raise
