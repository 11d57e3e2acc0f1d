"""The tables of a scaling run as cells, and what their columns mean: the same words in every form of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.scaling.figures import Row
from lockstep.scaling.parts import PARTS
from lockstep.scaling.run import ScalingResult
from lockstep.scaling.training import GPU_PROFILED_STEPS
from lockstep.scaling.works import find_recipe

ROW_HEADINGS = (
    "layout", "on", "batch", "steps/epoch", "s/epoch", "timed", "examples/s", "step ms", "p10", "p90", "speed-up",
    "efficiency", "final loss",
)  # fmt: skip
PART_HEADINGS = ("layout", "step ms", *PARTS)
TEXT_COLUMNS = frozenset({"layout", "on", "timed", "data"})
"""Columns of words; the others are numbers."""


def row_cells(row: Row) -> list[str]:
    """A row under ``ROW_HEADINGS``."""
    return [
        row.configuration.name,
        row.configuration.resource,
        f"{row.configuration.batch_size}",
        f"{row.steps_an_epoch}",
        f"{row.epoch_s:.2f}",
        row.timed,
        f"{row.examples_per_s:,.1f}",
        *(f"{value:.1f}" for value in (row.median_ms, row.p10_ms, row.p90_ms)),
        f"{row.speed_up:.2f}",
        f"{row.efficiency:.0%}",
        f"{row.loss:.4f}",
    ]


def part_cells(row: Row) -> list[str]:
    """A row under ``PART_HEADINGS``: milliseconds, which add up to the step's."""
    return [row.configuration.name, *(f"{getattr(row.parts, name):.1f}" for name in ("step", *PARTS))]


def facts(result: ScalingResult) -> list[tuple[str, str]]:
    """How the run was made: pairs of a name and what is to be said."""
    machine = result.machine
    where = f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}"
    return [
        ("date", result.date),
        ("recipe", f"{result.recipe}: {result.title}"),
        ("data", result.source),
        ("devices", _devices(result)),
        ("machine", f"{where}; load average before the run {machine.load:.2f}"),
        ("versions", f"Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}"),
        ("commit", machine.commit),
        ("measured", _measured(result)),
    ]


def definitions(result: ScalingResult) -> list[tuple[str, str]]:
    """What the rows and columns mean: pairs of a name and its definition."""
    return [
        *_layouts(result),
        *_COLUMN_WORDS.items(),
        ("efficiency", _efficiency(result)),
        *_parts(result),
        *(("note", note) for note in find_recipe(result.recipe).notes),
    ]


def is_extrapolated(rows: Sequence[Row]) -> bool:
    """Whether the seconds an epoch of some row are not those of a whole one."""
    return any(not row.epochs_timed for row in rows)


def _measured(result: ScalingResult) -> str:
    settings = result.settings
    timed = (
        _counted(settings.epochs, "whole epoch") if settings.epochs else f"at most {_counted(settings.steps, 'step')}"
    )
    turns = "the configurations in turn, each in a fresh process"
    warm = f"{_counted(settings.warm_up, 'step')} of warm-up"
    return (
        f"{_counted(settings.rounds, 'round')}, {turns}; in each {warm}, then {timed}, timed from the start of an epoch"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _devices(result: ScalingResult) -> str:
    hardware = result.hardware
    count, cores = len(hardware.devices), hardware.cores
    if not hardware.on_cpu:
        return f"{', '.join(device.name for device in hardware.devices)} (--devices {result.devices})"
    each = _counted(hardware.share, "core")
    shared = f"; {count} of them share {cores} cores" if count * hardware.share > cores else ""
    return f"the CPU as {count} logical devices of {each} each{shared} (--devices {result.devices})"


def _layouts(result: ScalingResult) -> list[tuple[str, str]]:
    one = (
        "One replica on one logical device, with one share of the cores, as one GPU is one of several. The reference."
        if result.hardware.on_cpu
        else f"One replica on {result.hardware.devices[0].name} alone. The reference."
    )
    whole = [row for row in result.rows if row.configuration.layout == "whole machine"]
    more = [
        (row.configuration.name, "One replica with every core of the machine: what there is to gain without replicas.")
        for row in whole
    ]
    return [
        ("1 device", one),
        *more,
        ("same total", "N replicas share a global batch of the size that one device has."),
        ("N times the total", "N replicas, each with a shard of the size that one device has."),
    ]


def _efficiency(result: ScalingResult) -> str:
    text = "Speed-up over hardware, counted in that of 1 device: "
    if result.hardware.on_cpu:
        text += "the cores in column “on” over those of 1 device, so replicas that share a core are no more hardware"
    else:
        text += "the number of physical GPUs"
    return f"{text}. 100% is all that the hardware can give."


def _parts(result: ScalingResult) -> list[tuple[str, str]]:
    how = "Means over the replicas and all timed steps, which add up to the mean step. "
    if not result.hardware.on_cpu:
        how += (
            f"On GPUs they come from {GPU_PROFILED_STEPS} further steps in which every replica waits for its GPU after "
            "forward, backward and update; these are slower than the timed ones. Exchange is the time to issue it, and "
            "the rest of it is in update. "
        )
    return [("where the time goes", how.strip()), *_PART_WORDS.items()]


_COLUMN_WORDS: Mapping[str, str] = {
    "s/epoch": "Seconds an epoch. Where “timed” names a part of the steps, the epoch is extrapolated: the seconds a "
    "timed step times the steps an epoch; else whole epochs were timed. Median over the rounds.",
    "examples/s": "Over the timed steps, waiting for the input included. Median over the rounds.",
    "step ms, p10, p90": "From the end of a step to the end of the next: the median of all timed steps of all rounds, "
    "and what a tenth of them were faster and slower than.",
    "final loss": "Of the last timed step, over its global batch. Rows of the same batch have seen the same examples "
    "as often; larger batches have made fewer updates.",
    "speed-up": "Examples/s over those of 1 device in the same round; the median over the rounds. At the same total it "
    "compares seconds a step (strong scaling), at N times the total seconds an example (weak scaling).",
}
_PART_WORDS: Mapping[str, str] = {
    "input": "Waiting for the next global batch, divided and on its devices.",
    "forward": "The module and its loss.",
    "backward": "The gradients of the shard.",
    "exchange": "Summing gradients over the replicas.",
    "update": "Dividing, updating the weights, clearing the gradients.",
    "waiting": "For other replicas: for the slowest at the update, for its end, and for a turn where replicas share "
    "cores.",
    "other": "Starting the replicas, their meetings, and collecting what they return.",
}
