"""One configuration of a scaling run in a fresh process of its own: asked for here, answered there.

this process: run_trial --spawn--> fresh process: answer --Record or Failure through a pipe--> run_trial
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from lockstep import config, errors
from lockstep.errors import LockstepError, ReplicaError
from lockstep.parent_death import end_with_pipe
from lockstep.scaling.plan import Configuration
from lockstep.scaling.settings import ScalingSettings
from lockstep.scaling.training import Record, measure
from lockstep.scaling.works import build_work
from lockstep.strategies.mirrored import MirroredStrategy

TRIAL_LIMIT_S = 3600.0
_END_LIMIT_S = 15.0
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a fresh process is asked to measure. It travels there, so it is plain data.

    Args:
        recipe: its name.
        config: its config.
        devices: the devices to divide and take, in the notation of ``--devices``.
        configuration: the row of the table.
        settings: how many steps.
    """

    recipe: str
    config: Any
    devices: str
    configuration: Configuration
    settings: ScalingSettings


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was measured, and the warnings meanwhile."""

    record: Record
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error that a process ended with: the name of its class, and its message with its notes."""

    error: str
    message: str


def run_trial(trial: Trial) -> Answer:
    """Measures in a fresh process, and waits until that has ended.

    Raises:
        LockstepError: the process's own.
        ReplicaError: it failed in another way, ended before its time, or took longer than ``TRIAL_LIMIT_S``.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=answer, args=(trial, far), daemon=False)
    with closing(near):
        try:
            with _interrupts_kept_back():
                process.start()
            far.close()
            received = _receive(near, trial.configuration.name)
        except BaseException:
            _stop(process)
            raise
        _end(process)
    if isinstance(received, Failure):
        raise _error(received, trial.configuration.name)
    return received


def answer(trial: Trial, connection: Connection) -> None:
    """The life of the process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises, so that what is open is closed
    _end_with_parent()
    with closing(connection):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                record = _measured(trial)
            connection.send(Answer(record=record, warnings=tuple(str(warning.message) for warning in caught)))
        except Exception as error:  # noqa: BLE001 - not swallowed: the process that asked raises it
            connection.send(Failure(error=type(error).__name__, message=" ".join([str(error), *_notes(error)])))


def _measured(trial: Trial) -> Record:
    configuration, settings = trial.configuration, trial.settings
    torch.manual_seed(_SEED)
    if configuration.cores is not None:
        torch.set_num_threads(configuration.cores)
    devices = config.apply_device_request(config.parse_device_request(trial.devices))
    work = build_work(trial.recipe, trial.config, configuration.batch_size)
    with closing(MirroredStrategy(devices[: configuration.replicas], seed=_SEED)) as strategy:
        return measure(
            strategy,
            work,
            batch_size=configuration.batch_size,
            warm_up=settings.warm_up,
            timed_steps=settings.timed_steps(len(work.train)),
        )


@contextmanager
def _interrupts_kept_back() -> Iterator[None]:
    """Ctrl-C inside the block comes at its end, and never to a process started in it, which this one ends itself."""
    resource_tracker.ensure_running()  # it would let interrupts through again, if it were started inside the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Ends this process, and what it starts, when the one that asked has gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        os.setsid()
        end_with_pipe(parent.sentinel)


def _receive(connection: Connection, name: str) -> Answer | Failure:
    if not connection.poll(TRIAL_LIMIT_S):
        raise ReplicaError(
            f"{name!r} was not done after {TRIAL_LIMIT_S:.0f} s; give it fewer --steps or a smaller model"
        )
    try:
        received: Answer | Failure = connection.recv()
    except EOFError:
        raise ReplicaError(
            f"the process that measured {name!r} ended before its time, as it does when memory is short; "
            "lower --batch-size"
        ) from None
    return received


def _stop(process: SpawnProcess) -> None:
    """Ends a process before its time, if it was started."""
    if process.pid is not None:
        process.terminate()
        _end(process)


def _end(process: SpawnProcess) -> None:
    """Waits for the end of a process, and makes it where it does not come."""
    process.join(_END_LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _notes(error: BaseException) -> list[str]:
    return [f"({note})" for note in getattr(error, "__notes__", ())]


def _error(received: Failure, name: str) -> LockstepError:
    """The process's own error where it is one of ours, else one that says what it was."""
    kind = getattr(errors, received.error, None)
    if isinstance(kind, type) and issubclass(kind, LockstepError):
        return kind(f"{received.message} (while measuring {name!r})")
    return ReplicaError(f"measuring {name!r} failed with {received.error}: {received.message}")
