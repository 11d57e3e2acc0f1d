"""Suite ``layouts``: each worker's peak memory by layout, beside the estimate of ``lockstep plan``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lockstep as ls
from benchmarks.harness import Absence, run_rounds, trials_of
from benchmarks.loops import cluster_of, trained_parameters
from benchmarks.processes import ProcessInfo, SpawnedBody
from benchmarks.report import Column, Report, Section, report_of
from benchmarks.resident_memory import ResidentPeak, give_back_at_once, give_back_freed_memory, resident_mb
from benchmarks.results import Figures, figures_of
from benchmarks.step_timer import StepTimer
from benchmarks.suites.memory import tensors_mb
from benchmarks.trial import Conditions, Contender, Pace, Trial, Workload, select_contenders
from lockstep.extras import require
from lockstep.replicas.cpu.linear import linear, onednn_is_faster
from lockstep_tools.plan.assumptions import PRECISIONS, Software
from lockstep_tools.plan.division import Division
from lockstep_tools.plan.memory import estimate_memory
from lockstep_tools.plan.shapes import shape_of

PACE = Pace(warm_up=1, steps=2, rounds=1)
_IN_PARTS = ("interleaved", "zero_bubble", "zero_bubble_v")
"""Schedules with which a worker of a pipeline has two stages."""
_LIMIT_S = 600.0
_RATE = 1e-4
_MB = 2**20


@dataclass(frozen=True, kw_only=True)
class LayoutWork:
    """The step that is measured: a GPT-2 whose weights outweigh the activations of its short sequences."""

    layers: int = 8
    hidden: int = 512  # width of a token's vector
    heads: int = 8  # attention heads
    vocabulary: int = 16384  # tokens that have an embedding
    rows: int = 8  # sequences in a global batch
    tokens: int = 128  # in each of them

    @property
    def title(self) -> str:
        return (
            f"A training step of a GPT-2: {self.layers} layers of width {self.hidden}, {self.vocabulary:,} tokens in "
            f"its vocabulary, {self.rows} sequences of {self.tokens} tokens in the global batch, AdamW, float32"
        )

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


LAYOUTS: tuple[Mapping[str, Any], ...] = (
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
    {"pipeline": 2, "tensor": 2},
)
"""The arguments of ``ls.ParallelStrategy``, one row of the table each."""


def name_of(layout: Mapping[str, Any]) -> str:
    """Such as "data=4, shard_optimizer=True"."""
    return ", ".join(f"{name}={value}" for name, value in layout.items()) or "one worker"


def planned(layout: Mapping[str, Any], work: LayoutWork) -> Division:
    """The same for ``lockstep plan``: two microbatches for each stage of a pipeline, where rows suffice."""
    degrees = {"data": 1, "pipeline": 1, "tensor": 1, **layout}
    shard = work.rows // degrees["data"]
    microbatches = min(shard, 2 * degrees["pipeline"]) if degrees["pipeline"] > 1 else 1
    stages = 2 if layout.get("schedule") in _IN_PARTS else 1
    size = shard // microbatches
    return Division(**degrees, microbatch_size=size, microbatches=microbatches, stages_per_worker=stages)


def expected_mb(layout: Mapping[str, Any], work: LayoutWork) -> float:
    """What ``lockstep plan`` expects of the fullest worker."""
    software = Software(precision=PRECISIONS["fp32"], transposed_head_gradient=onednn_is_faster())
    return estimate_memory(shape_of(work.config()), planned(layout, work), software).total / _MB


def contenders(work: LayoutWork) -> list[Contender]:
    """One of each layout."""
    return [
        Contender(
            name=name_of(layout),
            settings=f"ls.ParallelStrategy({'' if not layout else name_of(layout)}), one thread a worker",
            launcher=SpawnedBody(body=partial(train_in_layout, layout=layout, work=work)),
            replicas=layout.get("data", 1),
            processes=prod(layout.get(degree, 1) for degree in ("data", "pipeline", "tensor")),
            layout="auto",
            role="ours",
            limit_s=_LIMIT_S,
        )
        for layout in LAYOUTS
    ]


def train_in_layout(
    trial: Trial, process: ProcessInfo, timer: StepTimer, *, layout: Mapping[str, Any], work: LayoutWork
) -> None:
    """One worker; all must call it. Freed memory is given back at once, so that what is in use is measured."""
    transformers = require("transformers", "transformers")
    config = transformers.GPT2Config(**work.config(), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    build = transformers.GPT2LMHeadModel  # imports the rest of it
    torch.set_num_threads(1)
    cluster = cluster_of(trial, process) if trial.contender.processes > 1 else None
    strategy = ls.ParallelStrategy(**layout, cluster=cluster, seed=0)
    _run_all_code_once(build, config)
    give_back_at_once()
    give_back_freed_memory()
    before_mb = resident_mb()
    with strategy.scope():
        model = ls.Model(strategy.parallelize(build(config)))
        model.compile(lambda parameters: torch.optim.AdamW(parameters, _RATE), token_loss)
    timer.trained = trained_parameters(model.module)
    give_back_freed_memory()
    with ResidentPeak() as peak:
        for index, batch in enumerate(_batches(work, timer.total)):
            loss = model.fit([batch], epochs=1, verbose=0).history["loss"][-1]
            if index < timer.total - 1:
                timer.record_step(loss)
    states = model.optimizer.state.values() if model.optimizer else ()
    timer.extra = lambda: {
        "peak_mb": peak.peak_mb - before_mb,
        "weights_mb": tensors_mb(model.module.parameters()),
        "optimizer_mb": tensors_mb(each for state in states for each in state.values()),
    }
    timer.record_step(loss)
    strategy.close()


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


_MEANINGS = {
    "weights MB": "of the worker that has most of them, as are the others. optimizer: AdamW's state.",
    "peak MB": "the peak resident memory of the steps, above what the worker had after importing everything, joining "
    "the others, and a step of a tiny model. Freed memory is given back to the system at once; a training keeps it for "
    "the next step and has more resident.",
    "expected MB": "what `lockstep plan` expects of the fullest worker. Beyond it are buffers of the connections, "
    "blocks that are smaller than what is given back, and code that runs for the first time.",
}


def section_of(work: LayoutWork, figures: Sequence[Figures], absences: Sequence[Absence] = ()) -> Section:
    """The table."""
    expected = {name_of(layout): expected_mb(layout, work) for layout in LAYOUTS}
    shown: dict[str, Column] = {
        "weights MB": lambda row: f"{row.most('weights_mb'):,.0f}",
        "optimizer MB": lambda row: f"{row.most('optimizer_mb'):,.0f}",
        "peak MB": lambda row: f"{row.most('peak_mb'):,.0f}",
        "expected MB": lambda row: f"{expected[row.contender.name]:,.0f}",
        "peak of expected": lambda row: f"{row.most('peak_mb') / expected[row.contender.name]:.2f}",
    }
    return Section(workload="gpt2", title=work.title, columns=shown, figures=figures, absences=absences)


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures every layout, each in fresh processes."""
    work = LayoutWork()
    chosen = select_contenders(contenders(work), asked.only)
    workload = Workload(name="gpt2", title=work.title)
    rounds = run_rounds(trials_of(workload, chosen, conditions), rounds=conditions.rounds)
    section = section_of(work, figures_of(chosen, rounds.samples, workload.name), rounds.absences)
    name, title = f"layouts-cpu-{conditions.machine.cores}", "Memory of a worker against the layout"
    return report_of(name, conditions, title, [section], rounds.samples, meanings=_MEANINGS)
