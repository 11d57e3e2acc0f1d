"""torch's elastic agent for the workers of this host, with a time limit and the time at which each worker ended.

Rendezvous, ranks, environment, starting, watching and restarting are torch's. This module adds the time at which each
worker ended, a time limit for the job, a way of stopping that leaves workers time to save, and pipes for their output.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext

from lockstep import console
from lockstep.checks import check_seconds
from lockstep.errors import ClusterError
from lockstep.launch.failures import FailureRecord, WorkerFailure, first_failure, worker_failures
from lockstep.launch.output import OutputForwarder
from lockstep.launch.rendezvous import LauncherRendezvous
from lockstep.launch.side_effects import handle_sigterm_once, hide_main, restore_signal_handlers, silence_torch_launcher
from lockstep.launch.worker import GUARD_VARIABLE, OUTPUT_VARIABLE, OWN_VARIABLE, WorkerPaths
from lockstep.parent_death import ParentDeathGuard

START_METHOD = "forkserver"
_POLL_S = 0.02
# torch takes the result of a process that has ended at its next look, so a missing one is believed only after a while.
_LOST_RESULT_S = 1.0
# The agent's own look at the deadline comes first, because only it can say what happened in one sentence.
_LATE_S = 1.0
_INTERRUPT_S = 3.0  # that workers get to end after Ctrl-C

OnRestart = Callable[[WorkerFailure | None, int], None]
"""Called before all workers are restarted, with the failure that is the reason and how often it was done."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the agent waits."""

    timeout_s: float | None = None  # seconds that the workers may take; None for no limit
    stop_s: float = 30.0  # seconds that they get to save after SIGTERM before they are killed

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_seconds("stop_s", self.stop_s)


class WorkerSetup(LogsSpecs):
    """What the agent needs to start workers: pipes for their output, their resources, and what ends them all.

    torch's agent asks for the logs of the workers just before it starts them, at every attempt. This is the only place
    where it lets a caller add environment variables for one worker; torch's own class does that here too.
    ``resources`` are those variables for cores and GPUs.

    Attributes:
        slots: whose resources each worker gets, by local rank.
    """

    def __init__(self, forwarder: OutputForwarder, *, resources: Sequence[Mapping[str, str]], folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._forwarder, self._resources = forwarder, resources
        self.slots: Sequence[int] = range(len(resources))
        self._guard: ParentDeathGuard | None = None

    @property
    def workers(self) -> int:
        return len(self._resources)

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Opens the pipes of the workers that are about to start, and adds to their variables, by local rank."""
        # A guard kills once, so every attempt has its own.
        self._guard = ParentDeathGuard()
        self._forwarder.close_pipes()  # the workers of the last attempt have ended
        for local, variables in envs.items():
            worker, attempt = int(variables["RANK"]), int(variables["TORCHELASTIC_RESTART_COUNT"])
            pipes = self._forwarder.open(worker, attempt)
            variables.update(self._resources[self.slots[local]])
            if (columns := console.width()) is not None:
                variables[console.COLUMNS_VARIABLE] = str(columns)
            if self._forwarder.shows_pieces(worker) and console.shows_bar():
                variables[console.BAR_VARIABLE] = "1"
            # The process that functions are forked from may have other variables than this one, so a worker is told
            # which are its own (``worker._take_environment``).
            variables[OWN_VARIABLE] = " ".join(variables)
            variables[OUTPUT_VARIABLE] = f"{pipes['out']} {pipes['err']}"
            variables[GUARD_VARIABLE] = self._guard.path
        # torch would open files under these names with mode "w" in each attempt; pipes show lines as they come, and
        # keep the order of standard output and error.
        none = dict.fromkeys(envs, "")  # workers open the pipes themselves
        return LogsDest(none, none, {}, {}, none, "", "")

    def kill_all(self) -> None:
        """Kills what is left of the workers of the last attempt and of the processes that they started."""
        if self._guard is not None:
            self._guard.kill()


class ExitMonitor:
    """Notes when processes end, within a millisecond, in a thread of its own. Its maker calls ``close``.

    Args:
        pids: of the processes, by a number of their own.
        on_end: called in the thread when one has ended, with the ids of those that still run.
    """

    def __init__(self, pids: Mapping[int, int], on_end: Callable[[list[int]], None] = lambda _: None) -> None:
        self._pids, self._on_end = pids, on_end
        self._ended_ns: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        for local, pid in pids.items():
            try:
                # The descriptor stands for this very process: its number may be given to another process once torch has
                # waited for it.
                self._handles[os.pidfd_open(pid)] = local
            except ProcessLookupError:
                self._ended_ns[local] = time.monotonic_ns()
        self._thread = threading.Thread(target=self._watch, name="lockstep-launch-exits", daemon=True)
        self._thread.start()

    @property
    def ended_ns(self) -> dict[int, int]:
        """When each process that has ended did, by ``time.monotonic_ns``."""
        return dict(self._ended_ns)

    def close(self) -> None:
        os.close(self._wake_write)
        self._thread.join()
        os.close(self._wake_read)
        for handle in self._handles:
            os.close(handle)

    def _watch(self) -> None:
        poll = select.poll()
        for handle in (*self._handles, self._wake_read):
            poll.register(handle, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == self._wake_read:
                    return
                self._ended_ns[self._handles[ready]] = time.monotonic_ns()
                poll.unregister(ready)
                self._on_end([pid for local, pid in self._pids.items() if local not in self._ended_ns])


class Agent(LocalElasticAgent):
    """One run of the workers of this host.

    Attributes:
        values: what functions returned, by worker.
        failure: the first failure of the last attempt; None if none failed.
        received: the signal that ended the launcher; None if none did.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        setup: WorkerSetup,
        *,
        limits: Limits,
        on_restart: OnRestart = lambda failure, restarts: None,
    ) -> None:
        super().__init__(spec, setup, start_method=START_METHOD)
        self.values: Mapping[int, Any] = {}
        self.failure: WorkerFailure | None = None
        self.received: signal.Signals | None = None
        self._setup = setup
        self._limits = limits
        self._deadline = None if limits.timeout_s is None else time.monotonic() + limits.timeout_s
        self._on_restart = on_restart
        self._exits: ExitMonitor | None = None
        self._late_timer: threading.Timer | None = None
        self._was_late = False
        self._ended_ns: dict[int, int] = {}
        self._attempt = -1  # not started yet
        self._ignored_signals: list[signal.Signals] = []

    def run_to_end(self, rendezvous: LauncherRendezvous) -> None:
        """Starts the workers and waits until all have ended; none outlives the call.

        Raises ClusterError if they took longer than the limits allow, or those of another host have failed for good.
        """
        with silence_torch_launcher(), restore_signal_handlers() as self._ignored_signals:
            try:
                result = self.run()
                if result is not None and result.state == WorkerState.SUCCEEDED:
                    self.values = result.return_values
                    rendezvous.finish()  # which raises if the workers of another host have failed
                elif result is not None:
                    self.failure = self.first_failure()
                    if self.failure is None:
                        raise ClusterError("the workers of this host were ended and none had failed; start them again")
                    cause = f"worker {self.failure.worker} of {self.num_workers} {self.failure.what}"
                    rendezvous.give_up(cause, self.pass_exit_barrier)
            except SignalException as error:
                self.received = error.sigval
            finally:
                self.kill()
                rendezvous.shutdown()

    @property
    def exit_code(self) -> int:
        """The workers' exit code after a signal ended the launcher, as a shell shows it; 0 if none failed.

        It is the first code that a worker chose itself, as ``BackupAndRestore`` does, else that of a signal. 1 comes
        last, because workers end with it that have lost others. If no worker had been started, it is the launcher's own
        signal: a scheduler would take 0 for a job that is done.
        """
        if self.received is not None and not self.exit_codes:
            return 128 + self.received
        codes = (code for code in self.exit_codes.values() if code)
        # test_a_code_that_a_worker_chose_comes_before_the_signal_that_ended_another: a worker that saved ends with 75,
        # while one that was slower is killed.
        first = min(codes, key=lambda code: (code == 1, code < 0), default=0)
        return 128 - first if first < 0 else first

    @property
    def num_workers(self) -> int:
        """The number of workers of all hosts; 0 before the launchers have met."""
        workers = self._worker_group.workers
        return int(workers[0].world_size) if self._attempt >= 0 and workers else 0

    @property
    def exit_codes(self) -> dict[int, int | None]:
        """The exit code of every worker of this host in the last attempt; None for one that still runs."""
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            return {local: handler.proc.poll() for local, handler in context.subprocess_handlers.items()}
        if isinstance(context, MultiprocessContext) and context._pc is not None:
            return {local: process.exitcode for local, process in enumerate(context._pc.processes)}
        return {}

    def first_failure(self) -> WorkerFailure | None:
        """The failure of the last attempt that came before all others on this host."""
        return first_failure(self.failures())

    def failures(self) -> list[WorkerFailure]:
        """How the workers of the last attempt ended that this launcher has not ended."""
        codes, attempt = self.exit_codes, self._attempt
        workers = self._worker_group.workers
        first = int(workers[0].global_rank) if workers else 0
        paths = {local: WorkerPaths(self._setup.folder, first + local, attempt).failure for local in codes}
        records = {local: FailureRecord.read(path) for local, path in paths.items()}
        return worker_failures(codes, self._ended_ns, records, first_worker=first, attempt=attempt)

    def waits_after_failure(self) -> bool:
        """Whether a worker failed and has not ended in the time that it has to save: Python waits for its threads.

        It goes on telling the others that it lives, and they would wait for it.
        """
        latest_ns = time.monotonic_ns() - self._limits.stop_s * 1e9
        return any(failure.exit_code is None and failure.at_ns < latest_ns for failure in self.failures())

    def pass_exit_barrier(self) -> None:
        """Releases the launchers of other hosts that wait for this host's workers to finish."""
        # torch 2.13 offers no way to pass this barrier for others: ``_exit_barrier`` marks this launcher as arrived and
        # waits, here for a moment only.
        self._exit_barrier_timeout = 0.1
        wait: Callable[[], None] = self._exit_barrier
        wait()

    def kill(self) -> None:
        """Kills what is still running."""
        self._stop_watching()
        self._setup.kill_all()
        if any(code is None for code in self.exit_codes.values()):
            super()._shutdown(signal.SIGKILL, 1)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop_watching()
        self._ended_ns = {}
        self._attempt = self._restarts()
        with hide_main():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        handle_sigterm_once(self._ignored_signals)
        self._exits = ExitMonitor(ids, self._on_worker_end)
        if self._deadline is not None:
            # torch 2.13, ``MultiprocessContext._poll``: once all results are there, it calls ``join()`` in a loop
            # without a time limit.
            # While the processes of functions end, torch waits for them and looks at nothing else.
            self._late_timer = threading.Timer(self._deadline - time.monotonic() + _LATE_S, self._kill_late)
            self._late_timer.start()
        return ids

    def _on_worker_end(self, running: list[int]) -> None:
        """Continues stopped workers, in another thread: torch waits half a minute for each to see its SIGTERM."""
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._on_restart(self.first_failure(), self._restarts())
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._exits is not None:
            self._ended_ns = self._exits.ended_ns  # before torch ends the others
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY or self._was_late:
            self._check_deadline()
        if result.state == WorkerState.HEALTHY and (self._lost_a_result() or self.waits_after_failure()):
            return RunResult(state=WorkerState.FAILED)
        # The thread of ``ExitMonitor`` and torch's poll race for the same exit; a failure without a time would be
        # missing from ``failures``.
        for worker in result.failures:  # in case torch saw one first
            local = worker - int(worker_group.workers[0].global_rank)
            self._ended_ns.setdefault(local, time.monotonic_ns())
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._stop_watching()
        limit_s = _INTERRUPT_S if death_sig == signal.SIGINT else self._limits.stop_s
        codes = self.exit_codes
        pids = dict(self._pcontext.pids()) if self._pcontext is not None and codes else {}
        _signal_and_wait([pid for local, pid in pids.items() if codes.get(local) is None], death_sig, limit_s)
        # The workers have had their time above: torch only has to end what is left, and would wait for it up to half a
        # minute.
        super()._shutdown(death_sig, 1)
        self._setup.kill_all()  # what the workers had started

    def _restarts(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _kill_late(self) -> None:
        self._was_late = True
        self._setup.kill_all()

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise ClusterError(
                f"the {self.num_workers} workers had not ended after {self._limits.timeout_s:g} s and were ended;"
                " give them more time with timeout_s, or None for no limit"
            )

    def _lost_a_result(self) -> bool:
        """Whether a function's process ended a while ago without a result, for which torch would wait forever."""
        # test_a_worker_that_gives_no_result_is_named: a function that calls ``os._exit(0)`` leaves no result, and torch
        # 2.13's ``_poll`` ends only when it has one of every worker.
        if not isinstance(self._pcontext, MultiprocessContext):
            return False
        oldest = min(self._ended_ns.values(), default=time.monotonic_ns())
        return time.monotonic_ns() - oldest > _LOST_RESULT_S * 1e9

    def _stop_watching(self) -> None:
        if self._exits is not None:
            self._exits.close()
            self._exits = None
        if self._late_timer is not None:
            self._late_timer.cancel()
            self._late_timer.join()
            self._late_timer = None


def _signal_and_wait(pids: list[int], number: signal.Signals, timeout_s: float) -> None:
    """Sends a signal to the workers themselves and waits until they end. One that is stopped goes on, to see it.

    torch sends it to their process groups, which would end a DataLoader's processes while a worker saves.
    """
    for pid in pids:
        try:
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
    exits = ExitMonitor(dict(enumerate(pids)))
    until = time.monotonic() + timeout_s
    wait = threading.Event()
    while len(exits.ended_ns) < len(pids) and time.monotonic() < until:
        wait.wait(_POLL_S)
    exits.close()
