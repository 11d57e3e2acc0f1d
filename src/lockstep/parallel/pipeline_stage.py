"""The stages of a pipeline: a model cut down to those of one worker, and torch's stage, which records its actions."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lockstep._torch_compat import TreeSpec, tree_flatten, tree_map
from lockstep.parallel.model_specs import base_name, require_layers
from lockstep.parallel.pipeline_config import PipelineConfig, check_layers, check_split, split_layers
from lockstep.parallel.pipeline_trace import Action, ActionKind, Slot

PipelineSplit = Literal["auto"] | Sequence[int]  # the number of layers of each stage, or "auto"


class ActiveStage:
    """The number of the stage that computes now; -1 before the first."""

    def __init__(self) -> None:
        self.stage = -1

    def restrict(self, part: nn.Module, stage: int, otherwise: nn.Module) -> None:
        """Has a part of the model compute for one stage only, and ``otherwise`` in its place for the others."""
        own, others = part.forward, otherwise.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return (own if self.stage == stage else others)(*args, **kwargs)

        part.forward = forward


class _StandIn(nn.Module):
    """In place of a module that another stage has."""

    def __init__(self, kind: str = "identity") -> None:
        super().__init__()
        self._kind = kind

    def forward(
        self, hidden: Tensor | None = None, *rest: Any, inputs_embeds: Tensor | None = None, **named: Any
    ) -> Any:
        if self._kind == "embeds":  # the hidden states that were given instead of tokens
            return next(each for each in (inputs_embeds, hidden, *rest) if each is not None)
        hidden = named["hidden_states"] if hidden is None else hidden
        return hidden if self._kind == "identity" else torch.zeros((), device=hidden.device)


class Stage(nn.Module):
    """Stage ``number`` of all ``stages``, as torch's pipelining calls it. Made by ``cut_to_stages``.

    Args:
        model: the model, cut down to this worker's stages.
        base: its body, which is the model itself where it has no head.
        parts: the modules of the model that are this stage's own; also an attribute.
        active: which of this worker's stages computes now.

    Attributes:
        outputs: the structure of the model's outputs, whose tensors the last stage returns.
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
        super().__init__()
        self.model = model
        self._base, self.parts = (base,), tuple(parts)  # tuples, so that nn.Module does not register them
        self._active = active
        self.number = number
        self.first, self.last = number == 0, number == stages - 1
        self._accepted = frozenset(inspect.signature((model if self.last else base).forward).parameters)
        self._dtype = next(model.parameters()).dtype
        self.outputs: TreeSpec | None = None

    def activate(self) -> None:
        """Has the model's parts compute for this stage from now on. Must be called before each computation."""
        self._active.stage = self.number

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of this stage alone: schedules with a split backward look at each, for each microbatch."""
        found = {id(each): each for part in self.parts for each in part.parameters(recurse)}
        return iter(found.values())

    def forward(self, incoming: Tensor, *, real: Tensor | None = None, **named: Any) -> Any:
        """The hidden states for the next stage, or the tensors of the model's outputs.

        Args:
            incoming: the token ids on the first stage, else the hidden states.
            real: [rows] bool, False for padding rows at the end of a microbatch. The last stage leaves these out before
                the model, whose outputs need not have a row for each; it keeps one row at least.
            named: the model's other arguments.
        """
        if self.last and real is not None:
            given_rows, rows = len(incoming), max(1, int(real.sum()))
            incoming, named = tree_map(
                lambda leaf: (
                    leaf[:rows] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == given_rows else leaf
                ),
                (incoming, named),
            )
        given = {name: value for name, value in named.items() if name in self._accepted}
        if self.first:
            given["input_ids"] = incoming
        else:
            given.pop("token_type_ids", None)  # they were added on the first stage
            given["inputs_embeds"] = incoming
        if "use_cache" in self._accepted:
            given["use_cache"] = False
        if not self.last:
            hidden: Tensor = self._base[0](**given).last_hidden_state
            hidden = hidden.to(self._dtype)  # autocast may give another dtype than the next stage expects
            return hidden.clone() if hidden._is_view() else hidden  # torch detaches it in place, which a view refuses
        leaves, self.outputs = tree_flatten(self.model(**given))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def cut_to_stages(
    module: nn.Module, split: PipelineSplit, pipelining: PipelineConfig, worker: int
) -> tuple[Stage, ...]:
    """Cuts a model down to the stages of one worker, in place; they are in the order of their numbers."""
    spec = require_layers(module, 'pipeline_split="auto"')
    base = module.get_submodule(base_name(module))
    layers = base.get_submodule(spec.layers)
    heads = [part for name, part in module.named_modules() if name in spec.heads]
    counts = _layer_counts(list(layers.children()), heads, split, pipelining)
    ends = list(accumulate(counts))
    parts: dict[int, list[nn.Module]] = {number: [] for number in pipelining.stages_of(worker)}
    active = ActiveStage()

    def keep(owner: nn.Module, name: str, stage: int, otherwise: nn.Module) -> None:
        """Keeps a part for ``stage`` if that is this worker's, with ``otherwise`` in its place elsewhere."""
        part = dict(owner.named_children()).get(name)
        if part is None:
            return
        if stage not in parts:
            setattr(owner, name, otherwise)
            return
        parts[stage].append(part)
        if len(parts) > 1:
            active.restrict(part, stage, otherwise)

    for number, (name, _) in enumerate(list(layers.named_children())):
        keep(layers, name, next(stage for stage, end in enumerate(ends) if number < end), _StandIn())
    last = pipelining.stages - 1
    for name, kind in spec.first_stage.items():
        keep(base, name, 0, _StandIn(kind))
    for name in spec.last_stage:
        keep(base, name, last, _StandIn())
    if base is not module:
        for name in [name for name, child in module.named_children() if child is not base]:
            keep(module, name, last, nn.Identity())
    return tuple(
        Stage(module, base, own, number=number, stages=pipelining.stages, active=active)
        for number, own in parts.items()
    )


def _layer_counts(
    layers: Sequence[nn.Module], heads: Sequence[nn.Module], split: PipelineSplit, pipelining: PipelineConfig
) -> tuple[int, ...]:
    check_layers(pipelining, len(layers))
    if not isinstance(split, str):
        return check_split(split, pipelining.stages, len(layers))
    return split_layers(list(map(_cost, layers)), pipelining.stages, after=sum(map(_cost, heads)))


def _cost(module: nn.Module) -> float:
    """About the multiplications a token: the weights. An embedding only looks up, and costs nothing."""
    return float(sum(parameter.numel() for parameter in module.parameters()))


class TracedStage(PipelineStage):
    """torch's stage for microbatches of one shape, which adds its actions to ``slots``.

    ``takes`` and ``gives`` have the shapes and dtypes of the input and output, on the meta device.
    """

    def __init__(
        self,
        stage: Stage,
        stages: int,
        *,
        group: dist.ProcessGroup,
        takes: Tensor,
        gives: Tensor,
        slots: list[Slot],
        device: torch.device,
    ) -> None:
        # With the shapes known, torch need not run a microbatch to find them.
        super().__init__(stage, stage.number, stages, device, input_args=takes, output_args=gives, group=group)
        self._module, self._slots = stage, slots

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        forward = partial(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
        return self._compute("forward", fwd_chunk_id, forward)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self.has_backward:
            backward = partial(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)
            self._compute("backward" if full_backward else "inputs", bwd_chunk_id, backward)

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
        raise cause  # not above, where torch's would become its context and so, in a circle, its cause
