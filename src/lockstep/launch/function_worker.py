"""The life of a worker that runs a function: take its place, call the function, give back what came of it."""

from __future__ import annotations

import os
import sys
import traceback as tracebacks
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from types import TracebackType

import torch

from lockstep.launch.failures import Record
from lockstep.launch.lifeline import end_with_pipe
from lockstep.launch.places import AGENT_VARIABLES, error_path, record_path
from lockstep.launch.shares import gpu_variables
from lockstep.launch.streams import Channel, channel_of
from lockstep.launch.travel import pack, unpack


@dataclass(frozen=True, kw_only=True)
class Call:
    """What all workers of a launch are given.

    Args:
        payload: the function, its arguments and keyword arguments, by cloudpickle.
        environment: the launcher's; the process that a worker was forked from may have an older one.
        threads: intra-op threads of each worker.
        gpus: the GPUs of each worker of this host; empty where the host has none.
        folder: where workers write down how they failed, and where their pipes are.
    """

    payload: bytes
    environment: Mapping[str, str]
    threads: int
    gpus: tuple[tuple[str, ...], ...]
    folder: Path


def occupy(call: Call) -> bytes | None:
    """Runs the function in this process, which the agent has given its variables. The target of the process.

    Returns:
        The chief's result, by cloudpickle; None on the others.
    """
    os.setsid()  # Ctrl-C in the launcher's terminal reaches the launcher alone, which passes it on
    parent = parent_process()
    if parent is not None:
        end_with_pipe(parent.sentinel)
    worker, local = _take_place(call)
    _redirect(channel_of(call.folder, worker, int(os.environ["TORCHELASTIC_RESTART_COUNT"])))
    try:
        fn, args, kwargs = unpack(call.payload)
        result = fn(*args, **kwargs)
        return _pickled_result(result) if worker == 0 else None
    except BaseException as error:  # noqa: BLE001 - the function's own, whatever it is; the launcher raises it again
        _record(error, call.folder, local)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(1)


def _take_place(call: Call) -> tuple[int, int]:
    """Takes over the launcher's variables, beside those that the agent has set, and this worker's share of the host.

    Returns:
        This worker's number among those of all hosts, and among those of this one.
    """
    given = {name: value for name, value in os.environ.items() if name in AGENT_VARIABLES}
    local = int(given["LOCAL_RANK"])
    if call.gpus:
        given |= gpu_variables(call.gpus[local])
    os.environ.clear()
    os.environ.update({**call.environment, **given, "OMP_NUM_THREADS": str(call.threads)})
    torch.set_num_threads(call.threads)  # OpenMP has been loaded, and reads its variable no more
    return int(given["RANK"]), local


def _redirect(channel: Channel) -> None:
    """Standard output and error, of what is written past Python too, into this worker's pipes."""
    for stream, path in ((1, channel.out), (2, channel.err)):
        descriptor = os.open(path, os.O_WRONLY)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _pickled_result(result: object) -> bytes:
    try:
        return pack(result)
    except Exception as error:
        error.add_note("the chief's result could not be sent to the launcher; return something that can be pickled")
        raise


def _record(error: BaseException, folder: Path, local: int) -> None:
    """Writes down the error, its text at once and itself where it can be pickled."""
    trimmed = error.with_traceback(_from_the_function_on(error.__traceback__))
    Record.of(error, "".join(tracebacks.format_exception(trimmed))).write(record_path(folder, local))
    try:
        payload = pack(error)
    except Exception:  # noqa: BLE001 - whatever the user's class does; the text is enough
        return
    error_path(folder, local).write_bytes(payload)


def _from_the_function_on(traceback: TracebackType | None) -> TracebackType | None:
    """Without this file's own lines at its start."""
    while traceback is not None and traceback.tb_next is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback
