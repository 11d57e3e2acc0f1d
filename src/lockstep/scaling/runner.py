"""Runs ``lockstep bench scaling``: every configuration in a fresh process, in turn, for several rounds. Prints nothing.

    round 1: A B C    round 2: A B C    ...    speed-ups compare configurations of the same round

A machine that slows down in the middle of a run thus slows down all configurations.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lockstep import config, errors
from lockstep.config import LogicalDevice
from lockstep.errors import DataError, LockstepError, ReplicaError
from lockstep.parent_death import die_with_parent
from lockstep.scaling.machine import Machine, this_machine
from lockstep.scaling.measure import Record, StepTimes, mean_times, measure
from lockstep.scaling.plan import Configuration, Hardware, ScalingSettings, largest_batch, plan
from lockstep.scaling.recipes import build_work, find_recipe
from lockstep.strategies.mirrored import MirroredStrategy

TRIAL_LIMIT_S = 3600.0
_END_LIMIT_S = 15.0
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a fresh process measures. It is pickled, so it is plain data."""

    recipe: str  # name of the recipe
    config: Any  # config of the recipe
    devices: str  # logical devices, in the notation of ``--devices``
    configuration: Configuration  # replicas, batch size and cores: a row of the table
    settings: ScalingSettings  # how many steps to measure


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a process measured, and the warnings that it issued."""

    record: Record
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error that a process ended with: the name of its class, and its message with its notes."""

    error: str
    message: str


def run_trial(trial: Trial) -> Answer:
    """Measures in a fresh process and waits until it has ended.

    Raises:
        LockstepError: the process raised it.
        ReplicaError: the process failed in another way, died, or took longer than ``TRIAL_LIMIT_S``.
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
    """Runs in the fresh process: measures, and sends an ``Answer`` or a ``Failure``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises, so that what is open is closed
    die_with_parent()
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
    """Holds SIGINT back until the end of the block; a process started in it never gets one: its parent ends it."""
    resource_tracker.ensure_running()  # it would let interrupts through again, if it were started inside the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    """Terminates a process that was started."""
    if process.pid is not None:
        process.terminate()
        _end(process)


def _end(process: SpawnProcess) -> None:
    """Waits for a process to end, and kills it after ``_END_LIMIT_S``."""
    process.join(_END_LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _notes(error: BaseException) -> list[str]:
    return [f"({note})" for note in getattr(error, "__notes__", ())]


def _error(received: Failure, name: str) -> LockstepError:
    """The error that the process raised, if it is a LockstepError; otherwise a ReplicaError that names it."""
    kind = getattr(errors, received.error, None)
    if isinstance(kind, type) and issubclass(kind, LockstepError):
        return kind(f"{received.message} (while measuring {name!r})")
    return ReplicaError(f"measuring {name!r} failed with {received.error}: {received.message}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement of a configuration."""

    configuration: Configuration  # what was measured
    round: int  # index of the round, from 0
    record: Record  # what the process measured


def run_rounds(trials: Sequence[Trial], *, rounds: int, progress: Callable[[Sample, int, int], None]) -> list[Sample]:
    """Measures every trial once a round.

    Args:
        trials: one for each configuration, in the order of the table.
        rounds: number of rounds.
        progress: called with each sample, the number of samples so far, and the number to come in all.

    Raises:
        DataError: the data is less than the largest global batch; found after the first sample.
    """
    samples: list[Sample] = []
    said: set[str] = set()
    for index in range(rounds):
        for trial in trials:
            answer = run_trial(trial)
            for message in answer.warnings:
                if message not in said:
                    said.add(message)
                    warnings.warn(message, stacklevel=2)
            samples.append(Sample(configuration=trial.configuration, round=index, record=answer.record))
            progress(samples[-1], len(samples), rounds * len(trials))
            if len(samples) == 1:
                check_data([trial.configuration for trial in trials], samples[0])
    return samples


def check_data(configurations: Sequence[Configuration], first: Sample) -> None:
    """Fails early where a later configuration needs larger global batches than the data has.

    Raises:
        DataError: the largest global batch has more examples than an epoch.
    """
    record, largest = first.record, largest_batch(configurations)
    epochs = len(record.step_ms) // record.steps_an_epoch
    # Exactly, where whole epochs were timed; else the last global batch counts as full.
    most = record.examples // epochs if epochs else record.steps_an_epoch * first.configuration.batch_size
    if largest > most:
        raise DataError(
            f"an epoch has {most} examples{'' if epochs else ' or fewer'}, less than the largest global batch of "
            f"{largest}; lower --batch-size or --replicas, or give more data"
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration over all its rounds."""

    configuration: Configuration  # which
    steps_an_epoch: int  # of its global batch
    timed_steps: int  # in each round
    epoch_s: float  # seconds an epoch, the median over the rounds; see ``epoch_s``
    examples_per_s: float  # median over the rounds
    median_ms: float  # of all timed steps together
    p10_ms: float  # a tenth of the steps were faster
    p90_ms: float  # a tenth of the steps were slower
    speed_up: float  # its examples/s over those of one device in the same round, and of these the median
    loss: float  # of the last timed step, median over the rounds
    parts: StepTimes  # means over the steps of all rounds

    @property
    def efficiency(self) -> float:
        """The speed-up over the hardware, counted in that of one device; 1 is perfect."""
        return self.speed_up / self.configuration.hardware

    @property
    def epochs_timed(self) -> int:
        """Whole epochs that were timed in each round; 0 where the epoch is extrapolated."""
        return self.timed_steps // self.steps_an_epoch

    @property
    def timed(self) -> str:
        """What ``epoch_s`` rests on, in words."""
        if self.epochs_timed:
            return "whole epoch" if self.epochs_timed == 1 else f"{self.epochs_timed} epochs"
        return f"{self.timed_steps} of {self.steps_an_epoch} steps"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, between two values in proportion.

    Example:
        >>> percentile([10.0, 20.0, 30.0], 75)
        25.0
    """
    if not values:
        raise DataError("the percentile of no values was asked for; give at least one")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def rows_of(configurations: Sequence[Configuration], samples: Sequence[Sample]) -> list[Row]:
    """A row for each configuration, the first of which is the one device that all are compared with."""
    reference = _of(configurations[0], samples)
    return [_row(configuration, _of(configuration, samples), reference) for configuration in configurations]


def epoch_s(record: Record) -> float:
    """Seconds an epoch: as timed where whole epochs were, else the seconds a timed step times the steps an epoch."""
    return record.timed_s / len(record.step_ms) * record.steps_an_epoch


def examples_per_s(record: Record) -> float:
    """Over the timed steps, waiting for the input included."""
    return record.examples / record.timed_s


def speed_up(own: Sequence[Sample], reference: Sequence[Sample]) -> float:
    """The median over the rounds of (examples/s / those of the reference in the same round).

    Raises:
        DataError: no common round.
    """
    base = {sample.round: examples_per_s(sample.record) for sample in reference}
    ratios = [examples_per_s(sample.record) / base[sample.round] for sample in own if sample.round in base]
    if not ratios:
        raise DataError("two configurations without a common round were to be compared; run them in the same rounds")
    return median(ratios)


def _row(configuration: Configuration, own: Sequence[Sample], reference: Sequence[Sample]) -> Row:
    records = [sample.record for sample in own]
    steps = [step for record in records for step in record.step_ms]
    return Row(
        configuration=configuration,
        steps_an_epoch=records[0].steps_an_epoch,
        timed_steps=len(records[0].step_ms),
        epoch_s=median(map(epoch_s, records)),
        examples_per_s=median(map(examples_per_s, records)),
        median_ms=median(steps),
        p10_ms=percentile(steps, 10),
        p90_ms=percentile(steps, 90),
        speed_up=speed_up(own, reference),
        loss=median(record.loss for record in records),
        parts=mean_times([step for record in records for step in record.parts]),
    )


def _of(configuration: Configuration, samples: Sequence[Sample]) -> list[Sample]:
    own = [sample for sample in samples if sample.configuration == configuration]
    if not own:
        raise DataError(f"{configuration.name!r} has no sample; measure it first")
    return own


_WHOLE_CPU = "cpu:1"


@dataclass(frozen=True, kw_only=True)
class ScalingResult:
    """A run and how it was made."""

    recipe: str  # its name
    title: str  # what was trained, in words
    config: Any  # the recipe's config
    settings: ScalingSettings  # what was asked
    devices: str  # as asked, in the notation of ``--devices``
    hardware: Hardware  # what that came to
    date: str  # YYYY-MM-DD
    machine: Machine  # where
    command: str  # that makes the run again
    rows: tuple[Row, ...]  # one a configuration; the first is the reference
    samples: tuple[Sample, ...]  # all of them

    @property
    def source(self) -> str:
        """Where the data came from."""
        return self.samples[0].record.source


def measure_scaling(
    recipe: str,
    config: Any,
    settings: ScalingSettings,
    *,
    devices: str,
    logical: Sequence[LogicalDevice],
    output: Path,
    progress: Callable[[Sample, int, int], None],
) -> ScalingResult:
    """Measures a recipe on one device and on several.

    Args:
        recipe: its name.
        config: its config; the batch size in it is not used.
        settings: how to measure.
        devices: in the notation of ``--devices``, for the fresh processes.
        logical: the logical devices that it means.
        output: where the report will go, for the command in it.
        progress: called with each sample, how many there are by then, and how many there will be.

    Raises:
        ConfigError: what was asked cannot be.
        LockstepError: a configuration's own, with its name.
    """
    machine = this_machine()
    hardware = Hardware(devices=tuple(logical), cores=machine.cores)
    configurations = plan(settings, hardware)
    trials = [_trial(recipe, config, settings, devices, configuration) for configuration in configurations]
    samples = run_rounds(trials, rounds=settings.rounds, progress=progress)
    return ScalingResult(
        recipe=recipe,
        title=find_recipe(recipe).title(config),
        config=config,
        settings=settings,
        devices=devices,
        hardware=hardware,
        date=date.today().isoformat(),
        machine=machine,
        command=command_of(recipe, config, settings, devices=devices, output=output),
        rows=tuple(rows_of(configurations, samples)),
        samples=tuple(samples),
    )


def command_of(recipe: str, config: Any, settings: ScalingSettings, *, devices: str, output: Path) -> str:
    """The command that makes a run again: how it is measured in full, and what of the recipe is not its default."""
    flags: dict[str, Any] = {
        "devices": devices,
        "replicas": ",".join(map(str, settings.replicas)),
        "batch_size": settings.batch_size,
        **({"steps": settings.steps} if settings.epochs is None else {"epochs": settings.epochs}),
        "warm_up": settings.warm_up,
        "rounds": settings.rounds,
        "output": output,
        **_changed(config, find_recipe(recipe).fixed),
    }
    words = [word for name, value in flags.items() for word in _words(name, value)]
    return shlex.join(["lockstep", "bench", "scaling", recipe, *words])


def _trial(recipe: str, config: Any, settings: ScalingSettings, devices: str, configuration: Configuration) -> Trial:
    return Trial(
        recipe=recipe,
        config=config,
        devices=_WHOLE_CPU if configuration.layout == "whole machine" else devices,
        configuration=configuration,
        settings=settings,
    )


def _changed(config: Any, fixed: frozenset[str]) -> dict[str, Any]:
    named = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: value for name, value in named.items() if name not in fixed and value != defaults[name]}


def _words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, str(value)]
