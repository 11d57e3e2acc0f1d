"""Suite ``layouts``: each worker's peak memory by layout, beside the estimate of ``lockstep plan``."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lockstep as ls
from benchmarks.report import Report, head, legend
from benchmarks.resident_memory import ResidentPeak, give_back_at_once, give_back_freed_memory, resident_mb
from benchmarks.suites.memory import tensors_mb
from benchmarks.trial import Conditions, Pace, select
from lockstep.collectives.communicator import MeshCommunicator
from lockstep.extras import require
from lockstep.plan.layout import Layout
from lockstep.plan.memory import Memory, estimate_memory
from lockstep.plan.shapes import shape_of
from lockstep.plan.software import Software, precision_named
from lockstep.recipes.config_checks import at_least
from lockstep.replicas.cpu.allocator import keep_freed_memory
from lockstep.replicas.cpu.linear import linear, onednn_is_faster
from lockstep.report import markdown_table

PACE = Pace(warm_up=1, steps=2, rounds=1)
_log = logging.getLogger("benchmarks")

_IN_PARTS = ("interleaved", "zero_bubble", "zero_bubble_v")
"""Schedules with which a worker of a pipeline has two stages."""


@dataclass(frozen=True, kw_only=True)
class LayoutWork:
    """The step that is measured: a GPT-2 whose weights outweigh the activations of its short sequences."""

    layers: int = 8
    hidden: int = 512  # width of a token's vector
    heads: int = 8  # attention heads
    vocabulary: int = 16384  # tokens that have an embedding
    rows: int = 8  # sequences in a global batch
    tokens: int = 128  # in each of them

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "rows", "tokens"):
            at_least(name, getattr(self, name), 1)

    def config(self) -> dict[str, Any]:
        """The model in the terms of transformers' ``GPT2Config``."""
        return {
            "model_type": "gpt2",
            "vocab_size": self.vocabulary,
            "n_positions": self.tokens,
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "bos_token_id": None,
            "eos_token_id": None,
        }


@dataclass(frozen=True, kw_only=True)
class MeasuredLayout:
    """One row of the table."""

    asked: Mapping[str, Any] = field(default_factory=dict)  # the arguments of ``ls.ParallelStrategy``

    @property
    def workers(self) -> int:
        return math.prod(self.asked.get(degree, 1) for degree in ("data", "pipeline", "tensor"))

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.asked.items()) or "one worker"

    def planned(self, work: LayoutWork) -> Layout:
        """The same for ``lockstep plan``: two microbatches for each stage of a pipeline, where rows suffice."""
        degrees = {"data": 1, "pipeline": 1, "tensor": 1, **self.asked}
        shard = work.rows // degrees["data"]
        microbatches = min(shard, 2 * degrees["pipeline"]) if degrees["pipeline"] > 1 else 1
        chunks = 2 if self.asked.get("schedule") in _IN_PARTS else 1
        return Layout(
            **degrees, microbatch_size=shard // microbatches, microbatches=microbatches, stages_per_worker=chunks
        )


LAYOUTS = tuple(
    MeasuredLayout(asked=asked)
    for asked in (
        {},
        {"data": 4},
        {"data": 4, "shard_optimizer": True},
        {"data": 4, "shard_parameters": True},
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"tensor": 4},
        {"pipeline": 2, "schedule": "zero_bubble"},
        {"pipeline": 2, "schedule": "zero_bubble_v"},
        {"pipeline": 4},
        {"data": 2, "tensor": 2},
        {"data": 2, "tensor": 2, "shard_optimizer": True},
        {"data": 2, "tensor": 2, "shard_parameters": True},
        {"data": 2, "pipeline": 2},
        {"data": 2, "pipeline": 2, "shard_optimizer": True},
        {"data": 2, "pipeline": 2, "shard_parameters": True},
        {"pipeline": 2, "tensor": 2},
    )
)


TRIAL_LIMIT_S = 600.0
_RATE = 1e-4
_MB = 2**20


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Megabytes (2**20 bytes) of one worker."""

    # at most until the first step, above what it had after importing, joining, and a step of a tiny model that runs all
    # code once
    start_mb: float
    peak_mb: float  # at most during the steps, above the same, where freed memory is given back at once
    kept_mb: float  # the same where it is kept for the next step, as it is elsewhere
    weights_mb: float  # of its parameters
    optimizer_mb: float  # of its optimizer's state


def measured(layout: MeasuredLayout, work: LayoutWork, steps: int) -> tuple[WorkerMemory, ...]:
    """Every worker's, in their order.

    Raises:
        ClusterError: a worker failed, or all took longer than ``TRIAL_LIMIT_S``.
    """
    every = ls.launch(
        measure_in_worker, workers=layout.workers, args=(dict(layout.asked), work, steps), timeout_s=TRIAL_LIMIT_S
    )
    return tuple(WorkerMemory(**each) for each in every)


def measure_in_worker(asked: Mapping[str, Any], work: LayoutWork, steps: int) -> list[dict[str, float]]:
    """Measures in each worker. All must call it."""
    transformers = require("transformers", "transformers")
    config = transformers.GPT2Config(**work.config(), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    build = transformers.GPT2LMHeadModel  # imports the rest of it
    torch.set_num_threads(1)
    strategy = ls.ParallelStrategy(**asked, seed=0)
    _run_all_code_once(build, config)
    give_back_at_once()
    give_back_freed_memory()
    before_mb = resident_mb()
    with strategy.scope():
        with ResidentPeak() as start:
            model = ls.Model(strategy.parallelize(build(config)))
            model.compile(lambda parameters: torch.optim.AdamW(parameters, _RATE), token_loss)
        give_back_freed_memory()
        with ResidentPeak() as peak:
            model.fit(_batches(work, steps), epochs=1, verbose=0)
        keep_freed_memory()
        with ResidentPeak() as kept:
            model.fit(_batches(work, steps), epochs=1, verbose=0)
    states = model.optimizer.state.values() if model.optimizer else ()
    own = WorkerMemory(
        start_mb=start.peak_mb - before_mb,
        peak_mb=peak.peak_mb - before_mb,
        kept_mb=kept.peak_mb - before_mb,
        weights_mb=tensors_mb(model.module.parameters()),
        optimizer_mb=tensors_mb(each for state in states for each in state.values()),
    )
    workers = strategy.workers
    job = workers.processes if isinstance(workers, MeshCommunicator) else workers
    everyones = job.all_gather_numbers("memory", list(vars(own).values()))
    found = [dict(zip(vars(own), numbers, strict=True)) for numbers in everyones]
    strategy.close()
    return found


def _run_all_code_once(build: Any, config: Any) -> None:
    """A step of a tiny model, by which some 25 MB of libraries become resident that are in no layout's account."""
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    tiny = build(type(config)(**{**config.to_dict(), **sizes}))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    token_loss(tiny(input_ids=tokens), tokens).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW(tiny.parameters(), _RATE).step()
    rows, weight = torch.ones(64, 256, requires_grad=True), torch.ones(256, 256, requires_grad=True)
    linear(rows, weight).sum().backward()  # type: ignore[no-untyped-call]


def token_loss(outputs: Any, tokens: Tensor) -> Tensor:
    """The loss of every token, [rows, tokens]."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)


def _batches(work: LayoutWork, steps: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    random = torch.Generator().manual_seed(0)
    found = [torch.randint(work.vocabulary, (work.rows, work.tokens), generator=random) for _ in range(steps)]
    return [({"input_ids": tokens}, tokens.roll(-1, 1)) for tokens in found]


_HEADINGS = (
    "layout", "weights MB", "optimizer MB", "peak MB", "expected MB", "peak of expected", "weights", "gradients",
    "optimizer", "activations", "beside", "ending", "exchange", "update", "buffers", "start MB", "kept MB",
)  # fmt: skip

_MEANINGS = {
    "weights, optimizer, peak, start": "measured in each worker; the table has those of the worker whose peak is the "
    "highest. Peak is the most that was resident (VmHWM) during the steps, start before the first step, both above "
    "what the worker had after importing everything, joining the others, and a step of a tiny model. Optimizer is "
    "AdamW's state.",
    "kept": "the peak of more steps as they run outside of this measurement. For the others freed memory is given back "
    "to the system at once, so that they show what is in use. Lockstep keeps it for the next step, which is faster, "
    "and the gaps between what is in use then count too.",
    "expected": "what `lockstep plan` expects of the fullest worker in float32: weights, optimizer, buffers, and the "
    "most of four moments. Where a backward pass begins: activations, and beside them gradients of earlier "
    "microbatches, the head's as it is computed, and unsharded weights. Where one ends (ending): activations of the "
    "other microbatches, gradients, and those of the embedding as they are computed. After the last: gradients, and in "
    "exchange their copies that are sent, or unsharded weights. At the update: gradients, and the optimizer's "
    "temporaries.",
    "buffers": "where a pipeline receives hidden states and their gradients, for every microbatch.",
    "the rest": "between the two are buffers of the connections, blocks that are smaller than what is given back, and "
    "code that runs for the first time.",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout, measured and expected."""

    layout: MeasuredLayout
    workers: tuple[WorkerMemory, ...]  # every worker's memory
    expected: Memory  # of the fullest

    @property
    def fullest(self) -> WorkerMemory:
        """The worker whose peak is the highest."""
        return max(self.workers, key=lambda worker: worker.peak_mb)

    @property
    def ratio(self) -> float:
        """What was measured, in parts of what was expected."""
        return self.fullest.peak_mb / (self.expected.total / _MB)


def render_layouts(conditions: Conditions, work: LayoutWork, rows: Sequence[Row]) -> str:
    """The whole report."""
    step = (
        f"A training step of a GPT-2: {work.layers} layers of width {work.hidden}, {work.vocabulary:,} tokens in its "
        f"vocabulary, {work.rows} sequences of {work.tokens} tokens in the global batch, AdamW, float32, "
        f"{conditions.warm_up + conditions.steps} steps."
    )
    parts = [
        head(conditions, "Memory of a worker against the layout"),
        step,
        markdown_table(_HEADINGS, [_cells(row) for row in rows]),
        legend(_MEANINGS),
    ]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    fullest, expected = row.fullest, row.expected
    return [
        row.layout.name,
        *(f"{value:,.0f}" for value in (fullest.weights_mb, fullest.optimizer_mb, fullest.peak_mb)),
        f"{expected.total / _MB:,.0f}",
        f"{row.ratio:.2f}",
        *(
            f"{value / _MB:,.0f}"
            for value in (
                expected.weights,
                expected.gradients,
                expected.optimizer,
                expected.activations,
                expected.beside_activations,
                expected.backward_end,
                expected.exchange,
                expected.update,
                expected.buffers,
            )
        ),
        f"{fullest.start_mb:,.0f}",
        f"{fullest.kept_mb:,.0f}",
    ]


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures every layout, each in fresh processes."""
    rows = []
    for layout in select(LAYOUTS, asked.only, name=lambda layout: layout.name):
        rows.append(_row(layout, LayoutWork(), conditions.warm_up + conditions.steps))
        expected = rows[-1].expected.total / _MB
        _log.info("%-42s peak %6.0f MB a worker, expected %6.0f", layout.name, rows[-1].fullest.peak_mb, expected)
    return report_of(conditions, LayoutWork(), rows)


def _row(layout: MeasuredLayout, work: LayoutWork, steps: int) -> Row:
    software = Software(precision=precision_named("fp32"), transposed_head_gradient=onednn_is_faster())
    expected = estimate_memory(shape_of(work.config()), layout.planned(work), software)
    return Row(layout=layout, workers=measured(layout, work, steps), expected=expected)


def report_of(conditions: Conditions, work: LayoutWork, rows: Sequence[Row]) -> Report:
    """The report of a run."""
    record = {
        "conditions": asdict(conditions),
        "work": asdict(work),
        "rows": [
            {
                "layout": row.layout.name,
                "workers": [asdict(worker) for worker in row.workers],
                "expected": asdict(row.expected),
                "ratio": row.ratio,
            }
            for row in rows
        ],
    }
    text = render_layouts(conditions, work, rows)
    return Report(name=f"layouts-cpu-{conditions.machine.cores}", date=conditions.date, text=text, record=record)
