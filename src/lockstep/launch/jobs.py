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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec

from lockstep.checks import MOST_AT_ONCE, check_number
from lockstep.cluster.local import OWN_GPUS
from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.agent import START_METHOD, Agent, Limits, OnRestart, WorkerSetup
from lockstep.launch.elastic_agent import ElasticAgent
from lockstep.launch.elastic_meeting import Elastic, ElasticMeeting
from lockstep.launch.failures import FailureRecord, WorkerFailure
from lockstep.launch.hang_dump import read_stacks
from lockstep.launch.output import AllOutput, ChiefOutput, OutputForwarder, StatusCallback
from lockstep.launch.rendezvous import Hosts, Rendezvous
from lockstep.launch.serialization import deserialize, serialize_call
from lockstep.launch.side_effects import remove_empty_compiler_folder
from lockstep.launch.worker import (
    MODULE,
    SCRIPT,
    FunctionCall,
    WorkerPaths,
    run_function,
    semaphore_prefix,
)

# Workers are forked from a process that has these, so that not each of them imports torch for a second or two.
_PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "lockstep", "lockstep.launch.worker")
_POLL_S = 0.05
_FIRST_SIGNAL_CODE = 128  # exit codes from here on stand for signals
_LAST_LINES = 10

Resources = Sequence[Mapping[str, str]]
"""Environment variables of each worker of this host for its cores and GPUs."""


def visible_gpus(environment: Mapping[str, str], present: int) -> tuple[str, ...]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them; torch sees ``present``."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(str(number) for number in range(present))
    # CUDA ignores names after the first invalid one, so torch may see fewer GPUs than are listed.
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
    gpus_each = _gpus_each(len(gpus), workers, gpus_per_worker)
    shares = [gpus[worker * gpus_each : (worker + 1) * gpus_each] for worker in range(workers)]
    gpu_variables = {"LOCAL_RANK": "0", OWN_GPUS: "1"} if gpus_each else {}
    return tuple({**threads, "CUDA_VISIBLE_DEVICES": ",".join(share), **gpu_variables} for share in shares)


def _gpus_each(gpus: int, workers: int, gpus_per_worker: int | None) -> int:
    gpus_present = "is 1 GPU" if gpus == 1 else f"are {gpus} GPUs"
    if gpus_per_worker is None and workers > gpus:
        raise ConfigError(
            f"{workers} workers were given but there {gpus_present}, expected one GPU for each worker because NCCL "
            f"takes one worker per GPU; start {gpus} workers, or give 0 GPUs per worker to train on the CPU"
        )
    share = gpus // workers if gpus_per_worker is None else gpus_per_worker
    if share < 0 or share * workers > gpus:
        raise ConfigError(
            f"{share} GPUs were given for each of {workers} workers but there {gpus_present}; start fewer workers or "
            "give each fewer GPUs"
        )
    return share


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
        check_number("workers", self.workers, least=1, most=MOST_AT_ONCE, whole=True)
        check_number("gpus_per_worker", self.gpus_per_worker, least=0, whole=True)
        check_number("max_restarts", self.max_restarts, least=0, whole=True, optional=False)

    def divide_this_host(self) -> Resources:
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        return divide_host(
            os.environ,
            workers=self.workers or len(gpus) or 1,
            cores=len(os.sched_getaffinity(0)),
            gpus=gpus,
            gpus_per_worker=self.gpus_per_worker,
        )

    def run_workers(
        self,
        entrypoint: Callable[..., Any] | str,
        args: tuple[Any, ...],
        rendezvous: Rendezvous | ElasticMeeting,
        setup: WorkerSetup,
        on_restart: OnRestart = lambda failure, restarts: None,
    ) -> Agent:
        """Starts the workers and waits until all have ended; the agent says how they did."""
        spec = WorkerSpec(
            role="worker",
            local_world_size=setup.workers,
            entrypoint=entrypoint,
            args=args,
            rdzv_handler=rendezvous,
            max_restarts=self.max_restarts,
            monitor_interval=_POLL_S,
        )
        if isinstance(rendezvous, ElasticMeeting):
            agent: Agent = ElasticAgent(spec, setup, limits=self.limits, meeting=rendezvous)
        else:
            agent = Agent(spec, setup, limits=self.limits, on_restart=on_restart)
        agent.run_to_end(rendezvous)
        return agent


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

    def _run(self, call: FunctionCall, resources: Resources) -> Agent:
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        multiprocessing.get_context(START_METHOD).set_forkserver_preload([*_PRELOADED, *self.preloaded])
        rendezvous = Hosts().meet(lambda line: None)
        with closing(OutputForwarder(logs=self.log_dir, sink=ChiefOutput())) as forwarder:
            setup = WorkerSetup(forwarder, resources=resources, folder=call.folder)
            return self.run_workers(run_function, (call,), rendezvous, setup)

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
    # test_after_sigterm_and_a_backup_the_launcher_ends_with_75_too: a scheduler starts a job again by that code, which
    # a death by SIGTERM would hide.
    if number == signal.SIGTERM and signal.getsignal(number) == signal.SIG_DFL and 1 < exit_code < _FIRST_SIGNAL_CODE:
        raise SystemExit(exit_code)
    signal.raise_signal(number)
    raise ClusterError(f"the workers were ended because {number.name} came; start them again")


def _load_error(failure: WorkerFailure, path: Path) -> BaseException | None:
    """The worker's own exception with its traceback as text; the text alone if the exception cannot be rebuilt."""
    if failure.record is None:
        return None
    traceback = WorkerTraceback(failure.record.traceback)
    try:
        error = deserialize(path.read_bytes())
    except Exception:  # noqa: BLE001 - whatever the user's class does when it is rebuilt; the text is enough
        return traceback
    if not isinstance(error, BaseException):
        return traceback
    error.__cause__ = traceback
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
        # torch 2.13, ``macros.substitute``: a ``string.Template``, whose "$$" stands for a dollar sign.
        return tuple(argument.replace("$", "$$") for argument in arguments)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a program's workers on this host: the exit code, and lines for the person who started them."""

    exit_code: int  # for this process: 0, or that of the first worker that failed, as a shell shows it
    interrupted: bool = False  # whether Ctrl-C ended them
    lines: tuple[str, ...] = ()  # the last output of the worker that failed first, if not shown yet; how it failed


@dataclass(frozen=True, kw_only=True)
class ProgramJob(Job):
    """How a program is to be run."""

    program: Program
    hosts: Hosts  # the hosts of the job, and how their launchers meet
    elastic: Elastic | None = None  # how far the number of workers may change; None for not at all
    logs: Path  # the folder in which each run makes one of its own
    output: Literal["chief", "all"] = "chief"  # whose output is shown

    def run(self, on_status: StatusCallback) -> Outcome:
        """Starts the workers and waits until all have ended; none outlives the call. ``on_status`` takes lines."""
        resources = self.divide_this_host()
        rendezvous: Rendezvous | ElasticMeeting
        if self.elastic is None:
            rendezvous = self.hosts.meet(on_status)
        else:
            rendezvous = ElasticMeeting(self.hosts, self.elastic, max_restarts=self.max_restarts, report=on_status)
        folder = self.logs / rendezvous.get_run_id()
        folder.mkdir(parents=True, exist_ok=True)
        on_status(f"{_describe(resources)}; logs in {folder}/")
        return self._outcome(self._run(rendezvous, resources, folder, on_status), folder)

    def _run(
        self, rendezvous: Rendezvous | ElasticMeeting, resources: Resources, folder: Path, on_status: StatusCallback
    ) -> Agent:
        def on_restart(failure: WorkerFailure | None, restarts: int) -> None:
            what = "a worker failed" if failure is None else f"worker {failure.worker} {failure.what}"
            on_status(f"{what}; starting all again ({restarts} of {self.max_restarts})")

        sink = AllOutput() if self.output == "all" else ChiefOutput()
        with closing(OutputForwarder(logs=folder, sink=sink)) as forwarder:
            setup = WorkerSetup(forwarder, resources=resources, folder=folder)
            try:
                return self.run_workers(sys.executable, self.program.command(folder), rendezvous, setup, on_restart)
            finally:
                # Each is a few bytes that stay until the machine restarts;
                # test_a_killed_workers_semaphores_do_not_stay_in_shared_memory.
                # Killed workers leave semaphores in shared memory: their resource trackers were killed too.
                for path in Path("/dev/shm").glob(f"sem.{semaphore_prefix(folder)[1:]}-*"):
                    path.unlink(missing_ok=True)

    def _outcome(self, result: Agent, folder: Path) -> Outcome:
        if result.received is not None:
            return Outcome(exit_code=result.exit_code, interrupted=result.received == signal.SIGINT)
        if (failure := result.failure) is None:
            return Outcome(exit_code=0)
        # One mistake fails in all workers at nearly the same time; the person has already read the chief's traceback.
        if self.output == "chief" and _chief_failed_alike(failure, folder):
            failure = replace(failure, worker=0)
        log = WorkerPaths(folder, failure.worker, failure.attempt).log
        chiefs = WorkerPaths(folder, 0, failure.attempt).log
        printed = self.output == "all" or failure.worker == 0 or _ended_alike(log, chiefs)
        output = "" if printed else _last_output(failure, log).rstrip("\n")
        lines = (f"the last output of worker {failure.worker}:\n{output}",) if output else ()
        ending = f"worker {failure.worker} of {result.num_workers} {failure.what_below_traceback}; its log is {log}"
        return Outcome(exit_code=failure.shell_code, lines=(*lines, f"error: {ending}"))


def _chief_failed_alike(failure: WorkerFailure, folder: Path) -> bool:
    """Whether the chief, whose output is shown, failed with the same error at the same place."""
    chief = FailureRecord.read(WorkerPaths(folder, 0, failure.attempt).failure)
    return chief is not None and failure.record is not None and chief.origin == failure.record.origin


def _ended_alike(log: Path, chiefs: Path) -> bool:
    """Whether the last lines that a worker and the chief have printed are equal, as one-line errors of commands are."""
    ends = [path.read_text(errors="replace").rstrip().rpartition("\n")[2] for path in (log, chiefs) if path.exists()]
    return len(ends) == 2 and bool(ends[0]) and ends[0] == ends[1]


def _describe(resources: Resources) -> str:
    workers = "1 worker" if len(resources) == 1 else f"{len(resources)} workers"
    if gpus := [variables["CUDA_VISIBLE_DEVICES"] for variables in resources if variables.get("CUDA_VISIBLE_DEVICES")]:
        return f"{workers} on this host, on GPU {' | '.join(gpus)}"
    threads = resources[0].get("OMP_NUM_THREADS")
    threads_each = "" if threads is None else f", {threads} thread{'s' * (threads != '1')} each"
    return f"{workers} on this host{threads_each}"


def _last_output(failure: WorkerFailure, log: Path) -> str:
    if failure.record is not None:
        return failure.record.traceback
    lines = log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []
    return "".join(lines[-_LAST_LINES:])
