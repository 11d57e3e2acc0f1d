"""Suite ``memory``: the peak memory that LoRA, bf16 and gradient checkpointing save."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Absence, Sample, run_rounds, trials_of
from benchmarks.loops import split_cpu
from benchmarks.processes import ProcessInfo, SpawnedBody
from benchmarks.report import Column, Report, Section, columns, report_of
from benchmarks.resident_memory import ResidentPeak, give_back_freed_memory, resident_mb
from benchmarks.results import Figures, figures_of, paired_ratios
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Conditions, Contender, Pace, Trial, Workload, select_contenders
from lockstep.extras import require
from lockstep.strategies.average_loss import compute_average_loss
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.compile import Precision, PrecisionName
from lockstep_tools.recipes.memory import Lora, MemoryChoices, trained_parameters, with_choices

PACE = Pace(warm_up=1, steps=2, rounds=1)
FULL = "full, fp32"
"""What the others are compared with: nothing is done."""
_LIMIT_S = 1200.0
_RATE = 2e-5
_LORA = Lora(r=8)
_CHOICES: dict[str, tuple[MemoryChoices, PrecisionName]] = {
    FULL: (MemoryChoices(), "fp32"),
    "bf16": (MemoryChoices(), "bf16"),
    "checkpointing": (MemoryChoices(gradient_checkpointing=True), "fp32"),
    "bf16 + checkpointing": (MemoryChoices(gradient_checkpointing=True), "bf16"),
    "LoRA": (MemoryChoices(lora=_LORA), "fp32"),
    "LoRA + checkpointing": (MemoryChoices(lora=_LORA, gradient_checkpointing=True), "fp32"),
    "LoRA + bf16": (MemoryChoices(lora=_LORA, load_in="bf16"), "bf16"),
    "LoRA + bf16 + checkpointing": (MemoryChoices(lora=_LORA, load_in="bf16", gradient_checkpointing=True), "bf16"),
}


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

    @property
    def title(self) -> str:
        return (
            f"A training step of the reviews' classifier: {self.layers} layers of width {self.hidden}, "
            f"{self.vocabulary:,} tokens in its vocabulary, {self.rows} reviews of {self.tokens} tokens on "
            f"{self.replicas} replicas, AdamW"
        )


def contenders(work: ReviewsWork, only: Sequence[str] | None = None) -> list[Contender]:
    """The choices that ``--only`` names, and always what they are compared with; all of them for None."""
    every = [
        Contender(
            name=name,
            settings=f"load_in={choices.load_in}, precision={precision}, memory_format auto",
            launcher=SpawnedBody(body=partial(train_with_choices, choices=choices, precision=precision, work=work)),
            replicas=work.replicas,
            layout="auto",
            role="baseline" if name == FULL else "ours",
            limit_s=_LIMIT_S,
        )
        for name, (choices, precision) in _CHOICES.items()
    ]
    return select_contenders(every, only and (FULL, *only))


def train_with_choices(
    trial: Trial,
    process: ProcessInfo,
    timer: StepTimer,
    *,
    choices: MemoryChoices,
    precision: PrecisionName,
    work: ReviewsWork,
) -> None:
    """Trains, and measures the peak above what this process had before it made the model."""
    bert = require("transformers.models.bert.modeling_bert", "transformers")
    require("peft", "text")  # imported first, so that it is not part of the measurement
    with closing(MirroredStrategy(split_cpu(work.replicas), seed=0)) as strategy:
        before_mb = resident_mb()
        module = with_choices(_model(bert, work), choices, task="SEQ_CLS").train()
        # Of what is trained alone, as the Trainer does; fused, and so without temporaries the size of the weights.
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], _RATE, fused=True)
        autocast = Precision(precision, "cpu").autocast
        mirrored, updating = strategy.mirror(module), strategy.mirror(optimizer)
        ids = torch.randint(0, work.vocabulary, (work.rows, work.tokens))
        (batch,) = strategy.distribute_dataset([(ids, torch.arange(work.rows) % 2)])

        def step(shard: tuple[Tensor, Tensor]) -> Tensor:
            tokens, labels = shard
            with autocast():
                logits = mirrored(input_ids=tokens).logits
            loss = compute_average_loss(F.cross_entropy(logits.float(), labels, reduction="none"))
            torch.autograd.backward(loss)
            updating.step()
            updating.zero_grad()
            return loss.detach()

        def total_loss() -> float:
            return sum(map(float, strategy.local_results(losses)))

        timer.trained = trained_parameters(module)
        give_back_freed_memory()
        with ResidentPeak() as peak:
            for index in range(timer.total):
                losses = strategy.run(step, (batch,))
                if index < timer.total - 1:
                    timer.record_step(total_loss)
        timer.extra = lambda: {
            "peak_mb": peak.peak_mb - before_mb,
            "weights_mb": tensors_mb(module.parameters()),
            "optimizer_mb": tensors_mb(each for state in optimizer.state.values() for each in state.values()),
        }
        timer.record_step(total_loss)


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


def tensors_mb(values: Iterable[Any]) -> float:
    """Megabytes (2**20 bytes) of those that are tensors, each storage once."""
    sizes = {each.data_ptr(): each.numel() * each.element_size() for each in values if isinstance(each, Tensor)}
    return sum(sizes.values()) / 2**20


_MEANINGS = {
    "bf16": 'without LoRA the forward and backward pass in bfloat16 (`precision="bf16"`), the weights in float32. '
    'With LoRA the frozen weights are kept in bfloat16 too (`load_in="bf16"`).',
    "LoRA": "r=8 beside query and value, and the head in full. checkpointing: gradient checkpointing of every layer.",
    "weights MB": "of all parameters, one copy for all replicas of the CPU. optimizer: its state, two numbers for each "
    "trained one with AdamW.",
    "peak MB": "the peak resident memory of the steps, above that before the model was made. of full: relative to the "
    "first row's of the same round, and of these the median.",
    "ratio": "the step time relative to the first row's of the same round, and of these the median.",
}


def section_of(work: ReviewsWork, figures: Sequence[Figures], absences: Sequence[Absence] = ()) -> Section:
    """The table; figures without the first choice's have no ratio of memory."""

    def peak(sample: Sample) -> float:
        return sample.extra[0]["peak_mb"]

    def of_full(row: Figures) -> str:
        full = figures[0]
        return f"{median(paired_ratios(row.samples, full.samples, peak)):.2f}" if full.contender.name == FULL else ""

    memory: dict[str, Column] = {
        "weights MB": lambda row: f"{row.most('weights_mb'):,.0f}",
        "optimizer MB": lambda row: f"{row.most('optimizer_mb'):,.0f}",
        "peak MB": lambda row: f"{row.most('peak_mb'):,.0f}",
        "of full": of_full,
    }
    shown = {**columns("parameters"), **memory, **columns("step ms", "ratio")}
    return Section(workload="reviews", title=work.title, columns=shown, figures=figures, absences=absences)


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures every choice once a round, each time in a fresh process."""
    return measure_choices(conditions, ReviewsWork(), asked.only)


def measure_choices(conditions: Conditions, work: ReviewsWork, only: Sequence[str] | None) -> Report:
    """Measures the choices that ``only`` names."""
    chosen = contenders(work, only)
    workload = Workload(name="reviews", title=work.title)
    rounds = run_rounds(trials_of(workload, chosen, conditions), rounds=conditions.rounds)
    section = section_of(work, figures_of(chosen, rounds.samples, workload.name), rounds.absences)
    name, title = f"memory-cpu-{conditions.machine.cores}", "Memory against each choice"
    return report_of(name, conditions, title, [section], rounds.samples, meanings=_MEANINGS)
