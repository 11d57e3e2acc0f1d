"""``lockstep plan``: which layout trains a model fastest on given devices. No device is needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep import console
from lockstep.console import text_table
from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import ScheduleName
from lockstep_tools.cli.flags import GroupedHelp, command, flag_name
from lockstep_tools.plan.assumptions import PRECISIONS, PrecisionName
from lockstep_tools.plan.cost import Prediction
from lockstep_tools.plan.division import CheckpointingName, Division
from lockstep_tools.plan.hardware import GIB, device_kind, parse_link
from lockstep_tools.plan.model_shape import ModelShape
from lockstep_tools.plan.search import Choices, Plan, Setting, usual_network, usual_software
from lockstep_tools.plan.search import plan as make_plan
from lockstep_tools.plan.shapes import config_settings, shape_of

if TYPE_CHECKING:
    from lockstep_tools.plan.counting import ModelCounts

_SEQUENCES_PER_DEVICE = 8


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep plan``."""
    groups = {"devices": "Devices and training", "replicas": "Fixed choices"}
    example = "Example: lockstep plan gpt-3 --devices 512 --kind a100-80gb --batch 1536"
    app.command("plan", cls=GroupedHelp, epilog=example)(command(PlanCommand, groups=groups))


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Rank the layouts (data x pipeline x tensor) of a model on devices, by predicted step time and memory.

    Args:
        model: the recipe mlm; a well-known name (gpt2-xl, llama-3-70b, gpt-3); a folder with a config.json of
            transformers; a type of transformers with settings: 'type=mixtral, num_hidden_layers=16'; or sizes:
            'layers=24, hidden=2048, heads=16, vocabulary=50257, sequence=1024'.
        top: how many layouts to show, the best of each (data, pipeline, tensor).
        modules: also list the parameters and operations of a transformers model by module.
        devices: number of devices.
        kind: kind of device, such as h100-sxm or rtx-4090, or its GiB, GB/s and half-precision TFLOP/s: 48,864,362.
        per_host: devices in a host; by default as usual for the kind.
        link: link inside a host and, after a comma, each device's link to other hosts: nvlink3,hdr. Any other link is
            its one-way GB/s and its microseconds: 25@14.
        batch: sequences in the global batch; by default 8 per device.
        sequence: tokens per sequence; by default the longest that the model takes.
        precision: number formats; by default half precision if the device has it.
        replicas: fix the number of replicas of the model.
        pipeline: fix the number of pipeline stages.
        tensor: fix the number of devices that divide a layer.
        microbatch_size: fix the number of sequences in a microbatch.
        schedule: fix the pipeline schedule.
        activation_checkpointing: fix what the backward pass recomputes.
    """

    model: Annotated[str, typer.Argument(metavar="MODEL")]
    top: int = 5
    modules: bool = False
    devices: int
    kind: str
    per_host: int | None = None
    link: str | None = None
    batch: int | None = None
    sequence: int | None = None
    precision: PrecisionName | None = None
    replicas: int | None = None
    pipeline: int | None = None
    tensor: int | None = None
    microbatch_size: int | None = None
    schedule: ScheduleName | None = None
    activation_checkpointing: CheckpointingName | None = None

    def __post_init__(self) -> None:
        for name in ("top", "devices", "per_host", "batch", "sequence"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag_name(name)} {value} was given, expected at least 1")

    def __call__(self) -> int:
        if self.modules:
            print(console.fill(self._modules()) + "\n")
        print(console.fill(as_text(self.find(shape_of(self.model, sequence=self.sequence)), self.top)))
        return 0

    def _modules(self) -> str:
        """The table of a transformers model's modules."""
        settings = config_settings(self.model)
        if settings is None:
            raise ConfigError(
                f"--modules was given with {self.model!r}, of which only sizes are known; give a folder with a"
                " config.json, or a type of transformers such as 'type=llama'"
            )
        from lockstep_tools.plan.counting import (  # imports torch, which other models do not need
            count_model,
            counted_shape,
        )

        counts = count_model(settings)
        return modules_text(counts, counted_shape(counts, self.sequence).sequence)

    def find(self, shape: ModelShape) -> Plan:
        """Makes the plan; raises ConfigError if a name is unknown, or nothing fits."""
        device = device_kind(self.kind)
        network = usual_network(device, self.devices)
        if self.per_host is not None:
            network = replace(network, per_host=self.per_host)
        inside, _, between = (self.link or "").partition(",")
        if inside:
            network = replace(network, inside=parse_link(inside))
        if between:
            network = replace(network, between=parse_link(between))
        software = usual_software(device)
        if self.precision is not None:
            software = replace(software, precision=PRECISIONS[self.precision])
        return make_plan(
            shape,
            devices=self.devices,
            kind=device,
            batch=_SEQUENCES_PER_DEVICE * self.devices if self.batch is None else self.batch,
            network=network,
            software=software,
            choices=self._choices(),
        )

    def _choices(self) -> Choices:
        """What is fixed, and what else Lockstep can do."""
        checkpointing = self.activation_checkpointing
        usual = Choices()
        return Choices(
            data=self.replicas,
            pipeline=self.pipeline,
            tensor=self.tensor,
            microbatch_size=self.microbatch_size,
            schedules=usual.schedules if self.schedule is None else (self.schedule,),
            activation_checkpointing=usual.activation_checkpointing if checkpointing is None else (checkpointing,),
        )


# The table.

_HEADINGS = [
    *("", "data", "pipeline", "tensor", "step s", "GiB", "bubble", "exchange", "TFLOP/s"),
    *("microbatches", "schedule", "checkpointing", "options"),
]
_OPTIONS = {
    "shard_optimizer": "sharded optimizer",
    "shard_parameters": "fully sharded",
    "sequence_parallel": "sequence parallel",
}


def as_text(plan: Plan, top: int) -> str:
    """The setting, a table of the best layouts, what is infeasible, and the call for the best layout."""
    rows = [[str(place), *_cells(prediction)] for place, prediction in enumerate(plan.best_of_each[:top], 1)]
    best = plan.best.division
    call = "\n".join([f"best: {best.call()}", *(f"      {line}" for line in _beside_the_call(best))])
    return "\n\n".join([_setting(plan.setting), text_table(_HEADINGS, rows), _infeasible(plan), call])


def modules_text(counts: ModelCounts, sequence: int) -> str:
    """The modules that have parameters, where ``*`` is every layer, with the operations of a forward pass."""
    names = {module.name for module in counts.modules}
    rows = [
        [
            module.name or "(model)",
            f"{module.modules:,}",
            f"{module.parameters:,}",
            f"{(module.token_flops + sequence * module.pair_flops) / 1e6:,.1f}",
        ]
        for module in counts.modules
        # A list of layers has the parameters of its layers, which the row below shows.
        if module.parameters and f"{module.name}.*" not in names
    ]
    return text_table(["module", "number", "parameters", "forward MFLOP/token"], rows)


def _setting(setting: Setting) -> str:
    shape, device, network = setting.shape, setting.device, setting.network
    format = setting.software.precision.format
    peak = device.peak_tflops[format]
    between = f", {network.between.name} between hosts" if setting.devices > network.per_host else ""
    return (
        f"{shape.name}: {_count(shape.parameters)} parameters, {shape.layers} layers of {shape.hidden:,},"
        f" {_heads(shape)}, sequences of {shape.sequence:,} tokens\n"
        f"{setting.devices:,} x {device.name} ({device.memory_gib:.0f} GiB, {peak:,.{0 if peak >= 10 else 2}f} TFLOP/s"
        f" in {format}), {network.per_host} in a host on {network.inside.name}{between};"
        f" global batch {setting.batch:,}"
    )


def _heads(shape: ModelShape) -> str:
    """Heads, and where they are fewer, key-value heads; experts."""
    parts = [f"{shape.heads} heads"]
    if shape.kv_heads != shape.heads:
        parts.append(f"{shape.kv_heads} key-value heads")
    if shape.experts:
        parts.append(
            f"{shape.experts} experts of which {shape.active_experts} are active"
            f" ({_count(shape.active_parameters)} parameters per token)"
        )
    return ", ".join(parts)


def _cells(prediction: Prediction) -> list[str]:
    division, seconds = prediction.division, prediction.step_s
    exchange = (prediction.tensor_s + prediction.pipeline_s + prediction.data_s) / seconds
    schedule: str = division.schedule if division.pipeline > 1 else ""
    if division.stages_per_worker > 1 and division.schedule != "zero_bubble_v":  # which always has two
        schedule += f" x {division.stages_per_worker}"
    return [
        *map(str, division.degrees),
        f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.4f}",
        f"{prediction.memory.total / GIB:.1f}",
        f"{prediction.bubble:.1%}" if division.pipeline > 1 else "",
        f"{exchange:.1%}",
        f"{prediction.model_tflops:.{0 if prediction.model_tflops >= 10 else 3}f}",
        f"{division.microbatches} x {division.microbatch_size}",
        schedule,
        "" if division.activation_checkpointing == "none" else division.activation_checkpointing,
        ", ".join(label for name, label in _OPTIONS.items() if getattr(division, name)),
    ]


def _count(number: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:,.1f} {word}"
    return f"{number:,}"


def _infeasible(plan: Plan) -> str:
    line = f"{plan.tried:,} layouts tried, {len(plan.ranked):,} fit"
    if not plan.infeasible:
        return f"{line}."
    kinds = Counter("fit" if entry.reason.startswith("needs") else "divide" for entry in plan.infeasible)
    counts = " and ".join(f"{number} {'do' if number > 1 else 'does'} not {kind}" for kind, number in kinds.items())
    return f"{line}. Of (data, pipeline, tensor), {counts}."


def _beside_the_call(division: Division) -> list[str]:
    """What the call does not say."""
    lines = []
    if division.stages_per_worker > 1:
        lines.append(f"each pipeline worker holds {division.stages_per_worker} stages")
    if division.pipeline == 1 and division.microbatches > 1:
        batch = division.data * division.microbatch_size
        lines.append(f"accumulate={division.microbatches} in compile, with global batches of {batch:,} sequences")
    if division.activation_checkpointing == "full":
        lines.append("gradient checkpointing for every layer: module.gradient_checkpointing_enable()")
    return lines
