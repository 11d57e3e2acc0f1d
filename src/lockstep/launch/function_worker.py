"""The life of a worker that runs a function: take its place, call the function, give back what came of it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.launch.failures import Record
from lockstep.launch.places import AGENT_VARIABLES, LIFELINE, error_path, pipe_path, record_path, stacks_path
from lockstep.launch.stacks import stacks_noted
from lockstep.launch.travel import pack, unpack
from lockstep.lifeline import hang_on


@dataclass(frozen=True, kw_only=True)
class Call:
    """What all workers of a launch are given.

    Args:
        payload: the function, its arguments and keyword arguments, packed.
        environment: the launcher's; the process that a worker was forked from may have an older one.
        share_variables: the names of those that say what a worker gets of the host.
        folder: where workers write down how they failed, and where their pipes are.
        until: when their time is up, on the clock of ``time.monotonic``; None for no limit.
    """

    payload: bytes
    environment: Mapping[str, str]
    share_variables: frozenset[str]
    folder: Path
    until: float | None = None


def occupy(call: Call) -> bytes | None:
    """Runs the function in this process, which the agent has given its variables. The target of the process.

    Returns:
        The chief's result, packed; None on the others.
    """
    os.setsid()  # Ctrl-C in the launcher's terminal reaches the launcher alone, which passes it on
    hang_on(os.environ[LIFELINE])
    # What the function starts is started as in any program: a DataLoader's processes, which would import torch anew in
    # the way that this one was started, took 6 s in place of 0.3.
    multiprocessing.set_start_method(None, force=True)
    _take_variables(call)
    worker, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    _redirect(call.folder, worker, attempt)
    try:
        fn, args, kwargs = unpack(call.payload)
        with stacks_noted(stacks_path(call.folder, worker, attempt), call.until):
            result = fn(*args, **kwargs)
        return _pack_result(result) if worker == 0 else None
    except BaseException as error:  # noqa: BLE001 - the function's own, whatever it is; the launcher raises it again
        _record(error, call.folder, worker, attempt)
        code = error.code if isinstance(error, SystemExit) else None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(code if isinstance(code, int) and code else 1)


def _take_variables(call: Call) -> None:
    """The launcher's variables, beside those of this worker that the agent has set."""
    own = AGENT_VARIABLES | call.share_variables
    given = {name: value for name, value in os.environ.items() if name in own}
    os.environ.clear()
    os.environ.update({**call.environment, **given})
    threads = os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
    if threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))  # OpenMP has been loaded, and reads its variable no more


def _redirect(folder: Path, worker: int, attempt: int) -> None:
    """Standard output and error, of what is written past Python too, into this worker's pipes."""
    for descriptor, stream in ((1, "out"), (2, "err")):
        pipe = os.open(pipe_path(folder, worker, attempt, stream), os.O_WRONLY)
        os.dup2(pipe, descriptor)
        os.close(pipe)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _pack_result(result: object) -> bytes:
    try:
        return pack(result)
    except Exception as error:
        error.add_note("the chief's result could not be sent to the launcher; return something that can be pickled")
        raise


def _record(error: BaseException, folder: Path, worker: int, attempt: int) -> None:
    """Writes down the error, itself where it can be packed, and its text."""
    record = Record.of(error, hide=(__file__,))
    try:
        error_path(folder, worker, attempt).write_bytes(pack(error.with_traceback(None)))
    except Exception:  # noqa: BLE001 - whatever the user's class does; the text is enough
        error_path(folder, worker, attempt).unlink(missing_ok=True)
    record.write(record_path(folder, worker, attempt))
