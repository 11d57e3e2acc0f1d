"""``lockstep plan``: which layout trains a model fastest on given devices, without touching any."""

from __future__ import annotations

import json as text_of
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep.cli.flags import config_command
from lockstep.errors import ConfigError
from lockstep.plan.cost import Prediction
from lockstep.plan.hardware import DEVICE_KINDS, GIB, device_kind, parse_link
from lockstep.plan.layout import Layout
from lockstep.plan.search import LOCKSTEP, Choices, Plan, Setting, usual_network, usual_software
from lockstep.plan.search import plan as make_plan
from lockstep.plan.shapes import ModelShape, shape_of
from lockstep.plan.software import Software, precision_named
from lockstep.plan.validation import validation_markdown
from lockstep.report import text_table

if TYPE_CHECKING:
    from lockstep.plan.measure import Measured


_HEADINGS = (
    "",
    "data",
    "pipeline",
    "tensor",
    "microbatches",
    "schedule",
    "recomputed",
    "options",
    "GiB",
    "step s",
    "bubble",
    "exchange",
    "TFLOP/s",
)

_OPTIONS = (
    ("shard_optimizer", "sharded"),
    ("shard_parameters", "fully sharded"),
    ("sequence_parallel", "sequence"),
)


def plan_text(plan: Plan, *, top: int, refused: bool) -> str:
    """The head, the table of the best layouts, what was refused, and the call that asks for the best."""
    parts = [setting_text(plan.setting), plan_table(plan.best_of_each[:top]), _refused_text(plan, refused)]
    best = plan.best
    use = [f"best: {best.layout.call()}", *(f"      {line}" for line in _besides(best.layout))]
    return "\n\n".join([*parts, "\n".join(use)])


def setting_text(setting: Setting) -> str:
    """Two lines: the model, and what it is to be trained on."""
    shape, device, network = setting.shape, setting.device, setting.network
    precision = setting.software.precision
    model = (
        f"{shape.name}: {_count(shape.parameters)} parameters, {shape.layers} layers of {shape.hidden:,},"
        f" {shape.heads} heads, lines of {shape.sequence:,} tokens"
    )
    peak = device.peak_tflops[precision.format]
    between = f", {network.between.name} between hosts" if setting.devices > network.per_host else ""
    machines = (
        f"{setting.devices:,} x {device.name} ({device.memory_gib:.0f} GiB, {peak:,.{0 if peak >= 10 else 2}f} TFLOP/s"
        f" in {precision.format}), {network.per_host} in a host on {network.inside.name}{between};"
        f" global batch {setting.batch:,}"
    )
    return f"{model}\n{machines}"


def plan_table(predictions: Sequence[Prediction]) -> str:
    """A row for each prediction."""
    return text_table(_HEADINGS, [[str(place + 1), *_cells(p)] for place, p in enumerate(predictions)])


def plan_dictionary(plan: Plan, *, top: int) -> dict[str, Any]:
    """The same for machines; seconds, bytes and TFLOP/s as numbers."""
    setting = plan.setting
    return {
        "model": {"name": setting.shape.name, "parameters": setting.shape.parameters},
        "devices": setting.devices,
        "kind": setting.device.name,
        "batch": setting.batch,
        "usable_bytes": setting.usable_memory,
        "tried": plan.tried,
        "fit": len(plan.ranked),
        "layouts": [_dictionary(prediction) for prediction in plan.best_of_each[:top]],
        "refused": [
            {"data": r.data, "pipeline": r.pipeline, "tensor": r.tensor, "reason": r.reason} for r in plan.refused
        ],
    }


def _cells(prediction: Prediction) -> list[str]:
    layout = prediction.layout
    exchange = (prediction.tensor_s + prediction.pipeline_s + prediction.data_s) / prediction.step_s
    return [
        str(layout.data),
        str(layout.pipeline),
        str(layout.tensor),
        f"{layout.microbatches} x {layout.rows}",
        _schedule(layout),
        "" if layout.recompute == "none" else layout.recompute,
        " ".join(word for name, word in _OPTIONS if getattr(layout, name)),
        f"{prediction.memory.total / GIB:.1f}",
        _seconds(prediction.step_s),
        f"{prediction.bubble:.1%}" if layout.pipeline > 1 else "",
        f"{exchange:.1%}",
        f"{prediction.model_tflops:.{0 if prediction.model_tflops >= 10 else 3}f}",
    ]


def _schedule(layout: Layout) -> str:
    if layout.pipeline == 1:
        return ""
    several = layout.chunks > 1 and layout.schedule != "zero_bubble_v"  # which always has two
    return f"{layout.schedule} x {layout.chunks}" if several else layout.schedule


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.4f}"


def _count(number: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:,.1f} {word}"
    return f"{number:,}"


def _refused_text(plan: Plan, every: bool) -> str:
    """How much was tried and refused; with ``every``, each refusal on a line of its own."""
    line = f"{plan.tried:,} layouts tried, {len(plan.ranked):,} fit"
    if not plan.refused:
        return f"{line}."
    if every:
        rows = [[str(r.data), str(r.pipeline), str(r.tensor), r.reason] for r in plan.refused]
        return f"{line}. Refused:\n\n{text_table(['data', 'pipeline', 'tensor', 'because'], rows)}"
    kinds = Counter("fit" if r.reason.startswith("needs") else "divide" for r in plan.refused)
    words = " and ".join(f"{number} that {'do' if number > 1 else 'does'} not {kind}" for kind, number in kinds.items())
    return f"{line}. Of (data, pipeline, tensor), {words} refused: --refused lists them."


def _besides(layout: Layout) -> list[str]:
    """What the call does not say."""
    lines = []
    if layout.chunks > 1:
        lines.append(f"each worker of a pipeline holds {layout.chunks} parts of the model")
    if layout.pipeline == 1 and layout.microbatches > 1:
        rows = layout.data * layout.rows
        lines.append(f"accumulate={layout.microbatches} in compile, with global batches of {rows:,} lines")
    if layout.recompute == "full":
        lines.append("activations of every layer are computed again: gradient checkpointing")
    if layout.recompute == "selective":
        lines.append("attention's scores are computed again")
    return lines


def _dictionary(prediction: Prediction) -> dict[str, Any]:
    layout, memory = prediction.layout, prediction.memory
    return {
        "call": layout.call(),
        **{name: getattr(layout, name) for name in layout.__dataclass_fields__},
        "step_s": prediction.step_s,
        "seconds": {
            name: getattr(prediction, f"{name}_s")
            for name in ("compute", "bubble", "tensor", "pipeline", "data", "update")
        },
        "bubble": prediction.bubble,
        "bytes": {
            name: getattr(memory, name) for name in ("weights", "gradients", "optimizer", "activations", "total")
        },
        "model_tflops": prediction.model_tflops,
        "hardware_tflops": prediction.hardware_tflops,
    }


EXAMPLE = "Example: lockstep plan gpt-3 --devices 512 --kind a100-80gb --batch 1536"
# Lines in the global batch for each device, where no batch is asked for.
_LINES_A_DEVICE = 8


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned for, and what is given.

    Args:
        devices: how many there are.
        kind: of what kind; the figures are published ones.
        per_host: devices in a host; by default as usual for the kind.
        link: link inside a host, and after a comma the one between hosts for each device: nvlink3,hdr. A link of
            your own is GB/s each way and microseconds: 25@14.
        batch: lines in the global batch; by default 8 for each device.
        sequence: tokens in a line; by default the model's longest.
        precision: number formats; by default half precision where the device has it.
        replicas: replicas of the model; by default free.
        pipeline: stages, where that is given.
        tensor: devices that share a layer, where that is given.
        rows: lines in a microbatch, where that is given.
        schedule: the pipeline's schedule, where that is given.
        recompute: activations to compute again, where that is given.
    """

    devices: int
    kind: str | None = None
    per_host: int | None = None
    link: str | None = None
    batch: int | None = None
    sequence: int | None = None
    precision: Literal["fp32", "bf16", "fp16", "mixed"] | None = None
    replicas: int | None = None
    pipeline: int | None = None
    tensor: int | None = None
    rows: int | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v"] | None = None
    recompute: Literal["none", "selective", "full"] | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "per_host", "batch", "sequence"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} was given, expected at least 1")

    def choices(self) -> Choices:
        """What is free: all that Lockstep does."""
        return replace(
            LOCKSTEP,
            data=self.replicas,
            pipeline=self.pipeline,
            tensor=self.tensor,
            rows=self.rows,
            schedules=LOCKSTEP.schedules if self.schedule is None else (self.schedule,),
            recomputes=LOCKSTEP.recomputes if self.recompute is None else (self.recompute,),
        )


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The recipe mlm; a well-known name (gpt2-xl, llama-3-70b, gpt-3); a folder saved by transformers; "
        "or sizes: 'layers=24, hidden=2048, heads=16, vocabulary=50257, sequence=1024'.",
    ),
]
TopFlag = Annotated[int, typer.Option(help="How many layouts to show, the best of each (data, pipeline, tensor).")]
MeasureFlag = Annotated[
    bool, typer.Option("--measure", help="Use this machine's figures, measured in a second or two, for every device.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print it for machines.")]
PublishedFlag = Annotated[
    bool,
    typer.Option(
        "--published",
        help="Show predictions beside published results, with every error, and end.",
        callback=lambda wanted: print_published(wanted),
        is_eager=True,
    ),
]
RefusedFlag = Annotated[bool, typer.Option("--refused", help="List what was refused, and why.")]


@config_command(PlanRequest)
def plan(
    model: ModelArgument,
    *,
    config: PlanRequest,
    top: TopFlag = 5,
    measured: MeasureFlag = False,
    json: JsonFlag = False,
    refused: RefusedFlag = False,
    published: PublishedFlag = False,
) -> Callable[[], int]:
    """Rank the layouts (data x pipeline x tensor) of a model on devices, by predicted step time and memory."""

    def job() -> int:
        if top < 1:
            raise ConfigError(f"--top {top} was given, expected at least 1")
        found = planned(model_shape(model, config.sequence), config, config.choices(), measured=measured)
        if json:
            print(text_of.dumps(plan_dictionary(found, top=top), indent=2))
        else:
            print(plan_text(found, top=top, refused=refused))
        return 0

    return job


def print_published(wanted: bool) -> None:
    """Prints the tables of docs/plan.md, which say how far predictions can be trusted."""
    if wanted:
        print(validation_markdown(), end="")
        raise typer.Exit


def model_shape(model: str, sequence: int | None) -> ModelShape:
    """The sizes of what was named: a recipe first, then whatever ``shape_of`` knows."""
    if model != "mlm":
        return shape_of(model, sequence=sequence)
    from lockstep.recipes.mlm.config import mlm  # which needs torch

    return shape_of(mlm(), sequence=sequence)


def planned(shape: ModelShape, request: PlanRequest, choices: Choices, *, measured: bool) -> Plan:
    """The plan that was asked for.

    Raises:
        ConfigError: no kind of device was named, or something that is not known; or nothing fits.
    """
    here = _measure(request) if measured else None
    if here is None and request.kind is None:
        raise ConfigError(
            f"--kind was not given; choose one of {', '.join(DEVICE_KINDS)}, or --measure this machine's device"
        )
    device = here.device if here else device_kind(request.kind or "")
    network = here.network if here else usual_network(device, request.devices)
    if request.per_host is not None:
        network = replace(network, per_host=request.per_host)
    if request.link is not None:
        inside, _, between = request.link.partition(",")
        network = replace(network, inside=parse_link(inside) if inside else network.inside)
        network = replace(network, between=parse_link(between) if between else network.between)
    software: Software = usual_software(device)
    if request.precision is not None:
        software = replace(software, precision=precision_named(request.precision))
    if here is not None:
        software = replace(software, constants=here.constants)
    return make_plan(
        shape,
        devices=request.devices,
        kind=device,
        batch=_LINES_A_DEVICE * request.devices if request.batch is None else request.batch,
        network=network,
        software=software,
        choices=choices,
    )


def _measure(request: PlanRequest) -> Measured:
    if request.kind is not None:
        raise ConfigError(f"--kind {request.kind} and --measure were both given, expected one of them; leave one out")
    from lockstep.plan.measure import measure  # which needs torch

    return measure(per_host=request.per_host or 1)
