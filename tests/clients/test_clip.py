"""CLIP of transformers in the Trainer: its contrastive loss over the whole batch, by a compute_loss that gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.clients.training import compare as compare

import lockstep as ls
from lockstep.errors import CollectiveError


def clip() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 32, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 3, "pad_token_id": 0}
    image = {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=sizes | text, vision_config=sizes | image, projection_dim=8)
    return transformers.CLIPModel(config)


def pairs(number: int, seed: int) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.cat([torch.randint(4, 32, (6,), generator=random), torch.tensor([2])]),
            "pixel_values": torch.randn(3, 8, 8, generator=random),
        }
        for _ in range(number)
    ]


class CLIPTrainer(transformers.Trainer):
    """Takes the embeddings of a shard's rows from the model, and the loss of those of all replicas."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**{**inputs, "return_loss": False})
        texts, images = ls.gather_rows((outputs.text_embeds, outputs.image_embeds))  # of the whole batch
        scores = model.logit_scale.exp() * texts @ images.T
        numbers = torch.arange(len(scores), device=scores.device)
        loss = (F.cross_entropy(scores, numbers) + F.cross_entropy(scores.T, numbers)) / 2
        return (loss, outputs) if return_outputs else loss


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**transformers.default_data_collator(rows), "return_loss": True}


def make(base: type, args: dict[str, Any], *, last: tuple[int, int] = (5, 7), **named: Any) -> Any:
    """``last``: the rows of the last batches of training and evaluation."""
    config = transformers.TrainingArguments(**args, eval_strategy="epoch", remove_unused_columns=False)
    base = transformers.Trainer if base is CLIPTrainer else base  # on one device the model's own loss
    return base(
        clip(), config, collate, train_dataset=pairs(12 * 7 + last[0], 1), eval_dataset=pairs(12 + last[1], 2), **named
    )


@pytest.mark.filterwarnings("error:.*replicas.*")
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_loss_of_gathered_embeddings_equals_that_of_the_model_on_one_device(compare: Any, replicas: int) -> None:
    compare(make, CLIPTrainer, replicas=replicas)


class LoggingCLIPTrainer(CLIPTrainer):
    """Also gathers by the accelerator, as trainers do for their logs."""

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        result = super().compute_loss(*args, **named)
        self.accelerator.gather(torch.ones(1))
        return result


@pytest.mark.filterwarnings("error:.*replicas.*")
@pytest.mark.parametrize("base", [CLIPTrainer, LoggingCLIPTrainer])
def test_a_replica_without_rows_gathers_none(compare: Any, base: type) -> None:
    """The last batches have 3 rows for 4 replicas."""
    compare(make_short, base, replicas=4)


def make_short(base: type, args: dict[str, Any], **named: Any) -> Any:
    return make(CLIPTrainer if base is LoggingCLIPTrainer else base, args, last=(3, 3), **named)


def test_the_loss_of_the_model_itself_is_warned_of(make_strategy: Any, tmp_path: Any) -> None:
    from lockstep.integrations.transformers import Trainer

    config = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=1, use_cpu=True, report_to=[], remove_unused_columns=False
    )
    trainer = Trainer(clip(), config, collate, pairs(16, 1), strategy=make_strategy(2))
    with pytest.warns(UserWarning, match=r"compares or combines the rows|the same rows in two parts"):
        trainer.train()


@pytest.mark.filterwarnings("ignore")
def test_fewer_rows_than_replicas_in_the_first_batch_are_refused(make_strategy: Any, tmp_path: Any) -> None:
    from lockstep.integrations.transformers import distribute

    config = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=1, use_cpu=True, report_to=[], remove_unused_columns=False
    )
    trainer = distribute(CLIPTrainer)(clip(), config, collate, pairs(2, 1), strategy=make_strategy(3))
    with pytest.raises(CollectiveError, match=r"gather_rows|all_gather"):
        trainer.train()
