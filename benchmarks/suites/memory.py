"""Suite ``memory``: the peak memory that LoRA, bf16 and gradient checkpointing save."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import Report, head, legend
from benchmarks.resident_memory import ResidentPeak, give_back_freed_memory, resident_mb
from benchmarks.trial import Conditions, Pace, select
from lockstep import config
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.config_checks import at_least
from lockstep.recipes.memory import Lora, MemoryChoices, loading, trained_parameters, with_choices
from lockstep.report import markdown_table
from lockstep.scaling.fresh_process import call_in_fresh_process
from lockstep.strategies.losses import compute_average_loss
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.compile import Precision, PrecisionName

PACE = Pace(warm_up=1, steps=2, rounds=1)
FULL = "full, fp32"
"""What the others are compared with: nothing is done."""
TRIAL_LIMIT_S = 1200.0
_RATE = 2e-5
_log = logging.getLogger("benchmarks")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One row of the table: what is done, and the precision of the forward pass."""

    name: str
    choices: MemoryChoices
    precision: PrecisionName = "fp32"


_LORA = Lora(r=8)
_ROWS: tuple[tuple[str, MemoryChoices, PrecisionName], ...] = (
    (FULL, MemoryChoices(), "fp32"),
    ("bf16", MemoryChoices(), "bf16"),
    ("checkpointing", MemoryChoices(gradient_checkpointing=True), "fp32"),
    ("bf16 + checkpointing", MemoryChoices(gradient_checkpointing=True), "bf16"),
    ("LoRA", MemoryChoices(lora=_LORA), "fp32"),
    ("LoRA + checkpointing", MemoryChoices(lora=_LORA, gradient_checkpointing=True), "fp32"),
    ("LoRA + bf16", MemoryChoices(lora=_LORA, load_in="bf16"), "bf16"),
    ("LoRA + bf16 + checkpointing", MemoryChoices(lora=_LORA, load_in="bf16", gradient_checkpointing=True), "bf16"),
    ("LoRA + 8-bit", MemoryChoices(lora=_LORA, load_in="8bit"), "bf16"),
    ("LoRA + 4-bit", MemoryChoices(lora=_LORA, load_in="4bit"), "bf16"),
)
_CHOICES = tuple(Choice(name=name, choices=choices, precision=precision) for name, choices, precision in _ROWS)


@dataclass(frozen=True, kw_only=True)
class ReviewsWork:
    """The step that is measured: the reviews' classifier in the size of BERT-base, on Chinese BERT's vocabulary."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    feed_forward: int = 3072
    vocabulary: int = 21128
    rows: int = 16  # reviews in a global batch
    tokens: int = 128  # in each of them
    replicas: int = 2  # shares of the CPU

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "feed_forward", "vocabulary", "tokens", "replicas"):
            at_least(name, getattr(self, name), 1)
        at_least("rows", self.rows, self.replicas)

    @property
    def title(self) -> str:
        return (
            f"A training step of the reviews' classifier: {self.layers} layers of width {self.hidden}, "
            f"{self.vocabulary:,} tokens in its vocabulary, {self.rows} reviews of {self.tokens} tokens on "
            f"{self.replicas} replicas, AdamW."
        )


@dataclass(frozen=True, kw_only=True)
class MemoryTrial:
    """What a fresh process measures."""

    choice: Choice
    work: ReviewsWork
    warm_up: int  # steps before the timed ones
    steps: int  # timed steps

    def __post_init__(self) -> None:
        at_least("warm_up", self.warm_up, 0)
        at_least("steps", self.steps, 1)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a choice takes. MB are 2**20 bytes."""

    peak_mb: float  # the most that was resident during the steps, above what was before the model was made
    weights_mb: float  # of all parameters
    optimizer_mb: float  # of the optimizer's state
    trained: int  # numbers that are trained
    step_ms: tuple[float, ...]  # one a timed step


@dataclass(frozen=True, kw_only=True)
class Row:
    """One choice over all rounds, with its ratios to the full training; without samples the reason why."""

    name: str
    reason: str = ""
    samples: tuple[Measured, ...] = ()
    peak_ratio: float = 0.0
    step_ratio: float = 0.0


def chosen(only: Sequence[str] | None) -> list[Choice]:
    """The choices that ``--only`` names, and always what they are compared with; all of them for None."""
    return select(_CHOICES, None if only is None else (FULL, *only), name=lambda choice: choice.name)


def why_not(choice: Choice, device: torch.device) -> str:
    """Why a choice cannot be measured on ``device``; empty if it can."""
    try:
        loading(choice.choices, device)
    except (ConfigError, ImportError) as error:
        return str(error)
    return ""


def measured(trial: MemoryTrial) -> Measured:
    """Measures in a fresh process; see ``call_in_fresh_process`` for the errors."""
    return call_in_fresh_process(partial(_measure_on_cpu, trial), limit_s=TRIAL_LIMIT_S, name=trial.choice.name)


def _measure_on_cpu(trial: MemoryTrial) -> Measured:
    (cpu,) = config.list_physical_devices("CPU")
    shares = [config.LogicalDeviceConfiguration() for _ in range(trial.work.replicas)]
    config.set_logical_device_configuration(cpu, shares)
    with closing(MirroredStrategy(seed=0)) as strategy:
        return measure_choice(trial, strategy)


def measure_choice(trial: MemoryTrial, strategy: MirroredStrategy) -> Measured:
    """Measures in this process."""
    bert = require("transformers.models.bert.modeling_bert", "transformers")
    require("peft", "text")  # imported first, so that it is not part of the measurement
    before_mb = resident_mb()
    module = with_choices(_model(bert, trial.work), trial.choice.choices, task="SEQ_CLS").train()
    # Of what is trained alone, as the Trainer does; fused, and so without temporaries the size of the weights.
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], _RATE, fused=True)
    step = _step(module, optimizer, strategy, trial)
    give_back_freed_memory()
    ends = [time.perf_counter()]
    with ResidentPeak() as peak:
        for _ in range(trial.warm_up + trial.steps):
            step()
            ends.append(time.perf_counter())
    timed = ends[trial.warm_up :]
    return Measured(
        peak_mb=peak.peak_mb - before_mb,
        weights_mb=tensors_mb(module.parameters()),
        optimizer_mb=tensors_mb(each for state in optimizer.state.values() for each in state.values()),
        trained=trained_parameters(module),
        step_ms=tuple(1000 * (after - before) for before, after in pairwise(timed)),
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


def _step(
    module: Any, optimizer: torch.optim.Optimizer, strategy: MirroredStrategy, trial: MemoryTrial
) -> Callable[[], None]:
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


def tensors_mb(values: Iterable[Any]) -> float:
    """Megabytes (2**20 bytes) of those that are tensors, each storage once."""
    sizes = {each.data_ptr(): each.numel() * each.element_size() for each in values if isinstance(each, Tensor)}
    return sum(sizes.values()) / 2**20


def row_of(choice: Choice, rounds: Sequence[Mapping[str, Measured]], reason: str) -> Row:
    """The row of a choice, from what every choice took in each round, by name, or from why it was not measured."""
    if reason:
        return Row(name=choice.name, reason=reason)
    pairs = [(each[choice.name], each[FULL]) for each in rounds]
    return Row(
        name=choice.name,
        samples=tuple(own for own, _ in pairs),
        peak_ratio=median(own.peak_mb / full.peak_mb for own, full in pairs),
        step_ratio=median(median(own.step_ms) / median(full.step_ms) for own, full in pairs),
    )


_HEADINGS = ("choice", "trained", "weights MB", "optimizer MB", "peak MB", "of full", "step ms", "step of full")
_MEANINGS = {
    "bf16": 'without LoRA the forward and backward pass in bfloat16 (`precision="bf16"`), the weights in float32. '
    'With LoRA the frozen weights are kept in bfloat16 too (`load_in="bf16"`).',
    "LoRA": "r=8 beside query and value, and the head in full. checkpointing: gradient checkpointing of every layer.",
    "trained": "numbers that the optimizer changes.",
    "weights MB": "of all parameters, one copy for all replicas of the CPU. optimizer: its state, two numbers for each "
    "trained one with AdamW.",
    "peak MB": "the most that was resident during the steps, above what the process had before the model was made: "
    "weights, gradients, optimizer state, activations and what the operations need in between. of full: relative to "
    "the first row.",
    "step ms": "the median; relative to the first row's of the same round, and of these the median.",
}


def render_choices(conditions: Conditions, work: ReviewsWork, rows: Sequence[Row]) -> str:
    """The whole report."""
    parts = [
        head(conditions, "Memory against each choice"),
        work.title,
        markdown_table(_HEADINGS, [_cells(row) for row in rows]),
        "\n".join(f"- {row.name}: not run: {row.reason}" for row in rows if row.reason),
        legend(_MEANINGS),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _cells(row: Row) -> list[str]:
    if not row.samples:
        return [row.name, "not run", *[""] * (len(_HEADINGS) - 2)]
    first = row.samples[0]
    return [
        row.name,
        f"{first.trained:,}",
        *(f"{value:,.0f}" for value in (first.weights_mb, first.optimizer_mb)),
        f"{median(sample.peak_mb for sample in row.samples):,.0f}",
        f"{row.peak_ratio:.2f}",
        f"{median(median(sample.step_ms) for sample in row.samples):,.0f}",
        f"{row.step_ratio:.2f}",
    ]


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures every choice once a round, each time in a fresh process."""
    return measure_choices(conditions, ReviewsWork(), asked.only)


def measure_choices(conditions: Conditions, work: ReviewsWork, only: Sequence[str] | None) -> Report:
    """Measures the choices that ``only`` names."""
    at_least("rounds", conditions.rounds, 1)
    wanted = chosen(only)
    reasons = {choice.name: why_not(choice, torch.device("cpu")) for choice in wanted}
    for name, reason in reasons.items():
        if reason:
            _log.warning("%-28s not run: %s", name, reason)
    rounds: list[dict[str, Measured]] = [{} for _ in range(conditions.rounds)]
    for found in rounds:
        for choice in (choice for choice in wanted if not reasons[choice.name]):
            trial = MemoryTrial(choice=choice, work=work, warm_up=conditions.warm_up, steps=conditions.steps)
            own = found[choice.name] = measured(trial)
            _log.info("%-28s peak %6.0f MB, %8.0f ms a step", choice.name, own.peak_mb, median(own.step_ms))
    rows = [row_of(choice, rounds, reasons[choice.name]) for choice in wanted]
    record = {"conditions": asdict(conditions), "work": asdict(work), "rows": [asdict(row) for row in rows]}
    text = render_choices(conditions, work, rows)
    return Report(name=f"memory-cpu-{conditions.machine.cores}", date=conditions.date, text=text, record=record)
