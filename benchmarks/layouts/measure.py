"""One layout, measured: its workers are fresh processes, each of which tells what it had resident at most.

worker    imports, joins, a step of a tiny model -> resident so far | model, optimizer -> peak of the start
          | steps -> peak of the steps
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lockstep as ls
from benchmarks.layouts.roster import LayoutWork, MeasuredLayout
from lockstep.collectives.communicator import Communicator
from lockstep.collectives.mesh_communicator import MeshCommunicator
from lockstep.extras import require
from lockstep.replicas.cpu.linear import linear
from lockstep.replicas.cpu.memory import (
    ResidentPeak,
    give_back_at_once,
    give_back_freed_memory,
    keep_freed_memory,
    resident_mb,
)

TRIAL_LIMIT_S = 600.0
_RATE = 1e-4
_MB = 2**20


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """What one worker has in memory. MB are 2**20 bytes.

    Args:
        start_mb: at most until the first step, above what it had after importing, joining, and a step of a tiny model
            that runs all code once.
        peak_mb: at most during the steps, above the same, where freed memory is given back at once.
        kept_mb: the same where it is kept for the next step, as it is elsewhere.
        weights_mb: of its parameters.
        optimizer_mb: of its optimizer's state.
    """

    start_mb: float
    peak_mb: float
    kept_mb: float
    weights_mb: float
    optimizer_mb: float


def measured(layout: MeasuredLayout, work: LayoutWork, steps: int) -> tuple[WorkerMemory, ...]:
    """Every worker's, in their order.

    Raises:
        ClusterError: a worker failed, or all took longer than ``TRIAL_LIMIT_S``.
    """
    every = ls.launch(measure, workers=layout.workers, args=(dict(layout.asked), work, steps), timeout_s=TRIAL_LIMIT_S)
    return tuple(WorkerMemory(**each) for each in every)


def measure(asked: Mapping[str, Any], work: LayoutWork, steps: int) -> list[dict[str, float]]:
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
            model.compile(lambda parameters: torch.optim.AdamW(parameters, _RATE), word_loss)
        give_back_freed_memory()
        with ResidentPeak() as peak:
            model.fit(_batches(work, steps), epochs=1, verbose=0)
        keep_freed_memory()
        with ResidentPeak() as kept:
            model.fit(_batches(work, steps), epochs=1, verbose=0)
    optimizer = model.optimizer
    own = WorkerMemory(
        start_mb=start.peak_mb - before_mb,
        peak_mb=peak.peak_mb - before_mb,
        kept_mb=kept.peak_mb - before_mb,
        weights_mb=_mb(model.module.parameters()),
        optimizer_mb=_mb(each for state in optimizer.state.values() for each in state.values()) if optimizer else 0.0,
    )
    found = [dict(zip(vars(own), numbers, strict=True)) for numbers in _everyones(strategy.workers, own)]
    strategy.close()
    return found


def _run_all_code_once(build: Any, config: Any) -> None:
    """A step of a tiny model, by which some 25 MB of libraries become resident that are in no layout's account."""
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    tiny = build(type(config)(**{**config.to_dict(), **sizes}))
    words = torch.zeros(2, 8, dtype=torch.long)
    word_loss(tiny(input_ids=words), words).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW(tiny.parameters(), _RATE).step()
    rows, weight = torch.ones(64, 256, requires_grad=True), torch.ones(256, 256, requires_grad=True)
    linear(rows, weight).sum().backward()  # type: ignore[no-untyped-call]


def word_loss(outputs: Any, words: Tensor) -> Tensor:
    """The loss of every word, [lines, tokens]."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), words.flatten(), reduction="none").view(words.shape)


def _batches(work: LayoutWork, steps: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    random = torch.Generator().manual_seed(0)
    found = [torch.randint(work.vocabulary, (work.rows, work.tokens), generator=random) for _ in range(steps)]
    return [({"input_ids": words}, words.roll(-1, 1)) for words in found]


def _everyones(workers: Communicator, own: WorkerMemory) -> list[tuple[float, ...]]:
    job = workers.processes if isinstance(workers, MeshCommunicator) else workers
    return job.all_gather_numbers("memory", list(vars(own).values()))


def _mb(tensors: Iterator[Any]) -> float:
    """Of those that are tensors, each storage once."""
    sizes = {each.data_ptr(): each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor)}
    return sum(sizes.values()) / _MB
