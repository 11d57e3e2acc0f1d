"""One scaling run from what was asked to the result that reports show. What a command calls; it prints nothing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from lockstep.config import LogicalDevice
from lockstep.scaling.figures import Row, rows_of
from lockstep.scaling.machine import Machine, this_machine
from lockstep.scaling.plan import Configuration, Hardware, plan
from lockstep.scaling.rounds import Sample, run_rounds
from lockstep.scaling.settings import ScalingSettings
from lockstep.scaling.trial import Trial
from lockstep.scaling.works import find_recipe

_WHOLE_CPU = "cpu:1"


@dataclass(frozen=True, kw_only=True)
class ScalingResult:
    """A run and how it was made.

    Args:
        recipe: its name.
        title: what was trained, in words.
        config: the recipe's config.
        settings: what was asked.
        devices: as asked, in the notation of ``--devices``.
        hardware: what that came to.
        date: YYYY-MM-DD.
        machine: where.
        command: that makes the run again.
        rows: one a configuration; the first is the reference.
        samples: all of them.
    """

    recipe: str
    title: str
    config: Any
    settings: ScalingSettings
    devices: str
    hardware: Hardware
    date: str
    machine: Machine
    command: str
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]

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
