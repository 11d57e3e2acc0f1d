"""A function in worker processes of this host: what ``ls.launch`` does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec

from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.agent import Limits
from lockstep.launch.console import ChiefReader, complain
from lockstep.launch.failures import Failure
from lockstep.launch.function_worker import Call, occupy
from lockstep.launch.job import START_METHOD, Ending, run_agent
from lockstep.launch.logs import PipedLogs
from lockstep.launch.meeting import OneHost
from lockstep.launch.places import error_path, stacks_path
from lockstep.launch.shares import share_host, visible_gpus
from lockstep.launch.stacks import read_stacks
from lockstep.launch.streams import Streams
from lockstep.launch.surroundings import no_empty_compiler_folder
from lockstep.launch.telling import tell_nobody
from lockstep.launch.travel import pack_call, unpack

# Workers are forked from a process that has these, so that not each of them imports torch for a second or two.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "lockstep", "lockstep.launch.function_worker")
_POLL_S = 0.02
_SIGNALS = 128  # exit codes from here on stand for signals


class WorkerTraceback(Exception):  # noqa: N818 - shown as a cause, like multiprocessing's RemoteTraceback
    """The traceback of a worker, as text: what came of its frames when the error crossed over."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, kw_only=True)
class FunctionJob:
    """How a function is to be run.

    Args:
        workers: how many processes.
        gpus_per_worker: GPUs that each sees; None divides all of them.
        max_restarts: how often all are started again after one has failed.
        limits: how long to wait.
        log_dir: the folder of the log files; None keeps none.
        preloaded: modules that no worker need import, beside torch and this package.
    """

    workers: int
    gpus_per_worker: int | None = None
    max_restarts: int = 0
    limits: Limits
    log_dir: Path | None = None
    preloaded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers={self.workers} was given, expected at least 1; say how many processes to start")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts} was given, expected 0 or more")

    def run(self, fn: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """See ``lockstep.launch``."""
        shares = share_host(
            os.environ,
            workers=self.workers,
            cores=len(os.sched_getaffinity(0)),
            gpus=visible_gpus(os.environ, torch.cuda.device_count()),
            gpus_per_worker=self.gpus_per_worker,
        )
        with no_empty_compiler_folder(), tempfile.TemporaryDirectory(prefix="lockstep-") as name:
            call = Call(
                payload=pack_call(fn, args, kwargs),
                environment=dict(os.environ),
                share_variables=frozenset(shares[0]),
                folder=Path(name),
                until=None if self.limits.timeout_s is None else time.monotonic() + self.limits.timeout_s,
            )
            try:
                ending = self._run(call, shares)
            except ClusterError as error:
                self._say_where(error, call.folder)
                raise
            if ending.failure is not None:
                _raise(ending.failure, ending.num_workers, call.folder)
        return _result(ending)

    def _say_where(self, error: ClusterError, folder: Path) -> None:
        """Adds where each worker of the last attempt stood when its time was up."""
        for attempt in range(self.max_restarts, -1, -1):
            stacks = read_stacks({worker: stacks_path(folder, worker, attempt) for worker in range(self.workers)})
            if stacks:
                error.add_note(stacks)
                return

    def _run(self, call: Call, shares: tuple[Mapping[str, str], ...]) -> Ending:
        spec = WorkerSpec(
            role="worker",
            local_world_size=self.workers,
            entrypoint=occupy,
            args=(call,),
            rdzv_handler=OneHost().meet(tell_nobody),
            max_restarts=self.max_restarts,
            monitor_interval=_POLL_S,
        )
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        multiprocessing.get_context(START_METHOD).set_forkserver_preload([*PRELOADED, *self.preloaded])
        with closing(Streams(call.folder, logs=self.log_dir, reader=ChiefReader(), complain=complain)) as streams:
            logs = PipedLogs(streams, shares=shares, folder=call.folder, opened_by_agent=False)
            return run_agent(spec, logs, limits=self.limits, on_restart=lambda failure, restarts: None)


def _result(ending: Ending) -> Any:
    if ending.sign is not None:
        if ending.sign == signal.SIGTERM and signal.getsignal(ending.sign) == signal.SIG_DFL:
            _end_as_the_workers_did(ending.own_code)
        signal.raise_signal(ending.sign)  # to whom it was meant for: KeyboardInterrupt, or the end of this process
        raise ClusterError(f"the workers were ended: {ending.sign.name} came; start them again")
    return unpack(ending.values[0])


def _end_as_the_workers_did(code: int) -> None:
    """After SIGTERM, which nothing in this process handles: with the exit code that the workers chose, if they did."""
    if 1 < code < _SIGNALS:
        raise SystemExit(code)


def _raise(failure: Failure, num_workers: int, folder: Path) -> NoReturn:
    cause = _cause(failure, error_path(folder, failure.worker, failure.attempt))
    raise ClusterError(f"worker {failure.worker} of {num_workers} {failure.what}") from cause


def _cause(failure: Failure, path: Path) -> BaseException | None:
    """The worker's own exception, its traceback as text behind it; the text alone where it cannot be rebuilt."""
    if failure.record is None:
        return None
    shown = WorkerTraceback(failure.record.traceback)
    try:
        error = unpack(path.read_bytes())
    except Exception:  # noqa: BLE001 - whatever the user's class does when it is rebuilt; the text is enough
        return shown
    if not isinstance(error, BaseException):
        return shown
    error.__cause__ = shown
    return error
