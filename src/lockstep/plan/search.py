"""All layouts of a model on a number of devices: which divide, which fit, and in which order of predicted step time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from lockstep.errors import ConfigError
from lockstep.plan.cost import Prediction, predict
from lockstep.plan.hardware import GIB, LINKS, DeviceKind, Network, device_kind
from lockstep.plan.layout import (
    RECOMPUTES,
    SCHEDULES,
    Layout,
    RecomputeName,
    ScheduleName,
    why_not,
)
from lockstep.plan.memory import estimate_memory
from lockstep.plan.shapes import Model, ModelShape, divisors, one_of, shape_of
from lockstep.plan.software import Software, precision_named

_MOST_ROWS = 32
_HARDLY = 0.01
# How many times more devices are tried where nothing fits, to be able to say what would.
_MORE_DEVICES = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a search is free to choose; a degree that is given is kept.

    Args:
        data: copies of the model.
        pipeline: stages.
        tensor: devices that share each layer.
        rows: lines in a microbatch.
        schedules: orders of microbatches to try.
        recomputes: recomputations of activations to try.
        shard_optimizer: whether to try a sharded optimizer, a whole one, or both.
        shard_parameters: the same for sharded weights, gradients and state.
        sequence_parallel: the same for sequence parallelism.
    """

    data: int | None = None
    pipeline: int | None = None
    tensor: int | None = None
    rows: int | None = None
    schedules: tuple[ScheduleName, ...] = SCHEDULES
    recomputes: tuple[RecomputeName, ...] = RECOMPUTES
    shard_optimizer: tuple[bool, ...] = (False, True)
    shard_parameters: tuple[bool, ...] = (False, True)
    sequence_parallel: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        for name, known in (("schedules", SCHEDULES), ("recomputes", RECOMPUTES)):
            for value in getattr(self, name):
                if value not in known:
                    raise ConfigError(f"{name[:-1]}={value!r} was given; choose one of {', '.join(known)}")
        for name in ("data", "pipeline", "tensor", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} was given, expected at least 1")

    @property
    def any_degrees(self) -> Choices:
        """The same with all degrees free."""
        return replace(self, data=None, pipeline=None, tensor=None)


LOCKSTEP = Choices()
"""What ``ls.ParallelStrategy`` does so far; a test holds it to that."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a search is about.

    Args:
        shape: the model.
        devices: how many there are.
        device: of what kind.
        network: how they are joined.
        batch: lines in the global batch.
        software: what is assumed of the program.
    """

    shape: ModelShape
    devices: int
    device: DeviceKind
    network: Network
    batch: int
    software: Software = field(default_factory=Software)

    def __post_init__(self) -> None:
        for name in ("devices", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} was given, expected at least 1")

    @property
    def usable_memory(self) -> float:
        """Bytes of a device that tensors can have."""
        return self.device.memory * self.software.constants.usable_memory


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Degrees that were refused, and why: what they do not divide and what would, or the memory that they need."""

    data: int
    pipeline: int
    tensor: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a search found.

    Args:
        setting: what it was about.
        ranked: every layout that fits, the fastest first.
        refused: degrees of which none fits.
        tried: layouts that were looked at.
    """

    setting: Setting
    ranked: tuple[Prediction, ...]
    refused: tuple[Refusal, ...]
    tried: int

    @property
    def best(self) -> Prediction:
        """The fastest; a plainer one that is hardly slower is preferred, as in ``best_of_each``."""
        return self.best_of_each[0]

    @cached_property
    def best_of_each(self) -> tuple[Prediction, ...]:
        """The fastest of each (data, pipeline, tensor), the fastest first.

        Of those within 1% of it, which is less than a prediction can tell apart, the one with the fewest options.
        """
        groups: dict[tuple[int, int, int], list[Prediction]] = {}
        for prediction in self.ranked:
            layout = prediction.layout
            group = groups.setdefault((layout.data, layout.pipeline, layout.tensor), [])
            if not group or prediction.step_s <= group[0].step_s * (1 + _HARDLY):
                group.append(prediction)
        plainest = (min(group, key=lambda p: (p.layout.options, p.step_s)) for group in groups.values())
        return tuple(sorted(plainest, key=lambda prediction: prediction.step_s))


def search(setting: Setting, choices: Choices = Choices()) -> Plan:
    """Ranks all layouts by predicted step time. Pure, and instant: thousands in less than a second.

    Raises:
        ConfigError: no layout divides the model and the batch, or none fits in memory; the message names what would.
    """
    ranked: list[Prediction] = []
    refused: list[Refusal] = []
    tried, smallest = 0, float("inf")
    for data, pipeline, tensor in _degrees(setting.devices, choices):
        reason = _why_not(setting, data, pipeline, tensor)
        fits: list[Prediction] = []
        least = float("inf")
        if reason is None:
            for layout in _variants(setting, choices, data, pipeline, tensor):
                tried += 1
                needed = _needed(setting, layout)
                least = min(least, needed)
                if needed <= setting.usable_memory:
                    fits.append(_predict(setting, layout))
            smallest = min(smallest, least)
            reason = _too_large(setting, least)
        ranked += fits
        if not fits:
            refused.append(Refusal(data=data, pipeline=pipeline, tensor=tensor, reason=reason))
    if not ranked:
        raise ConfigError(_nothing(setting, choices, refused, smallest))
    ranked.sort(key=lambda prediction: (prediction.step_s, prediction.memory.total))
    return Plan(setting=setting, ranked=tuple(ranked), refused=tuple(refused), tried=tried)


def _predict(setting: Setting, layout: Layout) -> Prediction:
    return predict(setting.shape, layout, device=setting.device, network=setting.network, software=setting.software)


def _why_not(setting: Setting, data: int, pipeline: int, tensor: int) -> str | None:
    even = not setting.software.balanced_stages
    return why_not(setting.shape, data=data, pipeline=pipeline, tensor=tensor, batch=setting.batch, even_stages=even)


def _degrees(devices: int, choices: Choices) -> Iterator[tuple[int, int, int]]:
    """All (data, pipeline, tensor) that multiply to ``devices`` and agree with what was given.

    Raises:
        ConfigError: none do.
    """
    given = {name: value for name in ("data", "pipeline", "tensor") if (value := getattr(choices, name))}
    for name, value in given.items():
        if devices % value:
            raise ConfigError(f"{name}={value} does not divide devices={devices}; choose {one_of(divisors(devices))}")
    found = [
        (devices // pipeline // tensor, pipeline, tensor)
        for tensor in divisors(devices)
        for pipeline in divisors(devices // tensor)
    ]
    kept = [
        degrees
        for degrees in found
        if all(
            given.get(name, value) == value for name, value in zip(("data", "pipeline", "tensor"), degrees, strict=True)
        )
    ]
    if not kept:
        words = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(f"{words} do not multiply to devices={devices}; leave one of them out")
    yield from kept


def _variants(setting: Setting, choices: Choices, data: int, pipeline: int, tensor: int) -> Iterator[Layout]:
    """Every layout of three degrees that divide."""
    software = setting.software
    # Where scores of attention never reach memory there are none to compute again.
    recomputes = [r for r in choices.recomputes if not (r == "selective" and software.fused_attention)]
    shards = _shards(data, choices)
    sequences = [s for s in choices.sequence_parallel if tensor > 1 or not s] or [False]
    for rows, microbatches in _microbatches(setting.batch // data, pipeline, choices):
        for schedule, chunks in _schedules(setting, pipeline, microbatches, choices):
            for recompute in recomputes:
                # Each gradient that weights have later would have its layer computed again.
                if recompute == "full" and schedule in ("zero_bubble", "zero_bubble_v"):
                    continue
                for shard_optimizer, shard_parameters in shards:
                    for sequence in sequences:
                        yield Layout(
                            data=data,
                            pipeline=pipeline,
                            tensor=tensor,
                            rows=rows,
                            microbatches=microbatches,
                            schedule=schedule,
                            chunks=chunks,
                            recompute=recompute,
                            shard_optimizer=shard_optimizer,
                            shard_parameters=shard_parameters,
                            sequence_parallel=sequence,
                        )


def _shards(data: int, choices: Choices) -> list[tuple[bool, bool]]:
    """(the optimizer's state alone, weights and all): what copies divide among them, of which one is enough."""
    return [
        (optimizer, parameters)
        for optimizer in choices.shard_optimizer
        for parameters in choices.shard_parameters
        if not (optimizer and parameters) and (data > 1 or not (optimizer or parameters))
    ] or [(False, False)]


def _microbatches(rows: int, pipeline: int, choices: Choices) -> list[tuple[int, int]]:
    """(lines in a microbatch, microbatches) of a copy's ``rows`` lines; fewer than stages would keep some waiting."""
    wanted = [n for n in divisors(rows) if n <= _MOST_ROWS] if choices.rows is None else [choices.rows]
    return [(n, rows // n) for n in wanted if rows % n == 0 and rows // n >= pipeline]


def _schedules(
    setting: Setting, pipeline: int, microbatches: int, choices: Choices
) -> Iterator[tuple[ScheduleName, int]]:
    """(schedule, parts of a worker); a single stage has no schedule."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    layers = setting.shape.layers
    parts = [n for n in divisors(layers // pipeline) if n > 1]
    two = [2] if layers >= 2 * pipeline and (setting.software.balanced_stages or 2 in parts) else []
    rounds = {
        # Interleaving takes microbatches in groups of as many as there are stages; torch's zero-bubble in equal ones.
        "interleaved": parts if microbatches % pipeline == 0 else [],
        "zero_bubble": [1, *two] if microbatches % (microbatches // pipeline) == 0 else [],
        "zero_bubble_v": two,
    }
    for schedule in choices.schedules:
        yield from ((schedule, part) for part in rounds.get(schedule, [1]))


def _too_large(setting: Setting, least: float) -> str:
    if least == float("inf"):
        return "the batch does not give each copy as many microbatches as stages; give more lines or take fewer stages"
    return f"needs {least / GIB:,.1f} GiB a device, expected at most {setting.usable_memory / GIB:,.1f}"


def _nothing(setting: Setting, choices: Choices, refused: list[Refusal], smallest: float) -> str:
    """One line for a search that found nothing."""
    if smallest == float("inf"):
        # What fails for want of microbatches is nearer to working than what does not divide.
        nearest = next((refusal for refusal in refused if refusal.reason.startswith("the batch")), refused[-1])
        several = f"none of {len(refused)} layouts divides the model and the batch, such as: "
        return (several if len(refused) > 1 else "") + nearest.reason
    advice = _what_would_fit(setting, choices)
    return (
        f"no layout of {setting.shape.name} on {setting.devices} x {setting.device.name} fits: the smallest needs"
        f" {smallest / GIB:,.1f} GiB a device, expected at most {setting.usable_memory / GIB:,.1f}; {advice}"
    )


def _what_would_fit(setting: Setting, choices: Choices) -> str:
    """Other degrees where some were given, or else more devices."""
    free = choices.any_degrees
    if choices != free:
        try:
            other = search(setting, free).best.layout
        except ConfigError:
            return "nor does any other; take more devices, or devices with more memory"
        recompute = "" if other.recompute == "none" else f", recompute={other.recompute!r}"
        return f"data={other.data}, pipeline={other.pipeline}, tensor={other.tensor}{recompute} does"
    more = _devices_that_fit(setting, choices)
    return f"take {more} devices" if more else "take devices with more memory"


def _devices_that_fit(setting: Setting, choices: Choices) -> int | None:
    """The first multiple of the devices on which some layout fits, of those that take the least memory."""
    for times in _MORE_DEVICES:
        larger = replace(setting, devices=setting.devices * times)
        for data, pipeline, tensor in _degrees(larger.devices, choices):
            if _why_not(setting, data, pipeline, tensor) is None:
                variants = _variants(larger, replace(choices, rows=1), data, pipeline, tensor)
                if any(_needed(larger, layout) <= larger.usable_memory for layout in variants):
                    return larger.devices
    return None


def _needed(setting: Setting, layout: Layout) -> float:
    return estimate_memory(setting.shape, layout, setting.software).total


def plan(
    model: Model,
    *,
    devices: int,
    kind: str | DeviceKind,
    batch: int,
    network: Network | None = None,
    software: Software | None = None,
    choices: Choices | None = None,
) -> Plan:
    """Ranks the ways of training ``model`` on ``devices`` devices by predicted step time. Pure; no device is touched.

    Args:
        model: see ``shape_of``; another sequence length is ``shape_of(model, sequence=...)``.
        devices: how many there are.
        kind: a name of the table of devices, such as "a100-80gb", or figures of one's own.
        batch: lines in the global batch.
        network: how devices are joined; by default as such devices usually are.
        software: what is assumed of the program; by default Lockstep's own, in the half precision that the device has.
        choices: what is given and what is free; by default all that ``ls.ParallelStrategy`` does so far, and with
            ``Choices()`` all that can be predicted.

    Returns:
        Every layout that fits in memory, the fastest first, and why the others do not.

    Raises:
        ConfigError: no layout divides the model or fits; the message names what would.

    Example:
        >>> plan("gpt2-xl", devices=8, kind="a100-80gb", batch=512).best.layout.call()
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
    return search(setting, choices or LOCKSTEP)


def usual_network(device: DeviceKind, devices: int) -> Network:
    """The links that hosts of such devices usually have."""
    return Network(
        inside=LINKS[device.inside],
        between=LINKS[device.between],
        per_host=min(device.per_host, devices),
    )


def usual_software(device: DeviceKind) -> Software:
    """Lockstep itself, in bf16 where the device has it, else in fp16; a CPU computes in float32."""
    if device.name == "cpu":
        return Software(precision=precision_named("fp32"))
    half = "bf16" if "bf16" in device.peak_tflops else "fp16"
    return replace(Software(), precision=precision_named(half))
