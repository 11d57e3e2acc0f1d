"""A function in worker processes of this host: what ``ls.launch`` does."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.errors import ClusterError
from lockstep.launch.agent import Agent, Limits, signals_put_back, torch_log
from lockstep.launch.binding import LOOPBACK, listen, serve_store
from lockstep.launch.console import ChiefReader
from lockstep.launch.failures import Failure, Record, first_failure
from lockstep.launch.function_worker import Call, occupy
from lockstep.launch.logs import PipedLogs
from lockstep.launch.places import error_path, record_path
from lockstep.launch.rendezvous import FixedRendezvous
from lockstep.launch.shares import gpu_shares, threads_each, visible_gpus
from lockstep.launch.streams import Streams
from lockstep.launch.travel import pack_call, unpack

# Workers are forked from a process that has these, so that not each of them imports torch for a second or two.
PRELOADED = ("torch", "torch.distributed", "lockstep", "lockstep.launch.function_worker")
_STORE_TIMEOUT_S = 300.0
_POLL_S = 0.05


class WorkerTraceback(Exception):  # noqa: N818 - shown as a cause, like multiprocessing's RemoteTraceback
    """The traceback of a worker, as text: what came of its frames when the error crossed over."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def run_function(
    fn: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    workers: int,
    gpus_per_worker: int | None,
    max_restarts: int,
    timeout_s: float | None,
    log_dir: Path | None,
) -> Any:
    """See ``lockstep.launch``."""
    gpus = visible_gpus(os.environ, torch.cuda.device_count())
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name:
        call = Call(
            payload=pack_call(fn, args, kwargs),
            environment=dict(os.environ),
            threads=threads_each(os.environ, len(os.sched_getaffinity(0)), workers),
            gpus=gpu_shares(gpus, workers, gpus_per_worker) if gpus else (),
            folder=Path(name),
        )
        limits = Limits(run_s=timeout_s)
        return _run(call, workers, max_restarts=max_restarts, limits=limits, log_dir=log_dir)


def _run(call: Call, workers: int, *, max_restarts: int, limits: Limits, log_dir: Path | None) -> Any:
    store = serve_store(listen(LOOPBACK, 0), timeout_s=_STORE_TIMEOUT_S)
    spec = WorkerSpec(
        role="worker",
        local_world_size=workers,
        entrypoint=occupy,
        args=(call,),
        rdzv_handler=FixedRendezvous(store, host=LOOPBACK, port=store.port, job_id=uuid.uuid4().hex),
        max_restarts=max_restarts,
        monitor_interval=_POLL_S,
    )
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    with (
        closing(Streams(call.folder, logs=log_dir, reader=ChiefReader())) as streams,
        torch_log(None),
        signals_put_back(),
    ):
        logs = PipedLogs(streams, call.folder, opened_by_agent=False)
        agent = Agent(spec, logs, start_method="forkserver", limits=limits)
        try:
            result = agent.run()
        except SignalException as error:
            if error.sigval == 2:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
    if result.is_failed():
        _raise(agent, call.folder, workers)
    return unpack(result.return_values[0])


def _raise(agent: Agent, folder: Path, workers: int) -> NoReturn:
    records = {local: Record.read(record_path(folder, local)) for local in range(workers)}
    failure = first_failure(
        agent.exit_codes,
        agent.ended_ns,
        {local: record for local, record in records.items() if record is not None},
        agent.first_worker,
    )
    if failure is None:
        raise ClusterError(f"the {workers} workers were ended without one of them having failed; start them again")
    cause = _cause(failure, error_path(folder, failure.local))
    raise ClusterError(f"worker {failure.worker} of {workers} {failure.what}") from cause


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
