"""One schedule in fresh workers: what all of them did in each timed step. ``measure_in_worker`` is what each runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.extras import require
from lockstep.parallel.pipeline_config import ScheduleName
from lockstep.parallel.pipeline_trace import Timetable
from lockstep.scaling.pipeline.settings import PipelineSettings

TRIAL_LIMIT_S = 1200.0
_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one trial gave.

    Args:
        schedule: its name.
        round: 0 for the first.
        steps: the timed steps, in seconds.
    """

    schedule: ScheduleName
    round: int
    steps: tuple[Timetable, ...]


def run_trial(settings: PipelineSettings, schedule: ScheduleName, *, round: int) -> Sample:
    """Measures in fresh processes, and waits until they have ended.

    Raises:
        ClusterError: a worker failed, or they took longer than ``TRIAL_LIMIT_S``.
    """
    require("transformers", "transformers")
    steps = ls.launch(
        measure_in_worker, workers=settings.workers, args=(settings, schedule), gpus_per_worker=0,
        timeout_s=TRIAL_LIMIT_S,
    )  # fmt: skip
    return Sample(schedule=schedule, round=round, steps=tuple(steps))


def measure_in_worker(settings: PipelineSettings, schedule: ScheduleName) -> list[Timetable]:
    """The timed steps. Every worker must run it; all return the same."""
    torch.manual_seed(0)
    pipelining = settings.pipelining(schedule)
    strategy = ls.ParallelStrategy(
        data=1, pipeline=settings.workers, microbatches=settings.microbatches, schedule=schedule,
        stages_per_worker=pipelining.stages_per_worker,
    )  # fmt: skip
    steps: list[Timetable] = []
    with closing(strategy), strategy.scope():
        model = ls.Model(_model(settings))
        model.compile(_optimizer, _loss)
        watch = ls.LambdaCallback(on_train_batch_end=lambda *_: steps.append(_timetable(model)))
        words = torch.randint(settings.vocabulary, (settings.rows * settings.microbatches, settings.sequence))
        batch = ({"input_ids": words}, words)
        model.fit([batch] * (settings.warm_up + settings.steps), epochs=1, callbacks=[watch], verbose=0)
    return steps[settings.warm_up :]


def _timetable(model: ls.Model) -> Timetable:
    part: Any = model.module
    table: Timetable = part.timetable()
    return table


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, _RATE)


def _loss(outputs: Any, words: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.transpose(1, 2), words, reduction="none")


def _model(settings: PipelineSettings) -> nn.Module:
    transformers = require("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.BertConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=4 * settings.hidden,
        max_position_embeddings=settings.sequence,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    module: nn.Module = transformers.BertForMaskedLM(config)
    return module
