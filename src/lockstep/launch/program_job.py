"""A program in worker processes of this host: what ``lockstep run`` does."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

from lockstep.errors import ConfigError
from lockstep.launch.agent import Limits
from lockstep.launch.console import complain, reader_for
from lockstep.launch.failures import Failure
from lockstep.launch.job import Ending, run_agent
from lockstep.launch.logs import PipedLogs
from lockstep.launch.meeting import Meeting
from lockstep.launch.places import log_path, semaphore_prefix
from lockstep.launch.program_worker import MODULE, SCRIPT
from lockstep.launch.shares import share_host, visible_gpus
from lockstep.launch.streams import Streams
from lockstep.launch.telling import Tell

Output = Literal["chief", "all", "none"]
_POLL_S = 0.1
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
            monitor_interval=_POLL_S,
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
        words = ("-u", "-m", "lockstep.launch.program_worker", str(folder), kind, self.program.target)
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
