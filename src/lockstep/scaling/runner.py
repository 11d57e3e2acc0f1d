"""Runs ``lockstep bench scaling``: every configuration in a fresh process, in turn, for several rounds. Prints nothing.

    round 1: A B C    round 2: A B C    ...    speed-ups compare configurations of the same round

A machine that slows down in the middle of a run thus slows down all configurations.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lockstep.config import LogicalDevice, apply_device_request, parse_device_request
from lockstep.errors import DataError
from lockstep.scaling.fresh_process import call_in_fresh_process
from lockstep.scaling.machine import Machine, this_machine
from lockstep.scaling.measure import Record, StepTimes, mean_times, measure
from lockstep.scaling.plan import Configuration, Hardware, ScalingSettings, largest_batch, plan
from lockstep.scaling.recipes import build_work, find_recipe
from lockstep.strategies.mirrored import MirroredStrategy

TRIAL_LIMIT_S = 3600.0
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a fresh process measures. It is pickled, so it is plain data."""

    recipe: str
    config: Any  # config of the recipe
    devices: str  # logical devices, in the notation of ``--devices``
    configuration: Configuration
    settings: ScalingSettings


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement of a configuration, in a round counted from 0."""

    configuration: Configuration
    round: int
    record: Record


Progress = Callable[[Sample, int, int], None]
"""Called with each sample, the number of samples so far, and the number to come in all."""


def run_trial(trial: Trial) -> Record:
    """Measures in a fresh process; see ``call_in_fresh_process`` for the errors."""
    return call_in_fresh_process(partial(_measure, trial), limit_s=TRIAL_LIMIT_S, name=trial.configuration.name)


def _measure(trial: Trial) -> Record:
    configuration, settings = trial.configuration, trial.settings
    torch.manual_seed(_SEED)
    if configuration.cores is not None:
        torch.set_num_threads(configuration.cores)
    devices = apply_device_request(parse_device_request(trial.devices))
    work = build_work(trial.recipe, trial.config, configuration.batch_size)
    timed_steps = settings.timed_steps(len(work.train))
    with closing(MirroredStrategy(devices[: configuration.replicas], seed=_SEED)) as strategy:
        batch_size, warm_up = configuration.batch_size, settings.warm_up
        return measure(strategy, work, batch_size=batch_size, warm_up=warm_up, timed_steps=timed_steps)


def run_rounds(trials: Sequence[Trial], *, rounds: int, progress: Progress) -> list[Sample]:
    """Measures every trial once a round, in the order given.

    Raises:
        DataError: the data is less than the largest global batch; found after the first sample.
    """
    samples: list[Sample] = []
    for index in range(rounds):
        for trial in trials:
            samples.append(Sample(configuration=trial.configuration, round=index, record=run_trial(trial)))
            progress(samples[-1], len(samples), rounds * len(trials))
            if len(samples) == 1:
                check_data([trial.configuration for trial in trials], samples[0])
    return samples


def check_data(configurations: Sequence[Configuration], first: Sample) -> None:
    """Raises DataError if the largest global batch has more examples than an epoch."""
    record, largest = first.record, largest_batch(configurations)
    epochs = len(record.step_ms) // record.steps_an_epoch
    # Exact where whole epochs were timed; else the last global batch counts as full.
    most = record.examples // epochs if epochs else record.steps_an_epoch * first.configuration.batch_size
    if largest > most:
        raise DataError(
            f"an epoch has {most} examples{'' if epochs else ' or fewer'}, less than the largest global batch of "
            f"{largest}; lower --batch-size or --replicas, or give more data"
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration over all its rounds."""

    configuration: Configuration
    steps_an_epoch: int
    timed_steps: int  # in each round
    epoch_s: float  # seconds an epoch, the median over the rounds; extrapolated if no whole epoch was timed
    examples_per_s: float  # median over the rounds
    median_ms: float  # of all timed steps together, as are the percentiles
    p10_ms: float
    p90_ms: float
    speed_up: float  # examples/s over those of one device in the same round, and of these the median
    loss: float  # of the last timed step, median over the rounds
    parts: StepTimes  # means over the steps of all rounds

    @property
    def efficiency(self) -> float:
        """The speed-up over the hardware, in units of one device's; 1 is perfect."""
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
    """The value below which ``percent`` of the values lie, interpolated between two values.

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


def epoch_s(record: Record) -> float:
    """Seconds an epoch: the seconds of a timed step times the steps of an epoch."""
    return record.timed_s / len(record.step_ms) * record.steps_an_epoch


def examples_per_s(record: Record) -> float:
    """Over the timed steps, waiting for the input included."""
    return record.examples / record.timed_s


def speed_up(own: Sequence[Sample], reference: Sequence[Sample]) -> float:
    """The median over the rounds of (examples/s / those of the reference in the same round)."""
    base = {sample.round: examples_per_s(sample.record) for sample in reference}
    ratios = [examples_per_s(sample.record) / base[sample.round] for sample in own if sample.round in base]
    if not ratios:
        raise DataError("two configurations without a common round were to be compared; run them in the same rounds")
    return median(ratios)


@dataclass(frozen=True, kw_only=True)
class ScalingResult:
    """The measurements of ``lockstep bench scaling``, with the settings and the machine that they belong to."""

    recipe: str
    title: str  # what was trained, in words
    config: Any  # the recipe's config
    settings: ScalingSettings
    devices: str  # in the notation of ``--devices``
    hardware: Hardware
    date: str  # YYYY-MM-DD
    machine: Machine
    command: str  # makes the run again
    rows: tuple[Row, ...]  # one a configuration; the first is the reference
    samples: tuple[Sample, ...]

    @property
    def source(self) -> str:
        return self.samples[0].record.source


def measure_scaling(
    recipe: str,
    config: Any,
    settings: ScalingSettings,
    *,
    devices: str,
    logical: Sequence[LogicalDevice],
    output: Path,
    progress: Progress,
) -> ScalingResult:
    """Measures a recipe on one device and on several.

    Args:
        recipe: its name.
        config: its config; the batch size in it is not used.
        settings: how to measure.
        devices: in the notation of ``--devices``, for the fresh processes.
        logical: the logical devices that it means.
        output: where the report will go, for the command in it.
        progress: called with each sample.

    Raises:
        ConfigError: the settings do not fit the devices.
        LockstepError: a configuration's own, with its name.
    """
    machine = this_machine()
    hardware = Hardware(devices=tuple(logical), cores=machine.cores)
    configurations = plan(settings, hardware)
    trials = [
        Trial(
            recipe=recipe,
            config=config,
            devices="cpu:1" if configuration.layout == "whole machine" else devices,
            configuration=configuration,
            settings=settings,
        )
        for configuration in configurations
    ]
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
    fixed = find_recipe(recipe).fixed
    changed = {
        field.name: value
        for field in dataclasses.fields(config)
        if field.name not in fixed and (value := getattr(config, field.name)) != field.default
    }
    flags: dict[str, Any] = {
        "devices": devices,
        "replicas": ",".join(map(str, settings.replicas)),
        "batch_size": settings.batch_size,
        **({"steps": settings.steps} if settings.epochs is None else {"epochs": settings.epochs}),
        "warm_up": settings.warm_up,
        "rounds": settings.rounds,
        "output": output,
        **changed,
    }
    arguments = [argument for name, value in flags.items() for argument in _arguments(name, value)]
    return shlex.join(["lockstep", "bench", "scaling", recipe, *arguments])


def _arguments(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, str(value)]
