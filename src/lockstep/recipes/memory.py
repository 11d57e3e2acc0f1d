"""What a recipe may do when memory is short, as one frozen object, and how it is done to a transformers model.

    from_pretrained(name, **loading(choices, device)) -> with_choices(model, choices) -> strategy.mirror, or a Trainer

Half precision in the forward pass (``precision="bf16"``) is ``compile``'s, or the Trainer's, business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.config_checks import at_least, one_of

Task = Literal["SEQ_CLS", "TOKEN_CLS", "CAUSAL_LM", "SEQ_2_SEQ_LM", "QUESTION_ANS", "FEATURE_EXTRACTION"]
"""peft's names for what a model does; it trains a classifier's head in full beside the adapters."""

ALL_LINEAR = "all-linear"
"""As the only target: every linear layer but the head."""
HEADS = ("classifier", "score", "lm_head", "cls", "qa_outputs")
"""What transformers calls the heads of its models."""
_EXAMPLE = "r=8,alpha=16,dropout=0.05,targets=query+value"
_LARGEST_R = 4096
_HALVES = {torch.bfloat16, torch.float16}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters' settings.

    Args:
        r: rank: the width of the adapters.
        alpha: what the adapters are multiplied by, over r; None is 2 r.
        dropout: probability, for what goes into the adapters.
        targets: names of the linear layers that get adapters, such as query and value; none are peft's choice for the
            kind of model, and ``all-linear`` is every linear layer but the head.
        modules_to_save: parts that are trained in full beside the adapters, and saved with them; peft adds the head of
            a classifier.

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
        if self.r > _LARGEST_R:
            raise ConfigError(f"lora r={self.r} was given, expected at most {_LARGEST_R}; 4 to 64 is usual")
        if self.alpha is not None:
            at_least("lora alpha", self.alpha, 1)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora dropout={self.dropout} was given, expected a probability in [0, 1); try 0.05")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ConfigError(f"lora targets={'+'.join(self.targets)} was given; {ALL_LINEAR} stands alone")

    @classmethod
    def parse(cls, text: str) -> Lora:
        """From ``name=value`` pairs with commas between them, several names of layers with a plus.

        Raises:
            ConfigError: no pair, no such setting, twice the same, or a bad value.
        """
        values: dict[str, Any] = {}
        for name, value in _pairs(text):
            if name not in _READERS:
                raise ConfigError(f"lora has no setting {name!r}; choose from {', '.join(_READERS)}: {_EXAMPLE}")
            if name in values:
                raise ConfigError(f"lora={text!r} sets {name} twice; give it once")
            values[name] = _READERS[name](name, value)
        return cls(**values)

    @property
    def scaled_by(self) -> int:
        """``alpha``, or what stands for it."""
        return 2 * self.r if self.alpha is None else self.alpha


def add_lora(model: nn.Module, lora: Lora, *, task: Task | None = None) -> Any:
    """Freezes ``model`` and puts adapters into it, in place; drawn from torch's default generator.

    Call it before ``strategy.mirror`` or ``Trainer``. Afterwards only adapters, and parts trained in full, require
    gradients; ``merge_and_unload()`` of the result gives the plain model back with the adapters added to its weights.

    Args:
        model: a transformers model, on any device and of any dtype. What is trained is float32: in bfloat16 an update
            of less than 1/256 of a weight would be lost.
        lora: the adapters.
        task: what the model does; None trains no head.

    Returns:
        The peft.PeftModel around ``model``.

    Raises:
        ConfigError: the model has no such layers, or layers that take no adapters, or peft knows none to choose for it.
        MissingExtraError: peft is not installed.
    """
    peft = require("peft", "text")
    _check_parts(model, lora)
    config = peft.LoraConfig(
        task_type=task,
        r=lora.r,
        lora_alpha=lora.scaled_by,
        lora_dropout=lora.dropout,
        target_modules=_targets(lora),
        modules_to_save=list(lora.modules_to_save) or None,
    )
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        if lora.targets:
            raise ConfigError(f"lora does not go into {type(model).__name__}: {str(error).splitlines()[0]}") from error
        raise ConfigError(
            f"lora has no targets, and peft knows none for {type(model).__name__}; name some with "
            f"targets={'+'.join(_linear_layers(model)[:2])}, or targets={ALL_LINEAR}"
        ) from error
    _train_in_float32(adapted)
    return adapted


def trained_parameters(model: nn.Module) -> int:
    """How many numbers are trained: elements of parameters that require a gradient, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _train_in_float32(adapted: nn.Module) -> None:
    """Of parts that are trained in full; peft leaves them in the model's dtype, and only its own layers not."""
    wrapper = require("peft.utils", "text").ModulesToSaveWrapper
    for name, wrapped in adapted.named_modules():
        if isinstance(wrapped, wrapper):
            for part in wrapped.modules_to_save.values():
                halves = {parameter.dtype for parameter in part.parameters()} & _HALVES
                if halves:
                    part.float()
                    part.register_forward_pre_hook(_as_float32)
                    if not name.endswith(HEADS):  # a head's values go into the loss; others into frozen layers
                        part.register_forward_hook(partial(_as, halves.pop()))


def _as_float32(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.float() if isinstance(arg, Tensor) and arg.dtype in _HALVES else arg for arg in args)


def _as(dtype: torch.dtype, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
    return output.to(dtype) if isinstance(output, Tensor) else output


def _targets(lora: Lora) -> list[str] | str | None:
    if lora.targets == (ALL_LINEAR,):
        return ALL_LINEAR
    return list(lora.targets) or None


def _check_parts(model: nn.Module, lora: Lora) -> None:
    """Refuses names of no layer: peft passes over one that it does not find, as long as it finds another."""
    if lora.targets and lora.targets != (ALL_LINEAR,):
        known = _linear_layers(model)
        for target in lora.targets:
            if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
                raise ConfigError(f"{type(model).__name__} has no layer {target!r} for lora; its own: {_listed(known)}")
    for part in lora.modules_to_save:
        if not any(name.endswith(part) for name, _ in model.named_modules() if name):
            children = [name for name, _ in model.named_children()]
            raise ConfigError(f"{type(model).__name__} has no part {part!r} to train; its own: {_listed(children)}")


def _linear_layers(model: nn.Module) -> list[str]:
    """The last words of the names of linear layers, each once, in the model's order."""
    return list(
        dict.fromkeys(name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear))
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value):
            raise ConfigError(f"lora={text!r} was given, expected name=value with commas between: {_EXAMPLE}")
        yield name, value


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"lora {name}={value} was given, expected a whole number; try {name}=16") from None


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"lora {name}={value} was given, expected a number; try {name}=0.05") from None


def _names(name: str, value: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in value.split("+"))
    if not all(names):
        raise ConfigError(f"lora {name}={value} was given, expected names with + between: query+value")
    return names


_READERS: Mapping[str, Callable[[str, str], Any]] = {
    "r": _whole,
    "alpha": _whole,
    "dropout": _number,
    "targets": _names,
    "modules_to_save": _names,
}


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
