"""The trainers of TRL on replicas have the weights and the metrics of one device."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from tests.clients.training import SETTINGS, llama, sentence, tokenizer
from tests.clients.training import compare as compare
from tests.clients.training import own_storage as own_storage
from tests.conftest import MakeStrategy

from lockstep.errors import ConfigError
from lockstep.integrations.transformers import distribute


def texts(number: int, *, salt: int = 0) -> Dataset:
    return Dataset.from_list([{"text": sentence(index, salt=salt)} for index in range(number)])


def sft(base: type, args: dict[str, Any], **named: Any) -> Any:
    config = trl.SFTConfig(**args, bf16=False, eval_strategy="epoch")
    data = {"train_dataset": texts(12 * 7 + 5), "eval_dataset": texts(19, salt=1)}
    return base(llama(), config, processing_class=tokenizer(), **data, **named)


@pytest.mark.parametrize("replicas", [2, 3])
def test_sft(compare: Any, replicas: int) -> None:
    compare(sft, trl.SFTTrainer, replicas=replicas)


def spread(prediction: Any) -> dict[str, float]:
    """A number that depends on every logit, and its place."""
    logits = prediction.predictions[prediction.label_ids >= 0]
    return {"spread": float((logits * np.arange(logits.size).reshape(logits.shape)).mean())}


def sft_with_logits(base: type, args: dict[str, Any], **named: Any) -> Any:
    """Its evaluation calls the forward that TRL has wrapped in another."""
    return sft(base, args, compute_metrics=spread, **named)


def test_sft_with_metrics_of_logits(compare: Any) -> None:
    both = compare(sft_with_logits, trl.SFTTrainer, replicas=3)
    assert "eval_spread" in both.ours.logs[-2]


def packed(base: type, args: dict[str, Any], **named: Any) -> Any:
    config = trl.SFTConfig(**args, bf16=False, eval_strategy="epoch", packing=True, max_length=24)
    data = {"train_dataset": texts(350), "eval_dataset": texts(40, salt=1)}
    return base(flat_llama(), config, processing_class=tokenizer(), **data, **named)


def padding_free(base: type, args: dict[str, Any], **named: Any) -> Any:
    config = trl.SFTConfig(**args, bf16=False, eval_strategy="epoch", padding_free=True, max_length=None)
    data = {"train_dataset": texts(12 * 7 + 5), "eval_dataset": texts(19, salt=1)}
    return base(flat_llama(), config, processing_class=tokenizer(), **data, **named)


def flat_llama() -> Any:
    return llama(attn_implementation="sdpa")


@pytest.mark.parametrize("make", [packed, padding_free])
def test_sft_of_flat_batches(compare: Any, make: Any) -> None:
    compare(make, trl.SFTTrainer, replicas=3)


def pairs(number: int, *, salt: int = 0) -> Dataset:
    return Dataset.from_list(
        [
            {
                "prompt": sentence(index, salt=salt),
                "chosen": " " + sentence(index, salt=salt + 7),
                "rejected": " " + sentence(index, salt=salt + 8),
            }
            for index in range(number)
        ]
    )


def dpo(base: type, args: dict[str, Any], *, settings: Any = None, **named: Any) -> Any:
    config = trl.DPOConfig(**args, bf16=False, eval_strategy="epoch", **(settings or {}))
    data = {"train_dataset": pairs(12 * 7 + 5), "eval_dataset": pairs(19, salt=1)}
    return base(llama(), llama(seed=1), config, processing_class=tokenizer(), **data, **named)


@pytest.mark.parametrize("replicas", [2, 3])
def test_dpo(compare: Any, replicas: int) -> None:
    compare(dpo, trl.DPOTrainer, replicas=replicas)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": ["ipo"]},
        {"loss_type": ["robust", "bco_pair"], "loss_weights": [0.5, 1.0]},
        {"use_weighting": True},
    ],
)
def test_losses_of_dpo(compare: Any, settings: dict[str, Any]) -> None:
    compare(partial(dpo, settings=settings), trl.DPOTrainer, replicas=3)


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired", "sft"])
def test_losses_of_dpo_over_the_batch_are_refused(make_strategy: MakeStrategy, tmp_path: Any, loss_type: str) -> None:
    args = {**SETTINGS, "output_dir": tmp_path}
    with pytest.raises(ConfigError, match=rf"loss_type='{loss_type}', which .* of a batch.*use one replica"):
        dpo(distribute(trl.DPOTrainer), args, settings={"loss_type": [loss_type]}, strategy=make_strategy(2))


def test_dpo_with_weights_in_each_replica_and_a_reference_that_follows(compare: Any, own_storage: None) -> None:
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    compare(partial(dpo, settings=settings), trl.DPOTrainer, replicas=3)


def reward(base: type, args: dict[str, Any], **named: Any) -> Any:
    config = trl.RewardConfig(**args, bf16=False, eval_strategy="epoch", center_rewards_coefficient=0.1)
    data = {"train_dataset": pairs(12 * 7 + 5), "eval_dataset": pairs(19, salt=1)}
    return base(llama("SequenceClassification", num_labels=1), config, processing_class=tokenizer(), **data, **named)


@pytest.mark.parametrize("replicas", [2, 3])
def test_reward(compare: Any, replicas: int) -> None:
    compare(reward, trl.RewardTrainer, replicas=replicas)


def kto(base: type, args: dict[str, Any], *, loss_type: str = "kto", **named: Any) -> Any:
    rows = [
        {
            "prompt": sentence(index),
            "completion": " " + sentence(index, salt=7),
            "label": index % 3 > 0,
        }
        for index in range(12 * 7 + 5)
    ]
    config = trl.KTOConfig(**args, bf16=False, eval_strategy="epoch", loss_type=loss_type)
    data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:19])}
    return base(llama(), llama(seed=1), args=config, processing_class=tokenizer(), **data, **named)


@pytest.mark.parametrize(("loss_type", "replicas"), [("kto", 2), ("kto", 3), ("apo_zero_unpaired", 3)])
def test_kto(compare: Any, loss_type: str, replicas: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss is ")  # it uses what it gathers, and no check may doubt it
        compare(partial(kto, loss_type=loss_type), trl.KTOTrainer, replicas=replicas)


def many_letters(completions: list[str], **_: Any) -> list[float]:
    """Rewards completions for their letters, which differ with every token."""
    return [sum(ord(letter) % 7 for letter in text) / 50 for text in completions]


def grpo(base: type, args: dict[str, Any], *, loss_type: str = "dapo", settings: Any = None, **named: Any) -> Any:
    prompts = Dataset.from_list([{"prompt": sentence(index)} for index in range(48)])
    more = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "loss_type": loss_type}
    config = trl.GRPOConfig(**args, **more, **(settings or {}), bf16=False, eval_strategy="epoch")
    folder = f"{config.output_dir}/model"  # where the reference model is read from
    llama().save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return base(model, many_letters, config, prompts, prompts.select(range(5)), processing_class=tokenizer(), **named)


@pytest.mark.parametrize(
    ("loss_type", "replicas"),
    [("dapo", 2), ("dapo", 3), *((name, 3) for name in ("grpo", "dr_grpo", "sapo", "cispo", "luspo"))],
)
def test_grpo(compare: Any, loss_type: str, replicas: int) -> None:
    compare(partial(grpo, loss_type=loss_type), trl.GRPOTrainer, replicas=replicas, unlike=("step_time",))


def test_grpo_of_completions_that_several_steps_use(compare: Any) -> None:
    """A generation has the prompts of the steps that use it, of all replicas."""
    settings = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 8}
    compare(partial(grpo, settings=settings), trl.GRPOTrainer, replicas=3, unlike=("step_time",))


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def dpo_of_adapters(base: type, args: dict[str, Any], **named: Any) -> Any:
    """The model without its adapters is the reference."""
    config = trl.DPOConfig(**args, bf16=False, eval_strategy="epoch", gradient_accumulation_steps=2)
    data = {"train_dataset": pairs(12 * 15 + 5), "eval_dataset": pairs(19, salt=1)}
    torch.manual_seed(4)
    return base(llama(), args=config, processing_class=tokenizer(), peft_config=lora(), **data, **named)


def test_dpo_of_adapters_over_accumulated_batches(compare: Any) -> None:
    compare(dpo_of_adapters, trl.DPOTrainer, replicas=3)


def test_a_training_that_is_resumed_has_the_same_bits(make_strategy: MakeStrategy, tmp_path: Any) -> None:
    states = []
    for resumed in (None, str(tmp_path / "checkpoint-4")):
        settings = {**SETTINGS, "save_strategy": "steps", "save_steps": 4, "output_dir": tmp_path}
        trainer = sft(
            distribute(trl.SFTTrainer), {**settings, "per_device_train_batch_size": 4}, strategy=make_strategy(3)
        )
        trainer.train(resume_from_checkpoint=resumed)
        # Not all logs: TRL counts the tokens anew.
        states.append((trainer.state.log_history[-3]["loss"], trainer.fingerprint()))
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("config", "name", "advice"),
    [(trl.SFTConfig, "max_seq_length", "write max_length="), (trl.DPOConfig, "max_prompt_length", "leave it out: ")],
)
def test_a_note_says_what_replaces_an_argument_of_an_older_trl(
    capsys: pytest.CaptureFixture[str], config: Any, name: str, advice: str
) -> None:
    with pytest.raises(TypeError) as raised:
        config("out", **{name: 1})
    sys.excepthook(raised.type, raised.value, raised.tb)
    assert f"{name} is of an older TRL; {advice}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "advice"),
    [("tokenizer", "processing_class=tokenizer"), ("max_seq_length", "SFTConfig; .* as max_length=")],
)
def test_an_argument_of_2024_of_a_trainer_is_answered(tmp_path: Any, name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"got {name}=, which .*{advice}"):
        distribute(trl.SFTTrainer)(llama(), trl.SFTConfig(str(tmp_path), use_cpu=True), **{name: 1})
