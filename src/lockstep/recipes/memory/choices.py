"""What a recipe may do when memory is short, as one frozen object, and how it is done to a transformers model.

    from_pretrained(name, **loading(choices, device)) -> with_choices(model, choices) -> strategy.mirror, or a Trainer

Half precision in the forward pass (``precision="bf16"``) is ``compile``'s, or the Trainer's, business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.memory.lora import HEADS, Lora, Task, add_lora
from lockstep.recipes.settings import one_of

LoadIn = Literal["bf16", "8bit", "4bit"]
"""The form of frozen weights: 2 bytes each, 1 byte, or half a byte."""


@dataclass(frozen=True, kw_only=True)
class MemoryChoices:
    """What is done to need less memory. Nothing by default.

    Args:
        lora: adapters beside frozen weights; None trains all weights.
        load_in: the form of the frozen weights; None is float32.
        gradient_checkpointing: keep no activations inside layers, and compute them again in the backward pass.

    Raises:
        ConfigError: weights that are trained are asked for in another form.
    """

    lora: Lora | None = None
    load_in: LoadIn | None = None
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.load_in is None:
            return
        one_of("load_in", self.load_in, ("bf16", "8bit", "4bit"))
        if self.lora is None:
            raise ConfigError(
                f"load_in={self.load_in!r} keeps the weights as they are, and without lora they are what is trained; "
                "give lora too, such as lora r=8, or leave load_in out"
            )


def loading(choices: MemoryChoices, device: torch.device) -> dict[str, Any]:
    """What ``from_pretrained`` is to be given beside the name. Call it before anything else is done.

    Args:
        choices: 8bit and 4bit take effect here, the others in ``with_choices``.
        device: of the first replica.

    Raises:
        ConfigError: 8-bit or 4-bit weights without a GPU.
        MissingExtraError: bitsandbytes, or accelerate, which transformers needs for it, is not installed.
    """
    if choices.load_in not in ("8bit", "4bit"):
        return {} if choices.load_in is None else {"dtype": torch.bfloat16}
    if device.type != "cuda":
        raise ConfigError(
            f"load_in={choices.load_in!r} needs a GPU, since bitsandbytes multiplies such weights there, and this runs "
            f"on {device}; take load_in='bf16', or leave it out"
        )
    for package in ("bitsandbytes", "accelerate"):
        require(package, "quantized")
    # Embeddings, norms and the head stay in float32 (Dettmers et al. 2023, "QLoRA").
    return {"quantization_config": _form(choices.load_in), "device_map": {"": device}, "dtype": torch.float32}


def with_choices(model: Any, choices: MemoryChoices, *, task: Task | None = None) -> Any:
    """Does to ``model`` what is chosen, in place; call it before ``strategy.mirror`` or ``Trainer``.

    Args:
        model: a transformers model; with 8bit or 4bit, loaded with what ``loading`` gives.
        choices: what to do.
        task: what the model does, for LoRA; None trains no head.

    Returns:
        The model, or with LoRA the peft.PeftModel around it.

    Raises:
        ConfigError: the model cannot be adapted or checkpointed.
        MissingExtraError: peft is not installed.
    """
    if choices.load_in == "bf16":
        model.to(torch.bfloat16)
    adapted = model if choices.lora is None else add_lora(model, choices.lora, task=task)
    if choices.gradient_checkpointing:
        checkpoint_layers(model)
    return adapted


def checkpoint_layers(model: Any) -> None:
    """Has ``model`` keep only what goes into each layer, and compute the rest again in the backward pass.

    The gradients are the same, dropout included (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

    Args:
        model: a transformers model, or with adapters the model inside.

    Raises:
        ConfigError: the model's layers cannot be computed again.
    """
    kwargs = {"use_reentrant": False}  # the kind that torch recommends, and that needs no gradients of the inputs
    try:
        # Of late transformers has another name for it, and warns of the old one, which is all that there was before.
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    except ValueError as error:
        raise ConfigError(
            f"gradient_checkpointing: {type(model).__name__} cannot compute its layers again; leave it out"
        ) from error


def _form(load_in: str) -> Any:
    """Bitsandbytes' settings, in transformers' words."""
    settings = require("transformers", "quantized").BitsAndBytesConfig
    if load_in == "8bit":
        return settings(load_in_8bit=True, llm_int8_skip_modules=list(HEADS))
    return settings(
        load_in_4bit=True,
        llm_int8_skip_modules=list(HEADS),
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
