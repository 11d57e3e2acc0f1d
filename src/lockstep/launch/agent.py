"""torch's elastic agent for the workers of this host, made quiet, impatient and exact about who failed first.

Rendezvous, ranks, environment, starting, watching and restarting are torch's. Added: the time at which each worker
ended, a limit on the whole, a way of stopping that leaves a worker time to save, and no torch banners.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext

from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.failures import Failure, Record, first_failure
from lockstep.launch.guards import hear_sigterm_once, main_is_not_run_again
from lockstep.launch.output import Streams
from lockstep.launch.run_paths import LIFELINE, record_path
from lockstep.parent_death import Lifeline


class Deaths:
    """Watches processes until they have ended, in a thread of its own. Whoever made it calls ``close``.

    Args:
        pids: the processes, by their local number.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._ended_ns: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        for local, pid in pids.items():
            self._open(local, pid)
        self._thread = threading.Thread(target=self._watch, name="lockstep-launch-deaths", daemon=True)
        self._thread.start()

    @property
    def ended_ns(self) -> dict[int, int]:
        """When each that has ended did, by ``time.monotonic_ns``, to this moment."""
        return dict(self._ended_ns)

    def close(self) -> None:
        """Ends the thread."""
        os.close(self._wake_write)
        self._thread.join()
        os.close(self._wake_read)
        for handle in self._handles:
            os.close(handle)

    def _open(self, local: int, pid: int) -> None:
        try:
            self._handles[os.pidfd_open(pid)] = local
        except ProcessLookupError:
            self._ended_ns[local] = time.monotonic_ns()

    def _watch(self) -> None:
        poll = select.poll()
        for each in (*self._handles, self._wake_read):
            poll.register(each, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == self._wake_read:
                    return
                self._ended_ns[self._handles[ready]] = time.monotonic_ns()
                poll.unregister(ready)


class PipedLogs(LogsSpecs):
    """Opens pipes for every worker, at every attempt, just before the agent starts it. The agent calls ``end_all``.

    Args:
        streams: reads them.
        shares: variables for each worker of this host beside the agent's: its share of the cores and GPUs.
        folder: of the run.
        opened_by_agent: the agent opens the pipes for the worker; else the worker does, by their names.
    """

    def __init__(
        self, streams: Streams, *, shares: Sequence[Mapping[str, str]], folder: Path, opened_by_agent: bool
    ) -> None:
        super().__init__()
        self._streams, self._shares, self._folder, self._opened_by_agent = streams, shares, folder, opened_by_agent
        self._lifeline: Lifeline | None = None

    @property
    def root_log_dir(self) -> str:
        """The folder of the run."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Opens the pipes of the workers that are about to start, by local number, and adds to their variables.

        torch's own class adds a variable in this place too; the agent offers no other.
        """
        self._lifeline = Lifeline()
        outs, errs = {}, {}
        for local, variables in envs.items():
            worker, attempt = int(variables["RANK"]), int(variables["TORCHELASTIC_RESTART_COUNT"])
            channel = self._streams.open(worker, attempt, named=not self._opened_by_agent)
            outs[local], errs[local] = (channel.out, channel.err) if self._opened_by_agent else ("", "")
            variables.update({**self._shares[local], LIFELINE: self._lifeline.path})
        return LogsDest(outs, errs, {}, {}, dict.fromkeys(envs, ""), "", "")

    def end_all(self) -> None:
        """Ends, at once, what is left of the workers of the last attempt and of the processes that they started."""
        if self._lifeline is not None:
            self._lifeline.cut()


_POLL_S = 0.02
_LOST_RESULT_S = 1.0
_LATE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the agent waits.

    Args:
        timeout_s: seconds that the workers may take; None for as long as they like.
        stop_s: seconds that they get after SIGTERM, to save what they have, before they are killed.
        interrupt_s: seconds that they get after Ctrl-C.
    """

    timeout_s: float | None = None
    stop_s: float = 30.0
    interrupt_s: float = 3.0

    def __post_init__(self) -> None:
        for name in ("timeout_s", "stop_s", "interrupt_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} was given, expected seconds above 0")


OnRestart = Callable[[Failure | None, int], None]
"""Told about the failure after which all workers are started again, and how often that has been done."""


class Agent(LocalElasticAgent):
    """One run of the workers of this host.

    Args:
        spec: what to start, how often, and how the launchers meet.
        logs: where the workers' output goes, in whose folder they write down how they failed, and what ends them.
        start_method: of multiprocessing, for functions.
        limits: how long to wait.
        on_restart: told before workers are started again.
    """

    def __init__(
        self, spec: WorkerSpec, logs: PipedLogs, *, start_method: str, limits: Limits, on_restart: OnRestart
    ) -> None:
        super().__init__(spec, logs, start_method=start_method)
        self._logs = logs
        self._folder = Path(logs.root_log_dir)
        self._limits = limits
        self._until = None if limits.timeout_s is None else time.monotonic() + limits.timeout_s
        self._on_restart = on_restart
        self._deaths: Deaths | None = None
        self._late: threading.Timer | None = None
        self._were_late = False
        self._ended_ns: dict[int, int] = {}
        self._attempt = -1  # not started yet

    @property
    def num_workers(self) -> int:
        """The workers of all hosts; 0 before they have met."""
        workers = self._worker_group.workers
        return int(workers[0].world_size) if self._attempt >= 0 else 0

    @property
    def exit_codes(self) -> dict[int, int | None]:
        """The exit code of every worker of this host in the last attempt; None for one that still runs."""
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            return {local: handler.proc.poll() for local, handler in context.subprocess_handlers.items()}
        if isinstance(context, MultiprocessContext) and context._pc is not None:
            return {local: process.exitcode for local, process in enumerate(context._pc.processes)}
        return {}

    def first_failure(self) -> Failure | None:
        """The failure of the last attempt that came before all others on this host."""
        workers = self._worker_group.workers
        first = int(workers[0].global_rank) if workers else 0
        attempt = self._attempt
        records = {local: Record.read(record_path(self._folder, first + local, attempt)) for local in self.exit_codes}
        return first_failure(self.exit_codes, self._ended_ns, records, first_worker=first, attempt=attempt)

    def pass_exit_barrier(self) -> None:
        """Lets the launchers of other hosts go, whose workers have finished and who wait for this one's."""
        self._exit_barrier_timeout = 0.1
        wait: Callable[[], None] = self._exit_barrier
        wait()

    def kill(self) -> None:
        """Ends what is still running, at once."""
        self._stop_watching()
        self._logs.end_all()
        if any(code is None for code in self.exit_codes.values()):
            super()._shutdown(signal.SIGKILL, 1)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop_watching()
        self._ended_ns = {}
        self._attempt = self._restarts()
        with main_is_not_run_again():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        hear_sigterm_once()
        self._deaths = Deaths(ids)
        if self._until is not None:
            # While the last processes of functions end, torch waits for them and looks at nothing else.
            self._late = threading.Timer(self._until - time.monotonic() + _LATE_S, self._end_late)
            self._late.start()
        return ids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        failed = worker_group.state != WorkerState.HEALTHY  # else launchers joined or left
        self._on_restart(self.first_failure() if failed else None, self._restarts())
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._deaths is not None:
            self._ended_ns = self._deaths.ended_ns  # before torch ends the others
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY or self._were_late:
            self._check_time()
        if result.state == WorkerState.HEALTHY and self._lost_a_result():
            return RunResult(state=WorkerState.FAILED)
        for worker in result.failures:  # should torch have been the first to see it
            local = worker - int(worker_group.workers[0].global_rank)
            self._ended_ns.setdefault(local, time.monotonic_ns())
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._stop_watching()
        limit_s = self._limits.interrupt_s if death_sig == signal.SIGINT else self._limits.stop_s
        running = [pid for local, pid in self._pids().items() if self.exit_codes.get(local) is None]
        _ask_to_end(running, death_sig, limit_s)
        super()._shutdown(death_sig, 1)
        self._close_files()
        self._logs.end_all()  # what the workers had started

    def _close_files(self) -> None:
        """Closes the files that torch has opened for the output of workers; it does so for those alone that it ends."""
        if isinstance(self._pcontext, SubprocessContext):
            for handler in self._pcontext.subprocess_handlers.values():
                for file in (handler._stdout, handler._stderr):
                    if file is not None:
                        file.close()

    def _pids(self) -> dict[int, int]:
        return dict(self._pcontext.pids()) if self._pcontext is not None and self.exit_codes else {}

    def _restarts(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _end_late(self) -> None:
        self._were_late = True
        self._logs.end_all()

    def _check_time(self) -> None:
        if self._until is not None and time.monotonic() > self._until:
            raise ClusterError(
                f"the {self.num_workers} workers had not ended after {self._limits.timeout_s:g} s and were ended;"
                " give them more time with timeout_s, or None for no limit"
            )

    def _lost_a_result(self) -> bool:
        """Whether a function's process has been gone for a while without a result, which torch would wait for."""
        if not isinstance(self._pcontext, MultiprocessContext):
            return False
        oldest = min(self._ended_ns.values(), default=time.monotonic_ns())
        return time.monotonic_ns() - oldest > _LOST_RESULT_S * 1e9

    def _stop_watching(self) -> None:
        if self._deaths is not None:
            self._deaths.close()
            self._deaths = None
        if self._late is not None:
            self._late.cancel()
            self._late.join()
            self._late = None


def _ask_to_end(pids: list[int], sign: signal.Signals, limit_s: float) -> None:
    """Sends the signal to the workers alone and waits for them.

    torch sends it to their whole process groups, which would end a DataLoader's processes under a worker that saves.
    """
    for pid in pids:
        try:
            os.kill(pid, sign)
        except ProcessLookupError:
            continue
    deaths = Deaths(dict(enumerate(pids)))
    until = time.monotonic() + limit_s
    wait = threading.Event()
    while len(deaths.ended_ns) < len(pids) and time.monotonic() < until:
        wait.wait(_POLL_S)
    deaths.close()
