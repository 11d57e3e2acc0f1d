"""A model with adapters on replicas: what is copied, what is saved, and what is left when training is over."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import nn

import lockstep as ls


@pytest.fixture(scope="module")
def fronts() -> Any:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "programs" / "fronts.py"), run_name="fronts"))


@pytest.fixture
def trained(fronts: Any, make_strategy: MakeStrategy) -> Any:
    """A model after a short training of its adapters and its head on two replicas, and the inputs of a batch."""
    case = fronts.Case(dtype=torch.float32)
    module = fronts.make(case)
    fronts.loop(make_strategy(2), module, case)
    return module.eval()


@pytest.fixture
def inputs(fronts: Any) -> dict[str, torch.Tensor]:
    return fronts.batches()[0][0]


def logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def test_frozen_weights_and_adapters_are_there_once_for_all_replicas(fronts: Any, make_strategy: MakeStrategy):
    module = fronts.make(fronts.Case(dtype=torch.float32))
    mirrored = make_strategy(4).mirror(module)
    places = [{parameter.data_ptr() for parameter in copy.parameters()} for copy in mirrored.copies]
    assert places == [places[0]] * 4
    assert len(places[0]) == len(list(module.parameters()))


def test_names_are_those_of_the_plain_model_and_only_what_is_trained_has_state(
    fronts: Any, make_strategy: MakeStrategy
):
    strategy, case = make_strategy(2), fronts.Case()
    module = fronts.make(case)
    names = list(module.state_dict())
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(fronts.optimizer_of(module, fronts.Case(all_parameters=True)))
    (x, y), *_ = fronts.batches()

    def step(batch: Any) -> None:
        ls.compute_average_loss(F.cross_entropy(mirrored(**batch[0]).logits, batch[1], reduction="none")).backward()
        optimizer.step()

    for batch in strategy.distribute_dataset([(x, y)]):
        strategy.run(step, (batch,))

    assert list(mirrored.state_dict()) == names
    with_state = {name for name, parameter in module.named_parameters() if optimizer.state.get(parameter)}
    assert with_state == {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_saved_adapters_make_the_trained_model_of_a_fresh_one(
    fronts: Any, trained: Any, inputs: dict[str, torch.Tensor], tmp_path: Path
):
    from peft import PeftModel

    trained.save_pretrained(tmp_path)
    fresh = fronts.make(fronts.Case(dtype=torch.float32)).unload()
    loaded = PeftModel.from_pretrained(fresh, tmp_path).eval()
    saved = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert saved < sum(value.numel() * 4 for value in trained.state_dict().values()) / 2
    assert torch.equal(logits(loaded, inputs), logits(trained, inputs))


def test_merged_adapters_leave_a_plain_model_of_the_same_answers(trained: Any, inputs: dict[str, torch.Tensor]):
    expected = logits(trained, inputs)
    merged = trained.merge_and_unload()
    assert not any("lora" in name or "base_model" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logits(merged, inputs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_full", [(), ("transform",)])
def test_tied_embeddings_stay_tied_and_frozen_beside_adapters_and_a_part_trained_in_full(
    fronts: Any, make_strategy: MakeStrategy, in_full: tuple[str, ...]
):
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForMaskedLM

    strategy = make_strategy(2)

    def train(on_replicas: bool) -> nn.Module:
        torch.manual_seed(0)
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        bert = BertForMaskedLM(BertConfig(vocab_size=fronts.VOCABULARY, **fronts.SIZES, **drops)).double()
        lora = LoraConfig(r=2, target_modules=["query", "dense"], modules_to_save=list(in_full) or None)
        model = get_peft_model(bert, lora)
        called = strategy.mirror(model) if on_replicas else model
        optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        optimizer = strategy.mirror(optimizer) if on_replicas else optimizer

        def step(x: Any, tokens: int) -> None:
            scores = called(**x).logits
            (F.cross_entropy(scores.flatten(0, 1), x["input_ids"].flatten(), reduction="sum") / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        for x, _ in fronts.batches()[:2]:
            if on_replicas:
                (shards,) = strategy.distribute_dataset([x])
                strategy.run(step, (shards, x["input_ids"].numel()))
            else:
                step(x, x["input_ids"].numel())
        copies = called.copies if on_replicas else [model]
        assert all(decoder is words and not words.requires_grad for decoder, words in map(_tie, copies))
        return model

    ours, theirs = train(True), train(False)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-9, atol=1e-12)


def _tie(model: Any) -> tuple[nn.Parameter, nn.Parameter]:
    inner = model.base_model.model
    return inner.cls.predictions.decoder.weight, inner.bert.embeddings.word_embeddings.weight
