"""One choice, measured: in a fresh process, since what a process once took changes what it takes later.

this process: measured --spawn--> fresh process: model, steps --Measured through a pipe--> measured
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory_choices.roster import Choice, ReviewsWork
from lockstep import config
from lockstep.errors import ReplicaError
from lockstep.extras import require
from lockstep.parent_death import ParentDeathGuard, die_with
from lockstep.recipes.config_checks import at_least
from lockstep.recipes.memory import trained_parameters, with_choices
from lockstep.replicas.cpu.memory import ResidentPeak, give_back_freed_memory, resident_mb
from lockstep.strategies.losses import compute_average_loss
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.compile import Precision

TRIAL_LIMIT_S = 1200.0
_END_LIMIT_S = 30.0
_RATE = 2e-5
_BYTES_PER_MB = 2**20

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class MemoryTrial:
    """What a fresh process is asked to measure.

    Args:
        choice: what is done.
        work: the step.
        warm_up: steps before the timed ones.
        steps: timed steps.
    """

    choice: Choice
    work: ReviewsWork
    warm_up: int
    steps: int

    def __post_init__(self) -> None:
        at_least("warm_up", self.warm_up, 0)
        at_least("steps", self.steps, 1)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a choice takes. MB are 2**20 bytes.

    Args:
        peak_mb: the most that was resident during the steps, above what was before the model was made.
        weights_mb: of all parameters.
        optimizer_mb: of the optimizer's state.
        trained: numbers that are trained.
        step_ms: one a timed step.
    """

    peak_mb: float
    weights_mb: float
    optimizer_mb: float
    trained: int
    step_ms: tuple[float, ...]


def measured(trial: MemoryTrial) -> Measured:
    """Measures in a fresh process, and ends it.

    Raises:
        ReplicaError: it failed, or took longer than ``TRIAL_LIMIT_S``.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    line = ParentDeathGuard()
    process = context.Process(target=_answer, args=(trial, far, line.path), daemon=True)
    process.start()
    far.close()
    try:
        with closing(near):
            if not near.poll(TRIAL_LIMIT_S):
                raise ReplicaError(f"{trial.choice.name} was not done after {TRIAL_LIMIT_S:.0f} s; give fewer --steps")
            answer: Measured = near.recv()
        process.join(_END_LIMIT_S)
    except EOFError:
        process.join(_END_LIMIT_S)  # it is saying why
        raise ReplicaError(f"{trial.choice.name} ended before its last step; its own message is above") from None
    finally:
        line.kill()
        process.join()
    return answer


def _answer(trial: MemoryTrial, far: Connection, line: str) -> None:
    die_with(line)
    (cpu,) = config.list_physical_devices("CPU")
    shares = [config.LogicalDeviceConfiguration() for _ in range(trial.work.replicas)]
    config.set_logical_device_configuration(cpu, shares)
    with closing(MirroredStrategy(seed=0)) as strategy:
        far.send(measure(trial, strategy))


def measure(trial: MemoryTrial, strategy: MirroredStrategy) -> Measured:
    """Measures in this process."""
    bert = require("transformers.models.bert.modeling_bert", "transformers")
    require("peft", "text")  # so that it is not among what the choice takes
    before_mb = resident_mb()
    module = with_choices(_model(bert, trial.work), trial.choice.choices, task="SEQ_CLS").train()
    # Of what is trained alone, as the Trainer does; fused, and so without temporaries the size of the weights.
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], _RATE, fused=True)
    step = _step(module, optimizer, strategy, trial)
    give_back_freed_memory()
    with ResidentPeak() as peak:
        seconds = tuple(_timed(step) for _ in range(trial.warm_up + trial.steps))
    return Measured(
        peak_mb=peak.peak_mb - before_mb,
        weights_mb=_mb(module.parameters()),
        optimizer_mb=_mb(each for state in optimizer.state.values() for each in state.values()),
        trained=trained_parameters(module),
        step_ms=tuple(1000 * each for each in seconds[trial.warm_up :]),
    )


def _model(bert: Any, work: ReviewsWork) -> Any:
    torch.manual_seed(0)
    return bert.BertForSequenceClassification(
        bert.BertConfig(
            vocab_size=work.vocabulary,
            hidden_size=work.hidden,
            num_hidden_layers=work.layers,
            num_attention_heads=work.heads,
            intermediate_size=work.feed_forward,
            max_position_embeddings=max(512, work.tokens),
        )
    )


def _step(module: Any, optimizer: torch.optim.Optimizer, strategy: MirroredStrategy, trial: MemoryTrial) -> Step:
    work, precision = trial.work, Precision(trial.choice.precision, "cpu")
    mirrored, updating = strategy.mirror(module), strategy.mirror(optimizer)
    ids = torch.randint(0, work.vocabulary, (work.rows, work.tokens))
    (batch,) = strategy.distribute_dataset([(ids, torch.arange(work.rows) % 2)])

    def in_replica(shard: tuple[Tensor, Tensor]) -> None:
        tokens, labels = shard
        with precision.autocast():
            logits = mirrored(input_ids=tokens).logits
        torch.autograd.backward(compute_average_loss(F.cross_entropy(logits.float(), labels, reduction="none")))
        updating.step()
        updating.zero_grad()

    return lambda: strategy.run(in_replica, (batch,))


def _timed(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _mb(tensors: Iterator[Any]) -> float:
    """Of those that are tensors, each storage once."""
    sizes = {each.data_ptr(): each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor)}
    return sum(sizes.values()) / _BYTES_PER_MB
