"""One short training of a small BERT through each front end, and by hand on one device: for tests and their workers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, TrainingArguments

import lockstep as ls
from lockstep_tools.recipes.memory import Lora, add_lora

BATCH, ROWS, VOCABULARY = 8, 25, 40  # the last batch has one row, so that all shards but one are empty
RATE = 0.02
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how.

    Args:
        lora: adapters, or all weights.
        dropout: probability, in the layers and in the adapters.
        checkpointing: "no", "reentrant" or "not reentrant".
        dtype: of the weights.
        precision: of the forward pass.
        all_parameters: give the optimizer the frozen ones too.
    """

    lora: bool = True
    dropout: float = 0.0
    checkpointing: str = "no"
    dtype: torch.dtype = torch.float64
    precision: str = "fp32"
    all_parameters: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The weights before and after."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    trained: frozenset[str]


def make(case: Case) -> nn.Module:
    """The model, the same every time."""
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": case.dropout, "attention_probs_dropout_prob": case.dropout}
    bert = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **SIZES, **drops)).to(case.dtype)
    made = add_lora(bert, Lora(r=4, dropout=case.dropout), task="SEQ_CLS") if case.lora else bert
    if case.checkpointing != "no":
        kwargs = {"use_reentrant": case.checkpointing == "reentrant"}
        bert.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    return made.train()


def rows() -> list[dict[str, Any]]:
    """Rows of 2 to 12 tokens, each with a class."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 13, (ROWS,), generator=random).tolist()
    ids = [torch.randint(1, VOCABULARY, (length,), generator=random) for length in lengths]
    return [{"input_ids": each, "labels": int(each.sum() % 2)} for each in ids]


def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([r["labels"] for r in batch])}


def batches() -> list[Batch]:
    every = rows()
    collated = [collate(every[start : start + BATCH]) for start in range(0, ROWS, BATCH)]
    return [({k: v for k, v in each.items() if k != "labels"}, each["labels"]) for each in collated]


def optimizer_of(module: nn.Module, case: Case) -> torch.optim.Optimizer:
    chosen = [parameter for parameter in module.parameters() if parameter.requires_grad or case.all_parameters]
    return torch.optim.AdamW(chosen, RATE)


def autocast(case: Case) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if case.precision == "bf16" else nullcontext()


def by_hand(module: nn.Module, case: Case) -> None:
    """Plain torch on one device."""
    optimizer = optimizer_of(module, case)
    for x, y in batches():
        with autocast(case):
            loss = F.cross_entropy(module(**x).logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loop(strategy: ls.Strategy, module: nn.Module, case: Case) -> None:
    """A custom loop."""
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(optimizer_of(module, case))

    def step(batch: Batch, size: int) -> None:
        x, y = batch
        if len(y):
            with autocast(case):
                loss = F.cross_entropy(mirrored(**x).logits, y, reduction="sum") / size
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch, (_, labels) in zip(strategy.distribute_dataset(batches()), batches(), strict=True):
        strategy.run(step, (batch, len(labels)))


class Logits(nn.Module):
    """What ``Model`` calls: transformers' models return more than logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def fit(strategy: ls.Strategy, module: nn.Module, case: Case) -> None:
    """``Model.fit``."""
    with strategy.scope():
        model = ls.Model(Logits(module))
        model.compile(
            optimizer=optimizer_of(module, case),
            loss=lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
            precision="bf16" if case.precision == "bf16" else "fp32",
        )
    model.fit(batches(), verbose=0)


def trainer(strategy: ls.Strategy, module: nn.Module, case: Case) -> None:
    """The Transformers Trainer."""
    from lockstep.integrations.transformers import Trainer

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    optimizer = optimizer_of(module, case)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH // strategy.num_replicas_in_sync,
            num_train_epochs=1,
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=case.precision == "bf16",
        )
        made = InOrder(
            module,
            args,
            data_collator=collate,
            train_dataset=rows(),
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
            strategy=strategy,
        )
        made.remove_callback(PrinterCallback)
        made.train()


FRONTS: dict[str, Callable[[ls.Strategy, nn.Module, Case], None]] = {"loop": loop, "fit": fit, "trainer": trainer}


def outcome(case: Case, train: Callable[[nn.Module, Case], None]) -> Outcome:
    """Trains and tells what became of the weights."""
    module = make(case)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    train(module, case)
    return Outcome(
        before=before,
        after={name: value.clone() for name, value in module.state_dict().items()},
        trained=frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad),
    )


def on(strategy: ls.Strategy, case: Case, front: str) -> Outcome:
    """Trains on a strategy."""
    return outcome(case, lambda module, _: FRONTS[front](strategy, module, case))


def alone(case: Case) -> Outcome:
    """Trains by hand on one device."""
    return outcome(case, by_hand)
