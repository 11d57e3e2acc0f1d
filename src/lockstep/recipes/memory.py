"""Fine-tuning with less memory: LoRA adapters, frozen weights of 16, 8 or 4 bits, and activation checkpointing.

    from_pretrained(name, **loading(choices, device)) -> with_choices(model, choices) -> strategy.mirror, or a Trainer

LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models") freezes the weights and trains two narrow
matrices beside each chosen linear layer; only these need gradients and optimizer state.

    x -> W x  (frozen)  +  alpha / r * B (A x)       A: [r, in], B: [out, r], B begins with zeros
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.config_checks import at_least, one_of, probability

Task = Literal["SEQ_CLS", "TOKEN_CLS", "CAUSAL_LM", "SEQ_2_SEQ_LM", "QUESTION_ANS", "FEATURE_EXTRACTION"]
"""Tasks of a model as peft calls them; a classifier's head is trained in full beside the adapters."""
LoadIn = Literal["bf16", "8bit", "4bit"]
"""Format of frozen weights: 2 bytes each, 1 byte, or half a byte."""

ALL_LINEAR = "all-linear"
"""As the only target: every linear layer except the head."""
HEADS = ("classifier", "score", "lm_head", "cls", "qa_outputs")
"""Names of the heads of transformers' models."""
_EXAMPLE = "r=8,alpha=16,dropout=0.05,targets=query+value"
_MAX_RANK = 4096
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
        modules_to_save: submodules that are trained in full and saved with the adapters; peft adds the head of a
            classifier.

    Example:
        >>> Lora.parse("r=8,targets=query+value")
        Lora(r=8, alpha=None, dropout=0.0, targets=('query', 'value'), modules_to_save=())
    """

    r: int = 8
    alpha: int | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least("lora r", self.r, 1)
        if self.r > _MAX_RANK:
            raise ConfigError(f"lora r={self.r} was given, expected at most {_MAX_RANK}; 4 to 64 is usual")
        if self.alpha is not None:
            at_least("lora alpha", self.alpha, 1)
        probability("lora dropout", self.dropout)
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ConfigError(f"lora targets={'+'.join(self.targets)} was given; {ALL_LINEAR} must be the only target")

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Reads ``name=value`` pairs separated by commas; "+" separates several names of layers."""
        known = cls.__dataclass_fields__
        values: dict[str, Any] = {}
        for pair in text.split(","):
            name, _, value = (part.strip() for part in pair.partition("="))
            if not (name and value):
                raise ConfigError(f"lora={text!r} was given, expected name=value pairs with commas: {_EXAMPLE}")
            if name not in known:
                raise ConfigError(f"lora has no setting {name!r}; choose from {', '.join(known)}: {_EXAMPLE}")
            if name in values:
                raise ConfigError(f"lora={text!r} sets {name} twice; give it once")
            values[name] = _parsed(name, value)
        return cls(**values)


def _parsed(name: str, value: str) -> Any:
    if name in ("targets", "modules_to_save"):
        names = tuple(part.strip() for part in value.split("+"))
        if not all(names):
            raise ConfigError(f"lora {name}={value} was given, expected names separated by +, such as query+value")
        return names
    kind, expected, example = (float, "a number", "0.05") if name == "dropout" else (int, "an integer", "16")
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"lora {name}={value} was given, expected {expected}; try {name}={example}") from None


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
        one_of("load_in", self.load_in, get_args(LoadIn))
        if self.lora is None:
            raise ConfigError(
                f"load_in={self.load_in!r} is for frozen weights, and without lora all weights are trained; give lora "
                "too, such as r=8, or leave load_in out"
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

    Afterwards only adapters, and submodules that are trained in full, require gradients; ``merge_and_unload()`` of the
    result returns the plain model with the adapters added to its weights. What is trained is float32: in bfloat16 an
    update of less than 1/256 of a weight would be lost. Weights are drawn from torch's default generator.

    Raises:
        ConfigError: the model has no such layers, its layers do not support adapters, or peft has no default targets
            for it.
        MissingExtraError: peft is not installed.
    """
    peft = require("peft", "text")
    _check_names(model, lora)
    config = peft.LoraConfig(
        task_type=task,
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets) or None,
        modules_to_save=list(lora.modules_to_save) or None,
    )
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        name = type(model).__name__
        if lora.targets:
            raise ConfigError(f"lora cannot be added to {name}: {str(error).splitlines()[0]}") from error
        raise ConfigError(
            f"lora has no targets, and peft has no default targets for {name}; give some, such as "
            f"targets={'+'.join(_linear_layers(model)[:2])}, or targets={ALL_LINEAR}"
        ) from error
    _train_in_float32(adapted)
    return adapted


def trained_parameters(model: nn.Module) -> int:
    """Returns the number of elements of the parameters that require gradients, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _train_in_float32(adapted: nn.Module) -> None:
    """Converts submodules that are trained in full, which peft leaves in the model's dtype, to float32."""
    wrapper = require("peft.utils", "text").ModulesToSaveWrapper
    for name, wrapped in adapted.named_modules():
        for module in wrapped.modules_to_save.values() if isinstance(wrapped, wrapper) else ():
            halves = {parameter.dtype for parameter in module.parameters()} & _HALF_DTYPES
            if halves:
                module.float()
                module.register_forward_pre_hook(_inputs_to_float32)
                if not name.endswith(HEADS):  # a head's output goes into the loss, others into frozen layers
                    module.register_forward_hook(partial(_output_to, halves.pop()))


def _inputs_to_float32(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.float() if isinstance(arg, Tensor) and arg.dtype in _HALF_DTYPES else arg for arg in args)


def _output_to(dtype: torch.dtype, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
    return output.to(dtype) if isinstance(output, Tensor) else output


def _check_names(model: nn.Module, lora: Lora) -> None:
    """Checks the names of layers; peft ignores an unknown name as long as it knows another."""
    kind, names = type(model).__name__, [name for name, _ in model.named_modules() if name]
    for target in lora.targets:
        if target != ALL_LINEAR and not any(name == target or name.endswith(f".{target}") for name in names):
            known = ", ".join(_linear_layers(model)) or "none"
            raise ConfigError(f"{kind} has no layer {target!r} for lora; its linear layers: {known}")
    for module in lora.modules_to_save:
        if not any(name.endswith(module) for name in names):
            known = ", ".join(name for name, _ in model.named_children()) or "none"
            raise ConfigError(f"{kind} has no submodule {module!r} to train; its submodules: {known}")


def _linear_layers(model: nn.Module) -> list[str]:
    """The last parts of the names of linear layers, each once, in the model's order."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
