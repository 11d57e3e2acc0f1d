"""One run of an agent from its start to its end, and what is left to say about it. For functions and programs alike."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.errors import ClusterError
from lockstep.launch.agent import Agent, Limits, OnRestart
from lockstep.launch.failures import Failure
from lockstep.launch.logs import PipedLogs
from lockstep.launch.rendezvous import FixedRendezvous
from lockstep.launch.surroundings import signals_put_back, torch_is_quiet

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
