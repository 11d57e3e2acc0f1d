"""torch's stage of a pipeline, which notes when it computed what, and tells the model whose turn it is."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lockstep._torch_compat import TreeSpec, tree_flatten
from lockstep.parallel.model_specs import HasConfig, ModelSpec, require_model_spec
from lockstep.parallel.pipeline_config import PipelineConfig, check_layers, check_split, split_layers
from lockstep.parallel.pipeline_trace import Action, ActionKind, Slot


class ActiveStage:
    """Whose turn it is.

    Attributes:
        stage: the number of the stage that computes now.
    """

    def __init__(self) -> None:
        self.stage = -1

    def give(self, part: nn.Module, stage: int, otherwise: nn.Module) -> None:
        """Has a part of the model work for one stage only.

        Args:
            part: some module; its ``forward`` is replaced, and its names are not.
            stage: whose it is.
            otherwise: what works in its place in the turns of others.
        """
        own, others = part.forward, otherwise.forward

        def in_turn(*args: Any, **kwargs: Any) -> Any:
            return (own if self.stage == stage else others)(*args, **kwargs)

        part.forward = in_turn


PipelineSplit = Literal["auto"] | Sequence[int]
"""The number of layers of each stage, or "auto"."""

_HEADLESS = "last_hidden_state"


class Through(nn.Module):
    """Stands for a layer of another stage."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The hidden states as they are."""
        return hidden_states


class Handed(nn.Module):
    """Stands for the embeddings on later stages, where the hidden states have come in their place."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Tensor:
        """The hidden states that were handed in."""
        return inputs_embeds


class Nothing(nn.Module):
    """Stands for what was added to the words on the first stage."""

    def forward(self, positions: Tensor) -> Tensor:
        """A zero that adds nothing, on the same device."""
        return torch.zeros((), device=positions.device)


class Stage(nn.Module):
    """A stage as torch's pipelining calls it.

    Args:
        model: cut down to this worker's stages by ``cut_to_stages``.
        base: its body, which is the model itself where it has no head.
        parts: the modules of the model that are this stage's own.
        number: which stage it is.
        stages: how many there are in all.
        turn: of this worker's stages.

    Attributes:
        number: which stage it is.
        first: whether it begins with the words.
        last: whether it ends with the model's outputs.
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
        turn: ActiveStage,
    ) -> None:
        super().__init__()
        self.model = model
        self._base, self._parts = (base,), tuple(parts)  # tuples, so that nn.Module does not register them
        self._turn = turn
        self.number = number
        self.first, self.last = number == 0, number == stages - 1
        self._accepted = frozenset(inspect.signature((model if self.last else base).forward).parameters)
        self._dtype = next(model.parameters()).dtype
        self.outputs: TreeSpec | None = None

    @property
    def has_turn(self) -> bool:
        """Whether the model's parts work for this stage now."""
        return self._turn.stage == self.number

    def take_turn(self) -> None:
        """Has the model's parts work for this stage from now on; whoever computes with it must call it before."""
        self._turn.stage = self.number

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules of the model that are this stage's own."""
        return self._parts

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of this stage alone: schedules that divide the backward pass look at each, for each microbatch."""
        found = {id(each): each for part in self._parts for each in part.parameters(recurse)}
        return iter(found.values())

    def forward(self, incoming: Tensor, *, real: Tensor | None = None, **named: Any) -> Any:
        """The next stage's hidden states, or the tensors of the model's outputs.

        Args:
            incoming: the words' numbers on the first stage, else the hidden states.
            real: [rows] bool, False for the rows behind that only fill up a microbatch. The last stage leaves these
                out before the model sees them, since its outputs need not have a row for each; it keeps one at least.
            named: the model's other arguments.
        """
        if self.last and real is not None:
            incoming, named = _first_rows(incoming, named, max(1, int(real.sum())))
        given = {name: value for name, value in named.items() if name in self._accepted}
        if self.first:
            given["input_ids"] = incoming
        else:
            given.pop("token_type_ids", None)  # they were added on the first stage
            given["inputs_embeds"] = incoming
        if "use_cache" in self._accepted:
            given["use_cache"] = False
        if not self.last:
            hidden: Tensor = getattr(self._base[0](**given), _HEADLESS)
            hidden = hidden.to(self._dtype)  # autocast may give another one, and the next stage waits for this one
            return hidden.clone() if hidden._is_view() else hidden  # torch detaches it in place, which a view refuses
        leaves, self.outputs = tree_flatten(self.model(**given))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def cut_to_stages(
    module: nn.Module, split: PipelineSplit, pipelining: PipelineConfig, worker: int
) -> tuple[Stage, ...]:
    """Cuts a model down to the stages of one worker, in place; they are in the order of their numbers.

    Raises:
        ConfigError: a model of no known family, or a split that does not fit its layers.
    """
    family = require_model_spec(module, 'pipeline_split="auto"')
    prefix = module.base_model_prefix if isinstance(module, HasConfig) else ""
    base = module.get_submodule(prefix) if prefix in dict(module.named_children()) else module
    counts = _counts(module, base, family, split, pipelining)
    cutting = _Cutting(pipelining.stages_of(worker))
    _cut_layers(base.get_submodule(family.layers), counts, cutting)
    first, last = 0, pipelining.stages - 1
    for name, kind in family.begins.items():
        cutting.leave(base, name, first, STANDINS[kind]())
    for name in family.ends:
        cutting.leave(base, name, last, Through())
    if base is not module:
        for name in [name for name, child in module.named_children() if child is not base]:
            cutting.leave(module, name, last, nn.Identity())
    return tuple(
        Stage(module, base, parts, number=number, stages=pipelining.stages, turn=cutting.turn)
        for number, parts in cutting.parts.items()
    )


class _Cutting:
    """Leaves of a model what belongs to this worker's stages.

    Args:
        own: the numbers of these stages.
    """

    def __init__(self, own: Sequence[int]) -> None:
        self.parts: dict[int, list[nn.Module]] = {number: [] for number in own}
        self.turn = ActiveStage()

    def leave(self, owner: nn.Module, name: str, stage: int, otherwise: nn.Module) -> None:
        """Leaves a part where its stage is this worker's, and puts ``otherwise`` in its place elsewhere."""
        part = dict(owner.named_children()).get(name)
        if part is None:
            return
        if stage not in self.parts:
            setattr(owner, name, otherwise)
            return
        self.parts[stage].append(part)
        if len(self.parts) > 1:
            self.turn.give(part, stage, otherwise)


def _cut_layers(layers: nn.Module, counts: Sequence[int], cutting: _Cutting) -> None:
    ends = list(accumulate(counts))
    for number, (name, _) in enumerate(list(layers.named_children())):
        stage = next(stage for stage, end in enumerate(ends) if number < end)
        cutting.leave(layers, name, stage, Through())


def _first_rows(incoming: Tensor, named: dict[str, Any], rows: int) -> tuple[Tensor, dict[str, Any]]:
    def cut_off(value: Any) -> Any:
        return value[:rows] if isinstance(value, Tensor) and value.ndim and len(value) == len(incoming) else value

    return incoming[:rows], {name: cut_off(value) for name, value in named.items()}


STANDINS: dict[str, type[nn.Module]] = {"handed": Handed, "nothing": Nothing, "through": Through}


def _counts(
    module: nn.Module, base: nn.Module, family: ModelSpec, split: PipelineSplit, pipelining: PipelineConfig
) -> tuple[int, ...]:
    layers = [_cost(layer) for layer in base.get_submodule(family.layers).children()]
    check_layers(pipelining, len(layers))
    if isinstance(split, str):
        heads = [module.get_submodule(name) for name in family.heads if name in dict(module.named_modules())]
        return split_layers(layers, pipelining.stages, after=float(sum(map(_cost, heads))))
    return check_split(split, pipelining.stages, len(layers))


def _cost(module: nn.Module) -> float:
    """Multiplications a token, about: its weights. An embedding only looks up, and costs nothing."""
    return float(sum(parameter.numel() for parameter in module.parameters()))


class TraceRecorder:
    """What a worker did in a pass, and when, in seconds of ``time.perf_counter()``."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []

    @contextmanager
    def taking(self, action: Action) -> Iterator[None]:
        """Notes an action with the time that the block took."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.slots.append(Slot(action=action, begin=begin, end=time.perf_counter()))

    def prolong(self) -> None:
        """Counts what was done until now as part of the last action."""
        if self.slots:
            self.slots[-1] = replace(self.slots[-1], end=time.perf_counter())


class TracedStage(PipelineStage):
    """A stage for microbatches of one shape.

    Args:
        stage: the module.
        stages: how many stages there are in all.
        group: the workers of the pipeline, in their order.
        takes: the shape and dtype of what comes in, on the meta device.
        gives: the same of what goes out; of the last stage it is not used.
        notes: where it is noted what was done.
        device: of the hidden states that come and go.
    """

    def __init__(
        self,
        stage: Stage,
        stages: int,
        *,
        group: dist.ProcessGroup,
        takes: Tensor,
        gives: Tensor,
        notes: TraceRecorder,
        device: torch.device,
    ) -> None:
        # With the shapes known, torch need not run a microbatch to find them.
        super().__init__(stage, stage.number, stages, device, input_args=takes, output_args=gives, group=group)
        self._module, self._notes = stage, notes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a microbatch."""
        forward = partial(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
        return self._in_turn("forward", fwd_chunk_id, forward)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a microbatch, or the part of it for the stage's inputs."""
        if self.has_backward:
            backward = partial(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)
            self._in_turn("backward" if full_backward else "inputs", bwd_chunk_id, backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The part of the backward pass for the stage's weights."""
        if self.has_backward:
            backward = partial(super().backward_weight_one_chunk, bwd_chunk_id, last_backward)
            self._in_turn("weights", bwd_chunk_id, backward)

    def _in_turn(self, kind: ActionKind, microbatch: int, compute: Callable[[], Any]) -> Any:
        self._module.take_turn()
        with self._notes.taking(Action(kind=kind, stage=self._module.number, microbatch=microbatch)):
            return _told_plainly(compute)


def _told_plainly(compute: Callable[[], Any]) -> Any:
    """Raises what went wrong itself: torch raises an error of its own from it, which has the shapes of what came in."""
    try:
        return compute()
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        told = error.__cause__
    raise told  # not above, where torch's would become its context and so, in a circle, its cause
