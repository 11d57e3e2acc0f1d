"""Runs ``lockstep bench scaling``: every configuration in a fresh process, in turn, for several rounds. Prints nothing.

    round 1: A B C    round 2: A B C    ...    speed-ups compare configurations of the same round

A machine that slows down in the middle of a run thus slows down all configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date
from statistics import median
from typing import Any

import torch

import lockstep as ls
from lockstep.config import LogicalDevice, request_devices
from lockstep.errors import ClusterError, DataError, LockstepError
from lockstep_tools.scaling.configurations import Configuration, Hardware, ScalingSettings, plan
from lockstep_tools.scaling.machine import Machine, this_machine
from lockstep_tools.scaling.measure import Record, StepTimes, mean_times, measure
from lockstep_tools.scaling.recipes import Recipe

TRIAL_LIMIT_S = 3600.0
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement of a configuration, in a round counted from 0."""

    configuration: Configuration
    round: int
    record: Record


Progress = Callable[[Sample, int, int], None]
"""Called with each sample, the number of samples so far, and the number to come in all."""


def run_trial(
    recipe: Recipe, config: Any, devices: str, configuration: Configuration, settings: ScalingSettings
) -> Record:
    """Measures in a fresh process; raises the LockstepError that the measurement raised, or else a ClusterError."""
    arguments = (recipe, config, devices, configuration, settings)
    try:
        return ls.launch(_measure, workers=1, args=arguments, timeout_s=TRIAL_LIMIT_S)
    except ClusterError as failure:
        error = failure.__cause__ if isinstance(failure.__cause__, LockstepError) else failure
        # The worker's traceback is one of our own code; the person needs the error and the configuration.
        raise type(error)(f"{error} (while measuring {configuration.name!r})") from None


def _measure(
    recipe: Recipe, config: Any, devices: str, configuration: Configuration, settings: ScalingSettings
) -> Record:
    torch.manual_seed(_SEED)
    if configuration.cores is not None:
        torch.set_num_threads(configuration.cores)
    # All cores as one device are divided in no other way.
    logical = request_devices("cpu:1" if configuration.layout == "whole machine" else devices)
    task = recipe.build(replace(config, batch_size=configuration.batch_size))
    timed_steps = min(settings.steps, len(task.train))
    with closing(ls.MirroredStrategy(logical[: configuration.replicas], seed=_SEED)) as strategy:
        batch_size, warm_up = configuration.batch_size, settings.warm_up
        return measure(strategy, task, batch_size=batch_size, warm_up=warm_up, timed_steps=timed_steps)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration over all its rounds."""

    configuration: Configuration
    epoch_s: float  # seconds of a timed step times the steps of an epoch, the median over the rounds
    examples_per_s: float  # over the timed steps, waiting for the input included; median over the rounds
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


def rows_of(configurations: Sequence[Configuration], samples: Sequence[Sample]) -> list[Row]:
    """A row for each configuration, the first of which is the one device that all are compared with."""
    reference = _of(configurations[0], samples)
    return [_row(configuration, _of(configuration, samples), reference) for configuration in configurations]


def _row(configuration: Configuration, samples: Sequence[Sample], reference: Sequence[Sample]) -> Row:
    records = [sample.record for sample in samples]
    steps = torch.tensor([step for record in records for step in record.step_ms], dtype=torch.float64)
    p10, median_ms, p90 = steps.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    # Ratios within a round: test_a_machine_that_slows_down_between_rounds_is_fair_to_all.
    base = {sample.round: sample.record.examples_per_s for sample in reference}
    return Row(
        configuration=configuration,
        epoch_s=median(record.timed_s / len(record.step_ms) * record.steps_an_epoch for record in records),
        examples_per_s=median(record.examples_per_s for record in records),
        median_ms=median_ms,
        p10_ms=p10,
        p90_ms=p90,
        speed_up=median(sample.record.examples_per_s / base[sample.round] for sample in samples),
        loss=median(record.loss for record in records),
        parts=mean_times([step for record in records for step in record.parts]),
    )


def _of(configuration: Configuration, samples: Sequence[Sample]) -> list[Sample]:
    matches = [sample for sample in samples if sample.configuration == configuration]
    if not matches:
        raise DataError(f"{configuration.name!r} has no sample; measure it first")
    return matches


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
    rows: tuple[Row, ...]  # one a configuration; the first is the reference
    samples: tuple[Sample, ...]

    @property
    def source(self) -> str:
        return self.samples[0].record.source


def measure_scaling(
    recipe: Recipe,
    config: Any,
    settings: ScalingSettings,
    *,
    devices: str,
    logical: Sequence[LogicalDevice],
    progress: Progress,
) -> ScalingResult:
    """Measures a recipe on one device and on several.

    The batch size in ``config`` is not used. ``logical``: the devices that ``devices`` means, as in ``--devices``.
    Raises a ConfigError if the settings do not fit the devices, and the error of a configuration with its name.
    """
    machine = this_machine()
    hardware = Hardware(devices=tuple(logical), cores=machine.cores)
    configurations = plan(settings, hardware)
    samples: list[Sample] = []
    for index in range(settings.rounds):
        for configuration in configurations:
            record = run_trial(recipe, config, devices, configuration, settings)
            samples.append(Sample(configuration=configuration, round=index, record=record))
            progress(samples[-1], len(samples), settings.rounds * len(configurations))
    return ScalingResult(
        recipe=recipe.name,
        title=recipe.title(config),
        config=config,
        settings=settings,
        devices=devices,
        hardware=hardware,
        date=date.today().isoformat(),
        machine=machine,
        rows=tuple(rows_of(configurations, samples)),
        samples=tuple(samples),
    )
