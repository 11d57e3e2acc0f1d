"""Finds the layouts that divide a model and fit in memory, and ranks them by predicted step time.

``plan`` is the function for users; ``search`` takes everything explicitly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from lockstep.checks import check_divides, check_least, divisors
from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import SCHEDULES, ScheduleName
from lockstep_tools.plan.assumptions import PRECISIONS, PrecisionName, Software
from lockstep_tools.plan.cost import Prediction, predict
from lockstep_tools.plan.division import CHECKPOINTING, CheckpointingName, Division, why_indivisible
from lockstep_tools.plan.hardware import GIB, LINKS, DeviceKind, Network, device_kind
from lockstep_tools.plan.memory import estimate_memory
from lockstep_tools.plan.model_shape import ModelShape
from lockstep_tools.plan.shapes import Model, shape_of

_MAX_MICROBATCH = 32
_NEGLIGIBLE = 0.01
# Multiples of the devices to try if nothing fits, to be able to say what would.
_MORE_DEVICES = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a search may choose; by default all that ``ls.ParallelStrategy`` can do. A given degree is fixed."""

    data: int | None = None  # number of copies of the model
    pipeline: int | None = None  # number of workers that divide the layers
    tensor: int | None = None  # number of devices that divide each layer
    microbatch_size: int | None = None  # sequences in a microbatch
    schedules: tuple[ScheduleName, ...] = SCHEDULES
    activation_checkpointing: tuple[CheckpointingName, ...] = CHECKPOINTING
    shard_optimizer: tuple[bool, ...] = (False, True)
    shard_parameters: tuple[bool, ...] = (False, True)
    sequence_parallel: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        check_least(self, 1, "data", "pipeline", "tensor", "microbatch_size")

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees that are fixed, by name."""
        return {name: value for name in ("data", "pipeline", "tensor") if (value := getattr(self, name)) is not None}


_ALL = Choices()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What ``lockstep plan`` is asked: the model, the devices and their network, and the global batch."""

    shape: ModelShape
    devices: int  # number of devices
    device: DeviceKind
    network: Network  # how they are connected
    batch: int  # sequences in the global batch
    software: Software = field(default_factory=Software)  # assumptions about the training program

    def __post_init__(self) -> None:
        check_least(self, 1, "devices", "batch")

    @property
    def usable_memory(self) -> float:
        """Bytes of a device that tensors can use."""
        return self.device.memory * self.software.constants.usable_memory

    def predict(self, division: Division) -> Prediction:
        return predict(self.shape, division, device=self.device, network=self.network, software=self.software)

    def memory(self, division: Division) -> float:
        return estimate_memory(self.shape, division, self.software).total

    def why_indivisible(self, data: int, pipeline: int, tensor: int) -> str | None:
        return why_indivisible(self.shape, data=data, pipeline=pipeline, tensor=tensor, batch=self.batch)


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """Degrees without a feasible layout, and why: what they do not divide and what would, or the memory they need."""

    data: int
    pipeline: int
    tensor: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a search."""

    setting: Setting  # what was asked
    ranked: tuple[Prediction, ...]  # every layout that fits, fastest first
    infeasible: tuple[Infeasible, ...]  # degrees without a layout that fits
    tried: int  # number of layouts that were tried

    @property
    def best(self) -> Prediction:
        return self.best_of_each[0]

    @cached_property
    def best_of_each(self) -> tuple[Prediction, ...]:
        """The best layout of each (data, pipeline, tensor), fastest first.

        It is the one with the fewest options of those within 1% of the fastest, which predictions cannot tell apart.
        """
        groups: dict[tuple[int, int, int], list[Prediction]] = {}
        for prediction in self.ranked:
            group = groups.setdefault(prediction.division.degrees, [])
            if not group or prediction.step_s <= group[0].step_s * (1 + _NEGLIGIBLE):
                group.append(prediction)
        plainest = (min(group, key=lambda p: (p.division.options, p.step_s)) for group in groups.values())
        return tuple(sorted(plainest, key=lambda prediction: prediction.step_s))


def plan(
    model: Model,
    *,
    devices: int,
    kind: str | DeviceKind,
    batch: int,
    network: Network | None = None,
    software: Software | None = None,
    choices: Choices = _ALL,
) -> Plan:
    """Ranks the layouts for training ``model`` on ``devices`` devices by predicted step time. No device is needed.

    Args:
        model: see ``shape_of``; for another sequence length pass ``shape_of(model, sequence=...)``.
        devices: number of devices.
        kind: name of a known device, such as "a100-80gb", or its figures.
        batch: sequences in the global batch.
        network: how devices are connected; by default as usual for such devices.
        software: assumptions about the training program; by default Lockstep, in the device's half precision.
        choices: what is fixed and what is free; by default all that ``ls.ParallelStrategy`` can do.

    Returns:
        Every layout that fits in memory, fastest first, and why the others do not.

    Raises:
        ConfigError: no layout divides the model or fits; the message names what would.

    Example:
        >>> plan("gpt2-xl", devices=8, kind="a100-80gb", batch=512).best.division.call()
        'ls.ParallelStrategy(data=8, pipeline=1, tensor=1)'
    """
    device = device_kind(kind) if isinstance(kind, str) else kind
    setting = Setting(
        shape=shape_of(model),
        devices=devices,
        device=device,
        network=network or usual_network(device, devices),
        batch=batch,
        software=software or usual_software(device),
    )
    return search(setting, choices)


def usual_network(device: DeviceKind, devices: int) -> Network:
    """The links of a usual host with such devices."""
    per_host = min(device.per_host, devices)
    return Network(inside=LINKS[device.inside], between=LINKS[device.between], per_host=per_host)


def usual_software(device: DeviceKind) -> Software:
    """Lockstep in bf16 if the device has it, else in fp16; in float32 on a CPU."""
    half: PrecisionName = "bf16" if "bf16" in device.peak_tflops else "fp16"
    return Software(precision=PRECISIONS["fp32" if device.name == "cpu" else half])


def search(setting: Setting, choices: Choices = _ALL) -> Plan:
    """Ranks all layouts by predicted step time, thousands in less than a second; raises as ``plan`` does."""
    ranked: list[Prediction] = []
    infeasible: list[Infeasible] = []
    tried, smallest = 0, float("inf")
    for data, pipeline, tensor in _degrees(setting.devices, choices):
        reason = setting.why_indivisible(data, pipeline, tensor)
        fits: list[Prediction] = []
        if reason is None:
            least = float("inf")
            for division in _variants(setting, choices, data, pipeline, tensor):
                tried += 1
                memory = setting.memory(division)
                least = min(least, memory)
                if memory <= setting.usable_memory:
                    fits.append(setting.predict(division))
            smallest = min(smallest, least)
            reason = _too_large(setting, least)
        ranked += fits
        if not fits:
            infeasible.append(Infeasible(data=data, pipeline=pipeline, tensor=tensor, reason=reason))
    if not ranked:
        raise ConfigError(_nothing_fits(setting, choices, infeasible, smallest))
    ranked.sort(key=lambda prediction: (prediction.step_s, prediction.memory.total))
    return Plan(setting=setting, ranked=tuple(ranked), infeasible=tuple(infeasible), tried=tried)


def _degrees(devices: int, choices: Choices) -> list[tuple[int, int, int]]:
    """All (data, pipeline, tensor) whose product is ``devices`` and that agree with what is fixed."""
    for name, value in choices.degrees.items():
        check_divides(name, value, ("devices", devices))
    combinations = []
    for tensor in divisors(devices):
        for pipeline in divisors(devices // tensor):
            data = devices // pipeline // tensor
            if choices.degrees.items() <= {"data": data, "pipeline": pipeline, "tensor": tensor}.items():
                combinations.append((data, pipeline, tensor))
    if not combinations:
        degrees = ", ".join(f"{name}={value}" for name, value in choices.degrees.items())
        raise ConfigError(f"{degrees} do not multiply to devices={devices}; leave one of them out")
    return combinations


def _variants(setting: Setting, choices: Choices, data: int, pipeline: int, tensor: int) -> Iterator[Division]:
    """Every layout of three degrees that divide the model."""
    # The copies divide the optimizer state alone, or without a pipeline weights and all.
    shards = [
        (optimizer, parameters)
        for optimizer, parameters in product(choices.shard_optimizer, choices.shard_parameters)
        if not (parameters and (optimizer or pipeline > 1)) and (data > 1 or not (optimizer or parameters))
    ] or [(False, False)]
    sequences = [value for value in choices.sequence_parallel if tensor > 1 or not value] or [False]
    for microbatch_size, microbatches in _microbatches(setting.batch // data, pipeline, choices):
        for schedule, stages in _schedules(setting.shape.layers, pipeline, microbatches, choices):
            for kind, (optimizer, parameters), sequence in product(choices.activation_checkpointing, shards, sequences):
                # A split backward pass would recompute the layer again for each weight gradient.
                if kind == "full" and schedule in ("zero_bubble", "zero_bubble_v"):
                    continue
                yield Division(
                    data=data,
                    pipeline=pipeline,
                    tensor=tensor,
                    microbatch_size=microbatch_size,
                    microbatches=microbatches,
                    schedule=schedule,
                    stages_per_worker=stages,
                    activation_checkpointing=kind,
                    shard_optimizer=optimizer,
                    shard_parameters=parameters,
                    sequence_parallel=sequence,
                )


def _microbatches(shard: int, pipeline: int, choices: Choices) -> list[tuple[int, int]]:
    """(microbatch size, microbatches) of a copy's shard of the batch, with at least one microbatch per stage."""
    fixed = choices.microbatch_size
    sizes = [n for n in divisors(shard) if n <= _MAX_MICROBATCH] if fixed is None else [fixed]
    return [(n, shard // n) for n in sizes if shard % n == 0 and shard // n >= pipeline]


def _schedules(layers: int, pipeline: int, microbatches: int, choices: Choices) -> Iterator[tuple[ScheduleName, int]]:
    """(schedule, stages per worker)."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    several = [n for n in divisors(layers // pipeline) if n > 1]
    two = [2] if layers >= 2 * pipeline else []
    stages = {
        # Interleaving takes microbatches in groups of as many as there are workers; torch's zero-bubble in equal ones.
        "interleaved": several if microbatches % pipeline == 0 else [],
        "zero_bubble": [1, *two] if microbatches % (microbatches // pipeline) == 0 else [],
        "zero_bubble_v": two,
    }
    for schedule in choices.schedules:
        yield from ((schedule, number) for number in stages.get(schedule, [1]))


# Messages for what is infeasible.


def _too_large(setting: Setting, least: float) -> str:
    if least == float("inf"):
        return (
            "the batch does not give each copy as many microbatches as stages; give more sequences or take fewer stages"
        )
    return f"needs {least / GIB:,.1f} GiB a device, expected at most {setting.usable_memory / GIB:,.1f}"


def _nothing_fits(setting: Setting, choices: Choices, infeasible: list[Infeasible], smallest: float) -> str:
    if smallest == float("inf"):
        # Too few microbatches is nearer to a solution than what does not divide.
        nearest = next((entry for entry in infeasible if entry.reason.startswith("the batch")), infeasible[-1])
        several = f"none of {len(infeasible)} layouts divides the model and the batch, such as: "
        return (several if len(infeasible) > 1 else "") + nearest.reason
    return (
        f"no layout of {setting.shape.name} on {setting.devices} x {setting.device.name} fits: the smallest needs"
        f" {smallest / GIB:,.1f} GiB a device, expected at most {setting.usable_memory / GIB:,.1f};"
        f" {_what_would_fit(setting, choices)}"
    )


def _what_would_fit(setting: Setting, choices: Choices) -> str:
    if choices.degrees:
        return f"leave out {' or '.join(f'{name}={value}' for name, value in choices.degrees.items())}"
    for times in _MORE_DEVICES:
        larger = replace(setting, devices=setting.devices * times)
        for degrees in _degrees(larger.devices, choices):
            if larger.why_indivisible(*degrees) is None:
                smallest = _variants(larger, replace(choices, microbatch_size=1), *degrees)
                if any(larger.memory(division) <= larger.usable_memory for division in smallest):
                    return f"take {larger.devices} devices"
    return "take devices with more memory"
