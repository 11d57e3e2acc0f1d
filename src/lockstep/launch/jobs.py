"""A function (``ls.launch``) or a program (``lockstep run``) in worker processes of this host, from start to end."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.cluster.local import OWN_GPUS
from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.agent import Agent, Limits, OnRestart, WorkerSetup
from lockstep.launch.failures import WorkerFailure, read_stacks
from lockstep.launch.guards import remove_empty_compiler_folder, restore_signal_handlers, silence_torch_launcher
from lockstep.launch.output import OutputForwarder, StatusCallback, make_sink
from lockstep.launch.rendezvous import Hosts, Rendezvous
from lockstep.launch.worker import (
    MODULE,
    SCRIPT,
    FunctionCall,
    WorkerPaths,
    deserialize,
    run_function,
    semaphore_prefix,
    serialize_call,
)

_START_METHOD = "forkserver"
# Workers are forked from a process that has these, so that not each of them imports torch for a second or two.
_PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "lockstep", "lockstep.launch.worker")
_FUNCTION_POLL_S, _PROGRAM_POLL_S = 0.02, 0.1
_FIRST_SIGNAL_CODE = 128  # exit codes from here on stand for signals
_LAST_LINES = 10

Resources = Sequence[Mapping[str, str]]
"""Environment variables of each worker of this host for its cores and GPUs."""


def visible_gpus(environment: Mapping[str, str], present: int) -> tuple[str, ...]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them; torch sees ``present``."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(str(number) for number in range(present))
    return tuple(name.strip() for name in named.split(",") if name.strip())[:present]


def divide_host(
    environment: Mapping[str, str], *, workers: int, cores: int, gpus: Sequence[str], gpus_per_worker: int | None
) -> tuple[dict[str, str], ...]:
    """The environment variables that give every worker of a host its resources, in worker order.

    OMP_NUM_THREADS: all cores divided by the workers, unless the user has set it. CUDA_VISIBLE_DEVICES: neighbouring
    GPUs, each GPU for one worker only. A worker sees its own GPUs as 0, 1, ..., so LOCAL_RANK is 0, as with torchrun's
    --virtual-local-rank: a program that takes GPU LOCAL_RANK takes one of its own.

    ``gpus_per_worker``: 0 for none; None divides all of them. Raises ConfigError if there are too few GPUs.
    """
    threads = {} if environment.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(max(1, cores // workers))}
    if not gpus and not gpus_per_worker:
        return tuple(dict(threads) for _ in range(workers))
    each = _gpus_each(len(gpus), workers, gpus_per_worker)
    shares = [gpus[worker * each : (worker + 1) * each] for worker in range(workers)]
    own = {"LOCAL_RANK": "0", OWN_GPUS: "1"} if each else {}
    return tuple({**threads, "CUDA_VISIBLE_DEVICES": ",".join(share), **own} for share in shares)


def _gpus_each(gpus: int, workers: int, gpus_per_worker: int | None) -> int:
    there = "is 1 GPU" if gpus == 1 else f"are {gpus} GPUs"
    if gpus_per_worker is None and workers > gpus:
        raise ConfigError(
            f"{workers} workers were given but there {there}, expected one GPU for each worker because NCCL takes one "
            f"worker per GPU; start {gpus} workers, or give 0 GPUs per worker to train on the CPU"
        )
    each = gpus // workers if gpus_per_worker is None else gpus_per_worker
    if each < 0 or each * workers > gpus:
        raise ConfigError(
            f"{each} GPUs were given for each of {workers} workers but there {there}; start fewer workers or give each "
            "fewer GPUs"
        )
    return each


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """How the workers of this host ended."""

    num_workers: int  # the number of workers on all hosts
    values: Mapping[int, Any]  # what functions returned, by worker
    failure: WorkerFailure | None  # the first failure of the last attempt; None if none failed
    received: signal.Signals | None  # the signal that ended the launcher; None if none did
    exit_codes: Mapping[int, int | None]  # of all workers of this host, by local rank

    @property
    def exit_code(self) -> int:
        """The workers' exit code after a signal ended the launcher, as a shell shows it; 0 if none failed. Pure.

        It is the first code that a worker chose itself, as ``BackupAndRestore`` does, else that of a signal. 1 comes
        last, because workers end with it that have lost others.
        """
        codes = (code for code in self.exit_codes.values() if code)
        first = min(codes, key=lambda code: (code == 1, code < 0), default=0)
        return 128 - first if first < 0 else first


def run_agent(
    spec: WorkerSpec, rendezvous: Rendezvous, setup: WorkerSetup, *, limits: Limits, on_restart: OnRestart
) -> AgentResult:
    """Starts the workers of this host and waits until all have ended; none outlives the call.

    Raises:
        ClusterError: they took longer than ``limits`` allow, or those of another host have failed for good.
    """
    values: Mapping[int, Any] = {}
    failure = received = None
    with silence_torch_launcher(), restore_signal_handlers():
        agent = Agent(spec, setup, start_method=_START_METHOD, limits=limits, on_restart=on_restart)
        try:
            result = agent.run()
            if result is not None and result.state == WorkerState.SUCCEEDED:
                values = result.return_values
                rendezvous.finish()  # which raises if the workers of another host have failed
            elif result is not None:
                failure = agent.first_failure()
                if failure is None:
                    raise ClusterError("the workers of this host were ended and none had failed; start them again")
                cause = f"worker {failure.worker} of {agent.num_workers} {failure.what}"
                rendezvous.give_up(cause, agent.pass_exit_barrier)
        except SignalException as error:
            received = error.sigval
        finally:
            agent.kill()
            rendezvous.shutdown()
    return AgentResult(
        num_workers=agent.num_workers, values=values, failure=failure, received=received, exit_codes=agent.exit_codes
    )


class WorkerTraceback(Exception):  # noqa: N818 - shown as a cause, like multiprocessing's RemoteTraceback
    """The traceback of a worker as text: frames cannot be sent to another process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, kw_only=True)
class Job:
    """Workers of this host; its subclasses say what they run."""

    workers: int | None = None  # the number of processes; None for one per GPU, or one if there is no GPU
    gpus_per_worker: int | None = None  # how many GPUs each sees; None divides all of them
    max_restarts: int = 0  # how often all are restarted after one has failed
    limits: Limits

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers={self.workers} was given, expected at least 1; say how many processes to start")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts} was given, expected 0 or more")

    def divide_this_host(self) -> Resources:
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        return divide_host(
            os.environ,
            workers=self.workers or len(gpus) or 1,
            cores=len(os.sched_getaffinity(0)),
            gpus=gpus,
            gpus_per_worker=self.gpus_per_worker,
        )

    def start(
        self,
        entrypoint: Callable[..., Any] | str,
        args: tuple[Any, ...],
        rendezvous: Rendezvous,
        setup: WorkerSetup,
        *,
        poll_s: float,
        on_restart: OnRestart,
    ) -> AgentResult:
        """Starts the workers and waits until all have ended."""
        spec = WorkerSpec(
            role="worker",
            local_world_size=setup.workers,
            entrypoint=entrypoint,
            args=args,
            rdzv_handler=rendezvous,
            max_restarts=self.max_restarts,
            monitor_interval=poll_s,
        )
        return run_agent(spec, rendezvous, setup, limits=self.limits, on_restart=on_restart)


@dataclass(frozen=True, kw_only=True)
class FunctionJob(Job):
    """How a function is to be run."""

    log_dir: Path | None = None  # the folder of the log files; None keeps none
    preloaded: tuple[str, ...] = ()  # modules that no worker has to import, besides torch and this package

    def run(self, fn: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """See ``lockstep.launch``."""
        resources = self.divide_this_host()
        with remove_empty_compiler_folder(), tempfile.TemporaryDirectory(prefix="lockstep-") as name:
            call = FunctionCall(
                payload=serialize_call(fn, args, kwargs),
                environment=dict(os.environ),
                resource_variables=frozenset(resources[0]),
                folder=Path(name),
                deadline=None if self.limits.timeout_s is None else time.monotonic() + self.limits.timeout_s,
            )
            try:
                result = self._run(call, resources)
            except ClusterError as error:
                self._add_stacks(error, call.folder, len(resources))
                raise
            if (failure := result.failure) is not None:
                cause = _load_error(failure, WorkerPaths(call.folder, failure.worker, failure.attempt).error)
                raise ClusterError(f"worker {failure.worker} of {result.num_workers} {failure.what}") from cause
        if result.received is not None:
            _raise_signal(result.received, result.exit_code)
        return deserialize(result.values[0])

    def _run(self, call: FunctionCall, resources: Resources) -> AgentResult:
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        multiprocessing.get_context(_START_METHOD).set_forkserver_preload([*_PRELOADED, *self.preloaded])
        rendezvous = Hosts().meet(lambda line: None)
        with closing(OutputForwarder(call.folder, logs=self.log_dir, sink=make_sink("chief"))) as forwarder:
            setup = WorkerSetup(forwarder, resources=resources, folder=call.folder, opened_by_agent=False)
            poll_s, on_restart = _FUNCTION_POLL_S, lambda failure, restarts: None
            return self.start(run_function, (call,), rendezvous, setup, poll_s=poll_s, on_restart=on_restart)

    def _add_stacks(self, error: ClusterError, folder: Path, workers: int) -> None:
        """Notes where each worker of the last attempt stood when its time was up."""
        for attempt in range(self.max_restarts, -1, -1):
            paths = {worker: WorkerPaths(folder, worker, attempt).stacks for worker in range(workers)}
            if stacks := read_stacks(paths):
                error.add_note(stacks)
                return


def _raise_signal(number: signal.Signals, exit_code: int) -> None:
    """Raises the signal that ended the launcher again, for whom it was meant: KeyboardInterrupt, or the process's end.

    After SIGTERM that nothing in this process handles, it ends with the exit code that the workers chose, if they did.
    """
    if number == signal.SIGTERM and signal.getsignal(number) == signal.SIG_DFL and 1 < exit_code < _FIRST_SIGNAL_CODE:
        raise SystemExit(exit_code)
    signal.raise_signal(number)
    raise ClusterError(f"the workers were ended because {number.name} came; start them again")


def _load_error(failure: WorkerFailure, path: Path) -> BaseException | None:
    """The worker's own exception with its traceback as text; the text alone if the exception cannot be rebuilt."""
    if failure.record is None:
        return None
    shown = WorkerTraceback(failure.record.traceback)
    try:
        error = deserialize(path.read_bytes())
    except Exception:  # noqa: BLE001 - whatever the user's class does when it is rebuilt; the text is enough
        return shown
    if not isinstance(error, BaseException):
        return shown
    error.__cause__ = shown
    return error


@dataclass(frozen=True, kw_only=True)
class Program:
    """What every worker runs."""

    target: str  # the path of a Python file, or the name of a module
    is_module: bool = False  # whether it is a module
    arguments: tuple[str, ...] = ()  # the program's own arguments

    def __post_init__(self) -> None:
        if not self.is_module and not Path(self.target).is_file():
            raise ConfigError(
                f"the script {self.target!r} does not exist, expected a Python file; a module is named after -m"
            )

    @property
    def job(self) -> str:
        """What distinguishes this program where launchers meet. Arguments may be secret, so they are hashed."""
        digest = hashlib.sha256("\0".join((str(self.is_module), *self.arguments)).encode()).hexdigest()
        return f"{self.target} with arguments {digest[:8]}"

    def command(self, folder: Path) -> tuple[str, ...]:
        """The command line of a worker after Python's name. The agent would substitute what follows a dollar sign."""
        kind = MODULE if self.is_module else SCRIPT
        arguments = ("-u", "-m", "lockstep.launch.worker", str(folder), kind, self.target, *self.arguments)
        return tuple(argument.replace("$", "$$") for argument in arguments)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is left to say when all workers of this host have ended."""

    exit_code: int  # for this process: 0, or that of the first worker that failed, as a shell shows it
    interrupted: bool = False  # whether Ctrl-C ended them
    line: str | None = None  # which worker failed first, and where its log is; None if none did
    last_output: str = ""  # that worker's traceback or its last lines of output; empty if it has been shown already
    worker: int = 0  # that worker's rank


@dataclass(frozen=True, kw_only=True)
class ProgramJob(Job):
    """How a program is to be run."""

    program: Program
    hosts: Hosts  # the hosts of the job, and how their launchers meet
    logs: Path  # the folder in which each run makes one of its own
    output: Literal["chief", "all", "none"] = "chief"  # whose output is shown

    def run(self, on_status: StatusCallback) -> Outcome:
        """Starts the workers and waits until all have ended; none outlives the call. ``on_status`` takes lines."""
        resources = self.divide_this_host()
        rendezvous = self.hosts.meet(on_status)
        folder = self.logs / rendezvous.get_run_id()
        folder.mkdir(parents=True, exist_ok=True)
        on_status(f"{_describe(resources)}; logs in {folder}/")
        return self._outcome(self._run(rendezvous, resources, folder, on_status), folder)

    def _run(
        self, rendezvous: Rendezvous, resources: Resources, folder: Path, on_status: StatusCallback
    ) -> AgentResult:
        def on_restart(failure: WorkerFailure | None, restarts: int) -> None:
            if failure is None:
                on_status("launchers came or went; starting the workers again")
            else:
                done = f"{restarts} of {self.max_restarts}"
                on_status(f"worker {failure.worker} {failure.what}; starting all again ({done})")

        with closing(OutputForwarder(folder, logs=folder, sink=make_sink(self.output))) as forwarder:
            setup = WorkerSetup(forwarder, resources=resources, folder=folder, opened_by_agent=True)
            command, poll_s = self.program.command(folder), _PROGRAM_POLL_S
            try:
                return self.start(sys.executable, command, rendezvous, setup, poll_s=poll_s, on_restart=on_restart)
            finally:
                # Killed workers leave semaphores in shared memory: their resource trackers were killed too.
                for path in Path("/dev/shm").glob(f"sem.{semaphore_prefix(folder)[1:]}-*"):
                    path.unlink(missing_ok=True)

    def _outcome(self, result: AgentResult, folder: Path) -> Outcome:
        if result.received is not None:
            return Outcome(exit_code=result.exit_code, interrupted=result.received == signal.SIGINT)
        if (failure := result.failure) is None:
            return Outcome(exit_code=0)
        log = WorkerPaths(folder, failure.worker, failure.attempt).log
        shown = self.output == "all" or (self.output == "chief" and failure.worker == 0)
        return Outcome(
            exit_code=failure.shell_code,
            line=f"worker {failure.worker} of {result.num_workers} {failure.what}; its log is {log}",
            last_output="" if shown else _last_output(failure, log),
            worker=failure.worker,
        )


def _describe(resources: Resources) -> str:
    workers = "1 worker" if len(resources) == 1 else f"{len(resources)} workers"
    if gpus := [each["CUDA_VISIBLE_DEVICES"] for each in resources if each.get("CUDA_VISIBLE_DEVICES")]:
        return f"{workers} on this host, on GPU {' | '.join(gpus)}"
    threads = resources[0].get("OMP_NUM_THREADS")
    each = "" if threads is None else f", {threads} thread{'s' * (threads != '1')} each"
    return f"{workers} on this host{each}"


def _last_output(failure: WorkerFailure, log: Path) -> str:
    if failure.record is not None:
        return failure.record.traceback
    lines = log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []
    return "".join(lines[-_LAST_LINES:])
