"""Tiny models, tokenizers and data for the trainers of other people, and the comparison of two trainings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.conftest import MakeStrategy
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

WORDS = (
    *("the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "over", "under", "mat", "house"),
    *("tree", "and", "then", "slept", "ate", "fish", "seed"),
)
TIMES = ("runtime", "per_second", "preparation_time", "total_flos", "step_time")
SETTINGS = {
    "learning_rate": 0.05,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}


@pytest.fixture(autouse=True)
def _one_core(one_core: None) -> None:
    """Tiny models are faster so."""


def sentence(number: int, *, salt: int = 0) -> str:
    """2 to 8 words."""
    random = torch.Generator().manual_seed(1000 * salt + number)
    length = int(torch.randint(2, 9, (), generator=random))
    return " ".join(WORDS[index] for index in torch.randint(len(WORDS), (length,), generator=random).tolist())


def tokenizer() -> Any:
    plain = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[EOS]", "[BOS]"]
    plain.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=special))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", bos_token="[BOS]"
    )


def llama(kind: str = "CausalLM", *, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 128}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=2, bos_token_id=3, **settings)
    return getattr(transformers, f"LlamaFor{kind}")(config)


Make = Callable[..., Any]
"""Makes a trainer of ``base`` with ``args`` for its TrainingArguments, and more by name."""


def trained(make: Make, base: type, *, batch: int, replicas: int = 1, **named: Any) -> SimpleNamespace:
    """The weights before and after a training with this global batch, and its logs."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {f"per_device_{kind}_batch_size": batch // replicas for kind in ("train", "eval")}
        trainer = make(base, {**SETTINGS, "output_dir": folder, **sizes}, **named)
        trainer.remove_callback(transformers.PrinterCallback)
        before = _state(trainer)
        trainer.train()
        logs = [{k: v for k, v in log.items() if not k.endswith(TIMES)} for log in trainer.state.log_history]
        return SimpleNamespace(before=before, after=_state(trainer), logs=logs, trainer=trainer)


def _state(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference of two states."""
    return sum(float((one[name].double() - other[name].double()).norm() ** 2) for name in one) ** 0.5


@pytest.fixture
def own_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas have weights of their own, as on several GPUs."""
    for module in ("registry", "module.module"):
        path = f"lockstep.mirroring.{module}.storage_groups"
        monkeypatch.setattr(path, lambda devices: tuple((replica,) for replica in range(len(devices))))


@pytest.fixture
def compare(make_strategy: MakeStrategy) -> Callable[..., SimpleNamespace]:
    """Trains a client's class on one device and what ``distribute`` makes of it on replicas, and compares."""
    from lockstep.integrations.transformers import distribute

    def run(
        make: Make, base: type, *, batch: int = 12, replicas: int = 2, steps: int = 8, unlike: tuple[str, ...] = ()
    ) -> SimpleNamespace:
        theirs = trained(make, base, batch=batch)
        ours = trained(make, distribute(base), batch=batch, replicas=replicas, strategy=make_strategy(replicas))
        counts = (theirs.trainer.state.global_step, ours.trainer.state.global_step)
        assert counts == (steps, steps), counts
        way = distance(theirs.before, theirs.after)
        assert way > 1e-3, "the training changed nothing"
        size = sum(float(value.double().norm() ** 2) for value in theirs.after.values()) ** 0.5
        assert distance(ours.after, theirs.after) <= 1e-6 * size, (distance(ours.after, theirs.after), way, size)
        assert [set(log) for log in ours.logs] == [set(log) for log in theirs.logs]
        for our_log, their_log in zip(ours.logs, theirs.logs, strict=True):
            for name, value in their_log.items():
                if name not in unlike:
                    assert our_log[name] == pytest.approx(value, rel=1e-4, abs=1e-5), f"{name} in {their_log}"
        return SimpleNamespace(ours=ours, theirs=theirs)

    return run
