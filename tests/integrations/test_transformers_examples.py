"""Collators that make other than one row an example: a replica gets whole ones, the numbers are those of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import Tensor

transformers = pytest.importorskip("transformers")

from lockstep.errors import DataError  # noqa: E402  what it needs is there
from lockstep.integrations.transformers import Trainer  # noqa: E402


def pairs(number: int = 25) -> list[dict[str, Any]]:
    """A question with a better and a worse answer, of different lengths, each."""
    random = torch.Generator().manual_seed(4)

    def text() -> list[int]:
        return torch.randint(1, 40, (int(torch.randint(2, 13, (), generator=random)),), generator=random).tolist()

    return [{"chosen": text(), "rejected": text(), "margin": index / number} for index in range(number)]


def padded(texts: list[list[int]], *, left: bool = False) -> dict[str, Tensor]:
    longest = max(map(len, texts))
    filled = [[0] * (longest - len(text)) + text if left else text + [0] * (longest - len(text)) for text in texts]
    ids = torch.tensor(filled)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def blocks(examples: list[dict[str, Any]], *, left: bool = False) -> dict[str, Any]:
    """All chosen rows, then all rejected ones, as the collators of preference trainers."""
    texts = [example[key] for key in ("chosen", "rejected") for example in examples]
    margins = torch.tensor([example["margin"] for example in examples], dtype=torch.float64)
    return {**padded(texts, left=left), "margin": margins, "names": [str(text[0]) for text in texts]}


def interleaved(examples: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [example[key] for example in examples for key in ("chosen", "rejected")]
    return {**padded(texts), "margin": torch.tensor([example["margin"] for example in examples], dtype=torch.float64)}


class Noisy:
    """Draws tokens: no part of a batch is what it makes of these examples alone."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = blocks(examples)
        self.sizes.append(len(examples))
        batch["input_ids"][:, 0] = torch.randint(1, 40, (len(batch["input_ids"]),))
        return batch


def preferring(base: type, *, rows_of: Callable[[Tensor], tuple[Tensor, Tensor]]) -> type:
    class Preferring(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            chosen, rejected = rows_of(scores[:, 0])
            loss = -F.logsigmoid(chosen - rejected - inputs["margin"]).mean()
            return (loss, {"loss": loss, "scores": scores}) if return_outputs else loss

    return Preferring


ROWS_OF = {
    "blocks": lambda scores: scores.chunk(2),
    "interleaved": lambda scores: (scores[::2], scores[1::2]),
}


def task(tiny: Any, collator: Any, order: str = "blocks", **args: Any) -> Any:
    settings = {"remove_unused_columns": False, "eval_strategy": "epoch", **args}
    return tiny.Task(
        model=lambda: tiny.model(num_labels=1),
        train=pairs(),
        valid=pairs(14),
        batch=12,
        args=settings,
        more={"data_collator": collator, "compute_metrics": metric},
        trainer=partial(preferring, rows_of=ROWS_OF[order]),
    )


def metric(prediction: Any) -> dict[str, float]:
    """A number that depends on the order of all rows."""
    scores = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"order": float((scores[:, 0] * (1 + torch.arange(len(scores)).double().numpy())).sum())}


COLLATORS = {
    "blocks": ("blocks", blocks),
    "padded on the left": ("blocks", partial(blocks, left=True)),
    "interleaved": ("interleaved", interleaved),
}


@pytest.mark.parametrize(
    ("collator", "replicas", "args"),
    [
        ("blocks", 2, {"dataloader_num_workers": 1}),
        pytest.param("blocks", 3, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        # The last batches have one example and two.
        pytest.param("blocks", 4, {}, marks=pytest.mark.slow),
        pytest.param("padded on the left", 3, {}, marks=pytest.mark.slow),
        pytest.param("interleaved", 3, {}, marks=pytest.mark.slow),
    ],
)
def test_pairs_stay_together_and_the_numbers_are_those_of_one_device(
    tiny: Any, make_strategy: MakeStrategy, collator: str, replicas: int, args: Any
) -> None:
    order, collate = COLLATORS[collator]
    given = task(tiny, collate, order, **args)
    theirs = tiny.train(given, transformers.Trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = tiny.train(given, Trainer, replicas=replicas, strategy=make_strategy(replicas))
    tiny.assert_same(ours, theirs)


def test_rows_that_cannot_be_told_from_the_batch_are_collated_for_each_replica(
    tiny: Any, make_strategy: MakeStrategy
) -> None:
    collate = Noisy()
    given = task(tiny, collate, eval_strategy="no")
    tiny.train(given, Trainer, replicas=2, strategy=make_strategy(2))
    assert max(collate.sizes) == 12
    assert 6 in collate.sizes  # the examples of a replica
    with pytest.raises(DataError, match=r"24 rows for 12 examples, in an order .* prediction_loss_only=True"):
        tiny.train(task(tiny, Noisy()), Trainer, replicas=2, strategy=make_strategy(2))


def test_a_collator_that_takes_whole_batches_alone_is_refused(tiny: Any, make_strategy: MakeStrategy) -> None:
    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        if len(examples) < 12:
            raise ValueError("12 examples are needed")
        return Noisy()(examples)

    with pytest.raises(DataError, match=r"24 rows of 12 examples, and failed .*ValueError: 12 .*one rep"):
        tiny.train(task(tiny, collate), Trainer, replicas=2, strategy=make_strategy(2))


def test_a_collator_whose_rows_depend_on_the_whole_batch_is_refused(tiny: Any, make_strategy: MakeStrategy) -> None:
    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        return {**padded([example["chosen"] for example in examples] + [[1, 2]]), "margin": torch.tensor(0.0)}

    with pytest.raises(DataError, match=r"made 13 rows of 12 examples, and other rows .*one replica"):
        tiny.train(task(tiny, collate), Trainer, replicas=2, strategy=make_strategy(2))


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 512}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).double()


def test_flattened_texts_are_flattened_for_each_replica(tiny: Any, make_strategy: MakeStrategy) -> None:
    given = tiny.Task(
        model=llama,
        train=[{"input_ids": pair["chosen"]} for pair in pairs()],
        valid=[{"input_ids": pair["rejected"]} for pair in pairs(14)],
        batch=12,
        args={"eval_strategy": "epoch"},
        more={"data_collator": transformers.DataCollatorWithFlattening(), "compute_metrics": tokens},
    )
    theirs = tiny.train(given, transformers.Trainer)
    lengths: list[int] = []
    given.trainer = partial(recording, lengths=lengths)
    ours = tiny.train(given, Trainer, replicas=3, strategy=make_strategy(3))
    tiny.assert_same(ours, theirs)
    assert max(lengths) < max(len(pair["chosen"]) for pair in pairs()) * 5  # a replica has 4 texts of 12


def recording(base: type, *, lengths: list[int]) -> type:
    class Recording(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            lengths.append(inputs["input_ids"].shape[1])
            return super().compute_loss(model, inputs, *args, **named)

    return Recording


def tokens(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions
    right = prediction.label_ids >= 0
    weights = (1 + torch.arange(right.size).double().numpy()).reshape(right.shape)
    return {"order": float((logits[..., 0] * weights * right).sum())}


def choices(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """As many rows an example as it has choices, and one label an example."""
    counts = [2 + len(example["chosen"]) % 3 for example in examples]
    texts = [
        example["chosen"][: 1 + number] + example["rejected"][:3]
        for example, count in zip(examples, counts, strict=True)
        for number in range(count)
    ]
    return {**padded(texts), "counts": torch.tensor(counts), "labels": torch.tensor([count % 2 for count in counts])}


def choosing(base: type) -> type:
    class Choosing(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
            pairs = zip(scores.split(inputs["counts"].tolist()), inputs["labels"], strict=True)
            loss = torch.stack([F.cross_entropy(one[None], label[None]) for one, label in pairs]).mean()
            return (loss, {"loss": loss, "scores": scores}) if return_outputs else loss

    return Choosing


@pytest.mark.parametrize("replicas", [1, 2])
def test_several_rows_an_example_and_one_label(tiny: Any, make_strategy: MakeStrategy, replicas: int) -> None:
    given = tiny.Task(
        model=lambda: tiny.model(num_labels=1),
        train=pairs(),
        valid=pairs(14),
        batch=12,
        args={"prediction_loss_only": True, "remove_unused_columns": False},
        more={"data_collator": choices},
        trainer=choosing,
    )
    ours = tiny.train(given, Trainer, replicas=replicas, strategy=make_strategy(replicas))
    tiny.assert_same(ours, tiny.train(given, transformers.Trainer))
