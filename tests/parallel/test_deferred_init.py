"""The first values of models on the meta device: whose way of initialising they follow, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.errors import ConfigError
from lockstep.parallel.deferred_init import DeferredInit

WORDS, WIDTH, LAYERS = 500, 32, 2


def config_of(name: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": WIDTH}
    if name == "gpt2":
        return transformers.GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=16)
    layers = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 64}
    if name == "bert":
        return transformers.BertConfig(**sizes, **layers)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    return transformers.LlamaConfig(**sizes, **layers, rope_parameters=rope)


def model_of(name: str) -> nn.Module:
    import transformers

    kinds = {"bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
    model: nn.Module = getattr(transformers, kinds[name])(config_of(name))
    return model


def all_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_models_of_transformers_begin_as_transformers_begins_them(name: str):
    plain = all_of(model_of(name))
    with torch.device("meta"):
        blank = model_of(name)

    first = DeferredInit(blank, "seed")

    for key, expected in plain.items():
        found = first.make(key)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        if expected.unique().numel() < expected.numel() // 2 or not expected.requires_grad:  # ones, zeros, positions
            assert torch.equal(found, expected), key
        else:
            room = 6 / expected.numel() ** 0.5
            assert abs(found.std() / expected.std() - 1) < room, key
            assert abs(found.mean() / expected.std()) < room, key


def test_the_model_of_the_recipe_begins_as_transformers_begins_it():
    from lockstep_tools.recipes.mlm.config import MlmConfig
    from lockstep_tools.recipes.mlm.model import new_bert

    with torch.device("meta"):
        blank = new_bert(MlmConfig(hidden=64, heads=2, feed_forward=64, vocabulary=WORDS))

    first = DeferredInit(blank, "seed")

    assert first.make("cls.predictions.transform.dense.weight").std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first.make("cls.predictions.bias"), torch.zeros(WORDS))
    assert torch.equal(first.make("cls.predictions.decoder.weight")[0], torch.zeros(64))


def test_the_row_of_padding_is_zero():
    with torch.device("meta"):
        blank = model_of("bert")

    words = DeferredInit(blank, "seed").make("cls.predictions.decoder.weight")  # the name of the head that is tied

    assert torch.equal(words[0], torch.zeros(WIDTH))
    assert torch.equal(words, DeferredInit(blank, "seed").make("bert.embeddings.word_embeddings.weight"))


def test_residual_layers_of_gpt2_begin_smaller():
    with torch.device("meta"):
        first = DeferredInit(model_of("gpt2"), "seed")

    inner, outer = first.make("transformer.h.0.mlp.c_fc.weight"), first.make("transformer.h.0.mlp.c_proj.weight")

    assert outer.std() == pytest.approx(float(inner.std()) / (2 * LAYERS) ** 0.5, rel=0.1)


def test_values_depend_on_the_seed_and_the_name_alone():
    with torch.device("meta"):
        blank = model_of("gpt2")
    before = torch.get_rng_state()
    one, other, third = DeferredInit(blank, "1"), DeferredInit(blank, "1"), DeferredInit(blank, "2")
    names = [f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(LAYERS)]

    values = [one.make(name) for name in names]

    assert torch.equal(other.make(names[1]), values[1])
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(third.make(names[0]), values[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(each.is_meta for each in blank.parameters())


def test_modules_of_torch_begin_by_reset_parameters():
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.TransformerEncoderLayer(64, 4))

    first = DeferredInit(blank, "seed")

    assert float(first.make("0.weight").abs().max()) <= 1 / 8
    assert torch.equal(first.make("1.running_var"), torch.ones(64))
    assert torch.equal(first.make("2.self_attn.in_proj_bias"), torch.zeros(192))
    assert float(first.make("2.self_attn.in_proj_weight").abs().max()) <= (6 / 256) ** 0.5


def test_values_that_are_there_are_left_alone():
    with torch.device("meta"):
        blank = nn.BatchNorm1d(4)
    blank.running_mean = torch.full((4,), 3.0)

    DeferredInit(blank, "seed").make("weight")

    assert torch.equal(blank.running_mean, torch.full((4,), 3.0))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(2, 2), nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        self.norm.copy_(self.inner.weight.norm())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(3)), nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.norm.copy_(self.weight.norm())


class Halved(nn.Linear):
    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        self.weight.div_(2)


def test_what_nothing_initialises_is_refused():
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(3, 3), Scale())

    with pytest.raises(ConfigError, match=r"1\.factor is on the meta device, and nothing .*; give Scale a reset_param"):
        DeferredInit(blank, "seed").make("1.factor")


def test_what_is_made_from_the_weights_of_another_module_is_refused():
    with torch.device("meta"):
        first = DeferredInit(Normed(), "seed")

    with pytest.raises(ConfigError, match=r"first values of the model cannot be made on the meta device .* outside"):
        first.make("norm")


def test_values_may_depend_on_others_of_the_module():
    with torch.device("meta"):
        first = DeferredInit(Scaled(), "seed")

    assert torch.equal(first.make("norm"), first.make("weight").norm())


def test_what_is_adjusted_begins_with_what_it_is_adjusted_from():
    with torch.device("meta"):
        blank = Halved(2, 2)

    assert torch.equal(DeferredInit(blank, "seed").make("weight"), torch.full((2, 2), 0.5))


def test_one_worker_begins_a_model_on_the_meta_device():
    strategy = ls.ParallelStrategy(seed=1)
    with strategy.scope(), torch.device("meta"):
        model = ls.Model(model_of("bert"))

    outputs = model.predict([{"input_ids": torch.ones(2, 4, dtype=torch.long)}])

    assert outputs["logits"].isfinite().all()
    assert not any(each.is_meta for each in model.module.parameters())
    strategy.close()


def test_another_strategy_refuses_a_model_on_the_meta_device():
    with torch.device("meta"):
        blank = nn.Linear(2, 2)

    with pytest.raises(ConfigError, match=r"Linear is on the meta device .* ls\.ParallelStrategy"):
        ls.Model(blank)
