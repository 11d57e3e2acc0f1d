"""Fine-tuning with less memory: LoRA adapters, frozen weights of 16, 8 or 4 bits, and activation checkpointing.

    from_pretrained(name, **loading(choices, device)) -> with_choices(model, choices) -> strategy.mirror, or a Trainer

LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models") freezes the weights and trains two narrow
matrices beside each chosen linear layer; only these need gradients and optimizer state.

    x -> W x  (frozen)  +  alpha / r * B (A x)       A: [r, in], B: [out, r], B begins with zeros
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lockstep.checks import check_choice
from lockstep.errors import ConfigError
from lockstep.extras import require

Task = Literal["SEQ_CLS", "TOKEN_CLS", "CAUSAL_LM", "SEQ_2_SEQ_LM", "QUESTION_ANS", "FEATURE_EXTRACTION"]
"""Tasks of a model as peft calls them; a classifier's head is trained in full beside the adapters."""
LoadIn = Literal["bf16", "8bit", "4bit"]
"""Format of frozen weights: 2 bytes each, 1 byte, or half a byte."""

ALL_LINEAR = "all-linear"
"""As the only target: every linear layer except the head."""
HEADS = ("classifier", "score", "lm_head", "cls", "qa_outputs")
"""Names of the heads of transformers' models."""
_EXAMPLE = "r=8,alpha=16,dropout=0.05,targets=query+value"
_HALF_DTYPES = {torch.bfloat16, torch.float16}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Settings of LoRA adapters.

    Args:
        r: rank of the adapters.
        alpha: scale of the adapters, divided by r; None is 2 r.
        dropout: dropout probability of the adapters' input.
        targets: names of the linear layers that get adapters, such as query and value; empty for peft's choice for the
            type of model, and ``all-linear`` for every linear layer except the head.

    Example:
        >>> Lora.parse("r=8,targets=query+value")
        Lora(r=8, alpha=None, dropout=0.0, targets=('query', 'value'))
    """

    r: int = 8
    alpha: int | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.r < 1 or (self.alpha is not None and self.alpha < 1) or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"lora r={self.r}, alpha={self.alpha}, dropout={self.dropout} was given, expected r and alpha of at"
                " least 1, and a dropout in [0, 1)"
            )
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ConfigError(f"lora targets={'+'.join(self.targets)} was given; {ALL_LINEAR} must be the only target")

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Reads ``name=value`` pairs separated by commas; "+" separates several names of layers."""
        kinds: dict[str, Callable[[str], Any]] = {
            "r": int,
            "alpha": int,
            "dropout": float,
            "targets": lambda names: tuple(names.split("+")),
        }
        try:
            pairs = [pair.split("=") for pair in text.replace(" ", "").split(",")]
            values = {name: kinds[name](value) for name, value in pairs}
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"lora={text!r} was given, expected some of {', '.join(kinds)} as name=value, such as {_EXAMPLE}"
            ) from error
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class MemoryChoices:
    """What is done to save memory; nothing by default.

    Args:
        lora: adapters beside frozen weights; None trains all weights.
        load_in: format of the frozen weights, which needs ``lora``; None is float32.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
    """

    lora: Lora | None = None
    load_in: LoadIn | None = None
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.load_in is None:
            return
        check_choice("load_in", self.load_in, get_args(LoadIn))
        if self.lora is None:
            raise ConfigError(
                f"load_in={self.load_in!r} is for frozen weights, and without lora all are trained; give lora too"
            )


def loading(choices: MemoryChoices, device: torch.device) -> dict[str, Any]:
    """Returns arguments of ``from_pretrained`` for 8bit and 4bit; the other choices take effect in ``with_choices``.

    Raises:
        ConfigError: 8-bit or 4-bit weights were asked for without a GPU.
        MissingExtraError: bitsandbytes is not installed, or accelerate, which transformers needs for it.
    """
    if choices.load_in not in ("8bit", "4bit"):
        return {} if choices.load_in is None else {"dtype": torch.bfloat16}
    if device.type != "cuda":
        raise ConfigError(
            f"load_in={choices.load_in!r} needs a GPU, since bitsandbytes multiplies such weights there, and this runs "
            f"on {device}; use load_in='bf16', or leave it out"
        )
    for package in ("bitsandbytes", "accelerate"):
        require(package, "quantized")
    settings: dict[str, Any] = {"load_in_8bit": True}
    if choices.load_in == "4bit":
        settings = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.bfloat16,
        }
    config = require("transformers", "quantized").BitsAndBytesConfig(llm_int8_skip_modules=list(HEADS), **settings)
    # Embeddings, norms and the head stay in float32 (Dettmers et al. 2023, "QLoRA").
    return {"quantization_config": config, "device_map": {"": device}, "dtype": torch.float32}


def with_choices(model: Any, choices: MemoryChoices, *, task: Task | None = None) -> Any:
    """Applies the choices to a transformers model in place; call it before ``strategy.mirror`` or ``Trainer``.

    With LoRA it returns the peft.PeftModel around the model; ``task`` decides which head is trained, None trains none.

    Raises:
        ConfigError: the model does not support adapters or activation checkpointing.
        MissingExtraError: peft is not installed.
    """
    if choices.load_in == "bf16":
        model.to(torch.bfloat16)
    adapted = model if choices.lora is None else add_lora(model, choices.lora, task=task)
    if choices.gradient_checkpointing:
        checkpoint_layers(model)
    return adapted


def checkpoint_layers(model: Any) -> None:
    """Makes a transformers model keep only the input of each layer, and recompute the rest in the backward pass.

    The gradients are the same, dropout included (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

    Raises:
        ConfigError: the model does not support it.
    """
    kwargs = {"use_reentrant": False}  # as torch recommends; it does not require gradients of the inputs
    try:
        # New versions of transformers have another name for it and warn of the old one, the only one in old versions.
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    except ValueError as error:
        name = type(model).__name__
        raise ConfigError(f"gradient_checkpointing: {name} does not support it; leave it out") from error


def add_lora(model: nn.Module, lora: Lora, *, task: Task | None = None) -> Any:
    """Freezes ``model`` and adds adapters to it, in place; returns the peft.PeftModel around it.

    Afterwards only adapters, and the head that belongs to the task, require gradients; ``merge_and_unload()`` of the
    result returns the plain model with the adapters added to its weights. What is trained is float32: in bfloat16 an
    update of less than 1/256 of a weight would be lost. Weights are drawn from torch's default generator.

    Raises:
        ConfigError: the model has no such layers, its layers do not support adapters, or peft has no default targets
            for it.
        MissingExtraError: peft is not installed.
    """
    peft = require("peft", "text")
    names = [name for name, _ in model.named_modules()]
    linear = {name.rpartition(".")[2]: None for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    about = f"{type(model).__name__}; its linear layers: {', '.join(linear)}"
    for target in lora.targets:  # peft ignores an unknown name as long as it knows another
        if target != ALL_LINEAR and not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(f"no layer {target!r} for lora in {about}")
    config = peft.LoraConfig(
        task_type=task,
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets) or None,
    )
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"lora cannot be added ({reason}) to {about}; give some of them as targets") from error
    _train_head_in_float32(adapted)
    return adapted


def trained_parameters(model: nn.Module) -> int:
    """Returns the number of elements of the parameters that require gradients, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _train_head_in_float32(adapted: nn.Module) -> None:
    """Converts a head that is trained in full, which peft leaves in the model's dtype, to float32."""
    wrapper = require("peft.utils", "text").ModulesToSaveWrapper
    for wrapped in adapted.modules():
        for module in wrapped.modules_to_save.values() if isinstance(wrapped, wrapper) else ():
            if {parameter.dtype for parameter in module.parameters()} & _HALF_DTYPES:
                module.float()
                # The layers below compute in bfloat16, and a linear layer refuses inputs of another dtype than its
                # weights.
                module.register_forward_pre_hook(_inputs_to_float32)


def _inputs_to_float32(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.float() if isinstance(arg, Tensor) and arg.dtype in _HALF_DTYPES else arg for arg in args)
