"""A program in worker processes of this host: what ``lockstep run`` does."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.agent import Agent, Limits, OnRestart, PipedLogs
from lockstep.launch.failures import Failure, read_stacks
from lockstep.launch.guards import no_empty_compiler_folder, signals_put_back, torch_is_quiet
from lockstep.launch.output import ChiefReader, Streams, Tell, complain, reader_for, tell_nobody
from lockstep.launch.rendezvous import FixedRendezvous, Meeting, OneHost
from lockstep.launch.resources import share_host, visible_gpus
from lockstep.launch.run_paths import error_path, log_path, semaphore_prefix, stacks_path
from lockstep.launch.worker import MODULE, SCRIPT, Call, occupy, pack_call, unpack

START_METHOD = "forkserver"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the workers of this host ended.

    Args:
        num_workers: how many there were on all hosts.
        values: what functions returned, by worker.
        failure: the first failure of the last attempt; None where they did not fail.
        sign: the signal that ended the launcher; None where none did.
        exit_codes: of all workers of this host, by local number.
    """

    num_workers: int
    values: Mapping[int, Any]
    failure: Failure | None
    sign: signal.Signals | None
    exit_codes: Mapping[int, int | None]

    @property
    def own_code(self) -> int:
        """The workers' exit code after a signal ended the launcher, as a shell shows it. Pure.

        The first that a worker chose itself, as ``BackupAndRestore`` does; else that of a signal. 1 comes last, since
        workers end with it that have lost others. 0 where none failed.
        """
        codes = (code for code in self.exit_codes.values() if code)
        first = min(codes, key=lambda code: (code == 1, code < 0), default=0)
        return 128 - first if first < 0 else first


def run_agent(spec: WorkerSpec, logs: PipedLogs, *, limits: Limits, on_restart: OnRestart) -> Ending:
    """Starts the workers of this host and stays until all have ended; none outlives the call.

    Raises:
        ClusterError: they took longer than ``limits`` allow, or those of another host have failed for good.
    """
    values: Mapping[int, Any] = {}
    failure = sign = None
    with torch_is_quiet(), signals_put_back():
        agent = Agent(spec, logs, start_method=START_METHOD, limits=limits, on_restart=on_restart)
        try:
            result = agent.run()
            if result is not None:
                values = result.return_values
                if result.state == WorkerState.SUCCEEDED:
                    _take_leave(spec)
                else:
                    failure = _failure(spec, agent)
        except SignalException as error:
            sign = error.sigval
        finally:
            agent.kill()
            spec.rdzv_handler.shutdown()
    return Ending(num_workers=agent.num_workers, values=values, failure=failure, sign=sign, exit_codes=agent.exit_codes)


def _take_leave(spec: WorkerSpec) -> None:
    """The workers of this host have finished; those of another may have failed, of which nothing was heard yet."""
    if isinstance(spec.rdzv_handler, FixedRendezvous):
        spec.rdzv_handler.take_leave()


def _failure(spec: WorkerSpec, agent: Agent) -> Failure:
    """The first failure of this host, which the launchers of the others are told too."""
    failure = agent.first_failure()
    if failure is None:
        raise ClusterError("the workers of this host were ended and none had failed; start them again")
    if isinstance(spec.rdzv_handler, FixedRendezvous):
        spec.rdzv_handler.give_up(
            f"worker {failure.worker} of {agent.num_workers} {failure.what}", agent.pass_exit_barrier
        )
    return failure


# Workers are forked from a process that has these, so that not each of them imports torch for a second or two.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "lockstep", "lockstep.launch.worker")
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


Output = Literal["chief", "all", "none"]
_PROGRAM_POLL_S = 0.1
_LAST_LINES = 10


@dataclass(frozen=True, kw_only=True)
class Program:
    """What every worker runs.

    Args:
        target: the path of a Python file, or the name of a module.
        is_module: which of them.
        arguments: the program's own.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.is_module and not Path(self.target).is_file():
            raise ConfigError(
                f"the script {self.target!r} does not exist, expected a Python file; a module is named after -m"
            )

    @property
    def job(self) -> str:
        """What tells this program from others where launchers meet. Arguments may be secret, so they are digested."""
        digest = hashlib.sha256("\0".join((str(self.is_module), *self.arguments)).encode()).hexdigest()
        return f"{self.target} with arguments {digest[:8]}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is left to say when all workers of this host have ended.

    Args:
        exit_code: for this process: 0, or that of the first worker that failed, as a shell shows it.
        interrupted: Ctrl-C ended them.
        line: which worker failed first, and where its log is; None where none did.
        last_words: that worker's traceback, or the end of what it printed; empty where it has been shown already.
        worker: its number.
    """

    exit_code: int
    interrupted: bool = False
    line: str | None = None
    last_words: str = ""
    worker: int = 0


@dataclass(frozen=True, kw_only=True)
class ProgramJob:
    """How a program is to be run.

    Args:
        program: what to run.
        meeting: how the launchers of all hosts meet.
        workers: processes on this host; None for one per GPU, or one where there is no GPU.
        gpus_per_worker: GPUs that each sees; None divides all of them.
        max_restarts: how often all are started again after one has failed.
        limits: how long to wait.
        logs: the folder in which each run makes one of its own.
        output: whose output is passed on.
    """

    program: Program
    meeting: Meeting
    workers: int | None = None
    gpus_per_worker: int | None = None
    max_restarts: int = 0
    limits: Limits
    logs: Path
    output: Output = "chief"

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers={self.workers} was given, expected at least 1")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts} was given, expected 0 or more")

    def run(self, tell: Tell) -> Outcome:
        """Starts the workers and stays until all have ended; none outlives the call.

        Args:
            tell: takes a line when something has happened that a person would want to know.
        """
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        workers = self.workers or len(gpus) or 1
        cores = len(os.sched_getaffinity(0))
        shares = share_host(os.environ, workers=workers, cores=cores, gpus=gpus, gpus_per_worker=self.gpus_per_worker)
        handler = self.meeting.meet(tell)
        folder = self.logs / handler.get_run_id()
        folder.mkdir(parents=True, exist_ok=True)
        tell(f"{_describe(shares)}; logs in {folder}/")
        return self._outcome(self._run(handler, shares, folder, tell), folder)

    def _run(
        self, handler: RendezvousHandler, shares: tuple[Mapping[str, str], ...], folder: Path, tell: Tell
    ) -> Ending:
        spec = WorkerSpec(
            role="worker",
            local_world_size=len(shares),
            entrypoint=sys.executable,
            args=self._words(folder),
            rdzv_handler=handler,
            max_restarts=self.max_restarts,
            monitor_interval=_PROGRAM_POLL_S,
        )
        with closing(Streams(folder, logs=folder, reader=reader_for(self.output), complain=complain)) as streams:
            logs = PipedLogs(streams, shares=shares, folder=folder, opened_by_agent=True)
            try:
                return run_agent(spec, logs, limits=self.limits, on_restart=_restart_teller(self.max_restarts, tell))
            finally:
                _remove_semaphores(folder)

    def _words(self, folder: Path) -> tuple[str, ...]:
        """The command line of every worker after Python's name. The agent would fill in what follows a dollar sign."""
        kind = MODULE if self.program.is_module else SCRIPT
        words = ("-u", "-m", "lockstep.launch.worker", str(folder), kind, self.program.target)
        return tuple(word.replace("$", "$$") for word in (*words, *self.program.arguments))

    def _outcome(self, ending: Ending, folder: Path) -> Outcome:
        if ending.sign is not None:
            return Outcome(exit_code=ending.own_code, interrupted=ending.sign.name == "SIGINT")
        if ending.failure is None:
            return Outcome(exit_code=0)
        failure = ending.failure
        log = log_path(folder, failure.worker, failure.attempt)
        shown = self.output == "all" or (self.output == "chief" and failure.worker == 0)
        return Outcome(
            exit_code=failure.shell_code,
            line=f"worker {failure.worker} of {ending.num_workers} {failure.what}; its log is {log}",
            last_words="" if shown else _last_words(failure, log),
            worker=failure.worker,
        )


def _describe(shares: tuple[Mapping[str, str], ...]) -> str:
    what = "1 worker" if len(shares) == 1 else f"{len(shares)} workers"
    gpus = [share["CUDA_VISIBLE_DEVICES"] for share in shares if share.get("CUDA_VISIBLE_DEVICES")]
    if gpus:
        return f"{what} on this host, on GPU {' | '.join(gpus)}"
    threads = shares[0].get("OMP_NUM_THREADS")
    each = "" if threads is None else f", {threads} thread{'s' * (threads != '1')} each"
    return f"{what} on this host{each}"


def _restart_teller(most: int, tell: Tell) -> Callable[[Failure | None, int], None]:
    def on_restart(failure: Failure | None, restarts: int) -> None:
        if failure is None:
            tell("launchers came or went; starting the workers again")
        else:
            tell(f"worker {failure.worker} {failure.what}; starting all again ({restarts} of {most})")

    return on_restart


def _last_words(failure: Failure, log: Path) -> str:
    if failure.record is not None:
        return failure.record.traceback
    lines = log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []
    return "".join(lines[-_LAST_LINES:])


def _remove_semaphores(folder: Path) -> None:
    """Removes the semaphores that killed workers left in shared memory; a tracker of theirs was killed with them."""
    for path in Path("/dev/shm").glob(f"sem.{semaphore_prefix(folder)[1:]}-*"):
        path.unlink(missing_ok=True)
