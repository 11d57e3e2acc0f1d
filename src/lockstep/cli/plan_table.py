"""A plan as text for a terminal, and as a dictionary for machines. Pure: nothing is printed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lockstep.plan.devices import GIB
from lockstep.plan.layout import Layout
from lockstep.plan.predict import Prediction
from lockstep.plan.search import Plan, Setting
from lockstep.report.table import text_table

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
