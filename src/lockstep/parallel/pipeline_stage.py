"""The stages of a pipeline: where a model is cut, a worker's stages, and torch's stage, which records its actions."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lockstep._torch_compat import EnableTorchFunction
from lockstep.errors import ConfigError, DataError
from lockstep.parallel.layer_split import check_layers, check_split, split_layers
from lockstep.parallel.pipeline_config import PipelineConfig
from lockstep.parallel.pipeline_trace import Action, ActionKind, Slot
from lockstep.parallel.transformers_plans import base_name, require_layers

PipelineSplit = Literal["auto"] | Sequence[int] | Sequence[str]
"""The number of layers of each stage, the names of modules at which the second and further stages begin, or "auto"."""
_TOKENS, _EMBEDDED = "input_ids", "inputs_embeds"


class ActiveStage:
    """The number of the stage that computes now, -1 before the first; and the hidden states that it has received."""

    def __init__(self) -> None:
        self.stage = -1
        self.received: Tensor | None = None

    def restrict(self, part: nn.Module, stage: int, otherwise: nn.Module) -> None:
        """Changes a part's forward: the part computes for ``stage``, and ``otherwise`` for other stages."""
        stage_forward, other_forward = part.forward, otherwise.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return (stage_forward if self.stage == stage else other_forward)(*args, **kwargs)

        # On the object and not as a wrapping module, which would change the names in the state_dict.
        part.forward = forward


class StandIn(nn.Module):
    """Stands in for a module that another stage has; ``dtype`` is that of its weights."""

    def __init__(self, kind: str = "identity", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._kind = kind
        # ViT converts what it gives its embeddings to the dtype of these weights.
        self.patch_embeddings = SimpleNamespace(projection=SimpleNamespace(weight=torch.empty(0, dtype=dtype)))

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which says where the module is, for what the module may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                "another worker of the pipeline has the stage of this module, and in its place is a "
                f"{type(self).__name__} without {name!r}; use it where it is, `if hasattr(module, {name!r}):`, or go "
                "through the parameters that compile's function gets, which are this worker's"
            ) from None

    def forward(
        self, hidden: Tensor | None = None, *rest: Any, inputs_embeds: Tensor | None = None, **named: Any
    ) -> Any:
        if self._kind == "embeds":  # the hidden states that were given instead of tokens
            return next(value for value in (inputs_embeds, hidden, *rest) if value is not None)
        hidden = named["hidden_states"] if hidden is None else hidden
        return hidden if self._kind == "identity" else torch.zeros((), device=hidden.device)


class _FirstLayer(nn.Module):
    """Stands in for the first layer on a later stage. It returns the hidden states that the stage has received.

    What the model does to them on the way there, as to embeddings, is left out: the first stage has done it.
    """

    def __init__(self, active: ActiveStage) -> None:
        super().__init__()
        self._active = active

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._active.received


class StageCut(ABC):
    """Where a model is cut, which is still whole."""

    @abstractmethod
    def held_by(self, stage: int) -> Sequence[str]:
        """The names of the modules, and of weights and buffers outside of these, that a stage has."""

    @abstractmethod
    def cut(self, numbers: Sequence[int]) -> tuple[Stage, ...]:
        """Takes from the model, in place, all that none of these stages has; returns them."""


class Stage(nn.Module, ABC):
    """One stage of a model, as a pipeline calls it.

    Attributes:
        model: the model, cut down to this worker's stages.
        number: this stage's, of all ``stages``.
    """

    def __init__(self, model: nn.Module, *, number: int, stages: int) -> None:
        super().__init__()
        self.model, self.number = model, number
        self.first, self.last = number == 0, number == stages - 1

    @property
    @abstractmethod
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules of the model that are this stage's own."""

    @abstractmethod
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of this stage alone. Schedules with a split backward go through them for each microbatch."""

    @abstractmethod
    def forward(self, *values: Any, inputs: Mapping[str, Any]) -> Any:
        """The model's outputs, on the last stage; before it a tuple of what the next stage takes as ``values``.

        ``inputs`` are the model's, by name.
        """

    def activate(self) -> None:
        """Called before each computation for this stage."""

    def key(self, inputs: Mapping[str, Any]) -> Any:
        """A key for what ``forward`` depends on beside the shapes of its arguments."""
        return None

    def known_values(self, inputs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """The values that a stage gives the next, on the meta device; None if only a trial pass can tell them."""
        return None


def weights_in(members: Iterable[Any]) -> Iterator[nn.Parameter]:
    """The parameters among ``members`` and in the modules among them, each once."""
    weights: dict[int, nn.Parameter] = {}
    for member in members:
        parameters = (
            member.parameters()
            if isinstance(member, nn.Module)
            else [member]
            if isinstance(member, nn.Parameter)
            else []
        )
        weights |= {id(parameter): parameter for parameter in parameters}
    return iter(weights.values())


class ModelStage(Stage):
    """A stage of one of transformers' models. Made by ``LayerCut``.

    Args:
        base: the model's body, which is the model itself where it has no head.
        parts: the modules of the model that are this stage's own.
        active: which of this worker's stages computes now.
    """

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        parts: Sequence[nn.Module],
        *,
        number: int,
        stages: int,
        active: ActiveStage,
    ) -> None:
        super().__init__(model, number=number, stages=stages)
        # In tuples, so that nn.Module does not register the parts: a stage has no state_dict of its own.
        self._base, self._parts = (base,), tuple(parts)
        self._active = active
        self._accepted = frozenset(inspect.signature((model if self.last else base).forward).parameters)
        self._dtype = next(model.parameters()).dtype
        self._input = str(getattr(model, "main_input_name", _TOKENS))

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return self._parts

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return weights_in(self._parts)

    def activate(self) -> None:
        """Has the model's parts compute for this stage from now on."""
        self._active.stage = self.number

    def known_values(self, inputs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        tokens = self._first_input(inputs)
        if self._input != _TOKENS:
            return None
        config: Any = self.model.config
        hidden = torch.empty(*tokens.shape, int(config.get_text_config().hidden_size), dtype=self._dtype, device="meta")
        return (hidden.requires_grad_(torch.is_grad_enabled()),)

    def forward(self, *values: Any, inputs: Mapping[str, Any]) -> Any:
        arguments = {name: value for name, value in inputs.items() if name in self._accepted}
        if not self.first:
            arguments.pop(self._input, None)
            # The embeddings of the first stage have added them to the hidden states.
            arguments.pop("token_type_ids", None)
            (hidden,) = values
            arguments[_EMBEDDED if _EMBEDDED in self._accepted else self._input] = self._active.received = hidden
        # A cache of keys would be kept for each microbatch, and the layers of other stages are missing from it.
        if "use_cache" in self._accepted:
            arguments["use_cache"] = False
        if self.last:
            return self.model(**arguments)
        hidden = self._base[0](**arguments).last_hidden_state
        # Autocast may give another dtype than the buffers have that the next stage receives into.
        return (hidden.to(self._dtype),)

    def _first_input(self, inputs: Mapping[str, Any]) -> Tensor:
        if not isinstance(tokens := inputs.get(self._input), Tensor):
            kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in inputs.items())
            raise DataError(
                f'a pipeline of this model begins with the tensor "{self._input}", and the inputs are '
                f"{kinds or 'none'}; give that tensor alone, first, or in a dict of the model's keyword arguments"
            )
        return tokens


def check_pipeline_split(split: object) -> None:
    """Raises a ConfigError unless ``split`` is a ``PipelineSplit``, for whatever model."""
    items = [*split] if isinstance(split, (list, tuple)) else []
    if split != "auto" and not any(items and all(isinstance(item, kind) for item in items) for kind in (int, str)):
        raise ConfigError(
            f'pipeline_split={split!r} is unknown; give "auto", a list of the numbers of layers of all stages, or a '
            "list of the names of the modules at which stages begin, from the second stage on"
        )


class LayerCut(StageCut):
    """Cuts one of transformers' models between its layers, so that stages have about equal weights, or by numbers.

    Raises a ConfigError if it cannot be cut.
    """

    def __init__(self, module: nn.Module, split: PipelineSplit, pipelining: PipelineConfig) -> None:
        self._module, self._stages = module, pipelining.stages
        spec = require_layers(module, 'pipeline_split="auto"')
        base = base_name(module)
        body, prefix = module.get_submodule(base), f"{base}." if base else ""
        layers = dict(body.get_submodule(spec.layers).named_children())
        heads = [part for name, part in module.named_modules() if name in spec.heads]
        check_layers(pipelining, len(layers))
        counts = (
            split_layers(list(map(_cost, layers.values())), pipelining.stages, after=sum(map(_cost, heads)))
            if isinstance(split, str)
            else check_split([int(count) for count in split], pipelining.stages, len(layers))
        )
        ends, last = list(accumulate(counts)), pipelining.stages - 1
        self._prefix, self._layers = prefix, tuple(f"{prefix}{spec.layers}.{name}" for name in layers)
        self._kinds = {f"{prefix}{name}": kind for name, kind in spec.first_stage.items()}
        after_body = [name for name, child in module.named_children() if base and child is not body]
        places = {name: bisect_right(ends, number) for number, name in enumerate(self._layers)}
        places |= dict.fromkeys(self._kinds, 0)
        places |= dict.fromkeys([*(f"{prefix}{name}" for name in spec.last_stage), *after_body], last)
        names = {name for name, _ in module.named_modules(remove_duplicate=False)}
        self._places = {name: stage for name, stage in places.items() if name in names}  # in the order of computation

    def held_by(self, stage: int) -> list[str]:
        return [name for name, place in self._places.items() if place == stage]

    def cut(self, numbers: Sequence[int]) -> tuple[Stage, ...]:
        module, active = self._module, ActiveStage()
        parts: dict[int, list[nn.Module]] = {number: [] for number in numbers}
        dtype = next(module.parameters()).dtype
        for name in self._layers:
            # Stages send one tensor. The layers of some types give a tuple, whose other items the next stage would miss
            # (tests/parallel/test_pipeline_stage.py).
            module.get_submodule(name).register_forward_hook(_check_layer_output)
        for name, stage in self._places.items():
            otherwise = self._stand_in(name, active, dtype)
            if stage not in parts:
                module.set_submodule(name, otherwise)
                continue
            parts[stage].append(part := module.get_submodule(name))
            # A worker with one stage calls each part for that stage only.
            if len(parts) > 1:
                active.restrict(part, stage, otherwise)
        base = module.get_submodule(self._prefix.removesuffix("."))
        return tuple(
            ModelStage(module, base, stage_parts, number=number, stages=self._stages, active=active)
            for number, stage_parts in parts.items()
        )

    def _stand_in(self, name: str, active: ActiveStage, dtype: torch.dtype) -> nn.Module:
        """What stands in for a module on workers that do not have it, or while another stage computes."""
        if name == self._layers[0]:
            return _FirstLayer(active)
        return StandIn(self._kinds.get(name, "identity"), dtype)


def _check_layer_output(layer: nn.Module, _: Any, output: Any) -> None:
    """Raises a ConfigError if a layer gives the next one more than hidden states, which a stage cannot send."""
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"a {type(layer).__name__} gives the next layer a {type(output).__name__}, and a pipeline of this model "
            "sends one tensor of hidden states; choose pipeline=1"
        )


def _cost(module: nn.Module) -> float:
    """About the multiplications a token: the weights. An embedding only looks up, and costs nothing."""
    return float(sum(parameter.numel() for parameter in module.parameters()))


def tied_ends(ties: Sequence[Sequence[str]], workers: Sequence[Collection[str]]) -> list[list[str]]:
    """The names of each weight that the first and the last worker of a pipeline both have.

    Args:
        ties: the names of each weight that has several.
        workers: the names of the weights that each worker has.

    Raises:
        ConfigError: a weight that other workers have in common.
    """
    several = {name for names in ties for name in names}
    alone = [
        [name]
        for name in dict.fromkeys(name for worker_names in workers for name in worker_names)
        if name not in several
    ]
    tied = []
    for names in [*(list(tie) for tie in ties), *alone]:
        holders = [number for number, worker_names in enumerate(workers) if not set(names).isdisjoint(worker_names)]
        if len(holders) < 2:
            continue
        if holders != [0, len(workers) - 1]:
            raise ConfigError(
                f"{' and '.join(names)} is one weight, which the workers {holders} of a pipeline would hold, and only "
                "its first and its last worker can have a weight in common; choose another pipeline_split"
            )
        tied.append(names)
    return tied


class TracedStage(PipelineStage):
    """torch's stage for microbatches of one shape, which adds its actions to ``slots``.

    Args:
        run: computes a microbatch, given the stage, the tensors that it received, and the microbatch's number.
        takes, gives: tensors of the shapes and dtypes of what it receives and sends, on the meta device.
    """

    def __init__(
        self,
        stage: Stage,
        stages: int,
        *,
        group: dist.ProcessGroup,
        run: Callable[[Stage, Sequence[Tensor], int], tuple[Tensor, ...]],
        takes: Sequence[Tensor],
        gives: Sequence[Tensor],
        slots: list[Slot],
        device: torch.device,
    ) -> None:
        # With the shapes known, torch need not run a microbatch to find them.
        super().__init__(
            stage, stage.number, stages, device, group=group, input_args=tuple(takes), output_args=tuple(gives)
        )
        self._module, self._run, self._slots = stage, run, slots
        self._microbatch = -1

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._module, args, self._microbatch)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with EnableTorchFunction():  # a backward pass may run a forward once more, and calls the user's hooks
            return super().backward_maybe_with_nosync(*args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        # torch looks up a receiver for each tensor that a stage returns, and the outputs of the last one have none.
        return [] if self._module.last else super().get_fwd_send_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._microbatch = fwd_chunk_id
        forward = partial(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
        return self._compute("forward", fwd_chunk_id, forward)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self.has_backward:
            backward = partial(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)
            self._compute("backward" if full_backward else "inputs", bwd_chunk_id, backward)
            # torch sends a gradient's memory as it lies, and the next stage reads it in row-major order.
            gradients = list(self.bwd_cache[bwd_chunk_id])
            for number, gradient in enumerate(gradients):
                if gradient is not None:
                    gradients[number] = gradient.contiguous()
            self.bwd_cache[bwd_chunk_id] = tuple(gradients)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward:
            backward = partial(super().backward_weight_one_chunk, bwd_chunk_id, last_backward)
            self._compute("weights", bwd_chunk_id, backward)

    def _compute(self, kind: ActionKind, microbatch: int, compute: Callable[[], Any]) -> Any:
        """Computes for this stage. Raises an error itself, not torch's own that has the shapes of the inputs."""
        self._module.activate()
        begin = time.perf_counter()
        try:
            return compute()
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            cause = error.__cause__
        finally:
            action = Action(kind=kind, stage=self._module.number, microbatch=microbatch)
            self._slots.append(Slot(action=action, begin=begin, end=time.perf_counter()))
        # Raised after the except block: inside it torch's error would become the context of its own cause, a circle.
        raise cause
