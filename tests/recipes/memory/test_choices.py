from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError, MissingExtraError
from lockstep_tools.recipes.memory import LoadIn, Lora, MemoryChoices, checkpoint_layers, loading, with_choices

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
LORA = Lora(r=2)


def activations(model: Any) -> int:
    """Bytes that are kept for the backward pass, weights aside."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = model(input_ids=torch.ones(4, 32, dtype=torch.int64)).logits
    assert held.requires_grad
    return sum(kept.values())


def test_nothing_is_done_by_default(bert: Any):
    choices = MemoryChoices()
    assert loading(choices, CPU) == {}
    assert with_choices(bert, choices) is bert
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in bert.parameters())
    assert not any(getattr(part, "gradient_checkpointing", False) for part in bert.modules())


def test_all_choices_together(bert: Any):
    choices = MemoryChoices(lora=LORA, load_in="bf16", gradient_checkpointing=True)
    model = with_choices(bert, choices, task="SEQ_CLS")
    assert loading(choices, CPU) == {"dtype": torch.bfloat16}
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    assert (frozen, trained) == ({torch.bfloat16}, {torch.float32})
    assert all(layer.gradient_checkpointing for layer in bert.bert.encoder.layer)


def test_checkpointing_keeps_less_and_gives_the_same_gradients(bert: Any):
    def gradients() -> list[torch.Tensor]:
        bert.zero_grad()
        torch.manual_seed(1)
        bert(input_ids=torch.arange(24).reshape(2, 12), labels=torch.tensor([0, 1])).loss.backward()
        return [parameter.grad for parameter in bert.parameters() if parameter.grad is not None]

    before = activations(bert)
    plain = gradients()
    checkpoint_layers(bert)

    assert activations(bert) < before / 3
    assert all(torch.equal(one, other) for one, other in zip(plain, gradients(), strict=True))


def test_a_model_that_cannot_be_checkpointed_is_named():
    from transformers import PretrainedConfig, PreTrainedModel

    class Fixed(PreTrainedModel):
        config_class = PretrainedConfig

    with pytest.raises(ConfigError, match=r"^gradient_checkpointing: Fixed does not support it; leave it"):
        checkpoint_layers(Fixed(PretrainedConfig()))


@pytest.mark.parametrize("load_in", ["bf16", "8bit", "4bit"])
def test_weights_in_another_form_are_frozen_and_need_lora(load_in: LoadIn):
    with pytest.raises(ConfigError, match=rf"^load_in='{load_in}' is for frozen weights, .* give lora too$"):
        MemoryChoices(load_in=load_in)


def test_an_unknown_form_is_refused_with_the_known():
    with pytest.raises(ConfigError, match=r"^load_in='2bit' is unknown; choose one of bf16, 8bit, 4bit$"):
        MemoryChoices(lora=LORA, load_in="2bit")  # type: ignore[arg-type]


@pytest.mark.parametrize("load_in", ["8bit", "4bit"])
def test_without_a_gpu_the_reason_is_one_line(load_in: LoadIn):
    message = f"^load_in='{load_in}' needs a GPU, since .*, and this runs on cpu; use load_in='bf16', or leave it out$"
    with pytest.raises(ConfigError, match=message):
        loading(MemoryChoices(lora=LORA, load_in=load_in), CPU)


@pytest.mark.parametrize("missing", ["bitsandbytes", "accelerate"])
def test_without_the_package_the_extra_is_named(missing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        MissingExtraError, match=rf"^the package '{missing}' is not installed; .*'torch-lockstep\[quantized"
    ):
        loading(MemoryChoices(lora=LORA, load_in="8bit"), GPU)


def test_on_a_gpu_transformers_is_told_the_form_and_the_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    in_8, in_4 = (loading(MemoryChoices(lora=LORA, load_in=form), GPU) for form in ("8bit", "4bit"))
    assert in_8["device_map"] == in_4["device_map"] == {"": GPU}
    assert in_8["quantization_config"].load_in_8bit
    assert in_4["quantization_config"].load_in_4bit
    assert in_4["quantization_config"].bnb_4bit_quant_type == "nf4"
    assert "classifier" in in_8["quantization_config"].llm_int8_skip_modules  # it is trained
