"""One stage of a model: its own layers, and the model's own code around them.

    first stage     words -> layers 0..k                          \\
    others          what the stage before gave -> layers k+1..m     hidden states to the next stage
    last stage      ... -> final norm -> head                     /  the model's outputs

The module stays whole in its names: a layer of another stage lets the hidden states through, and holds no weights. So
the model's own ``forward`` runs on every stage, with its masks and positions, from the hidden states it is handed as
``inputs_embeds``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from lockstep.parallel.families import Family, HasConfig, known_family
from lockstep.parallel.split import check_split, split_layers

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
    """A worker's stage as torch's pipelining calls it.

    Args:
        model: cut down to this stage by ``cut``.
        base: its body, which is the model itself where it has no head.
        first: whether it begins with the words.
        last: whether it ends with the model's outputs.

    Attributes:
        outputs: the structure of the model's outputs, whose tensors the last stage returns.
    """

    def __init__(self, model: nn.Module, base: nn.Module, *, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self._base = (base,)
        self._first, self._last = first, last
        self._accepted = frozenset(inspect.signature((model if last else base).forward).parameters)
        self._dtype = next(model.parameters()).dtype
        self.outputs: TreeSpec | None = None

    def forward(self, incoming: Tensor, *, real: Tensor | None = None, **named: Any) -> Any:
        """The next stage's hidden states, or the tensors of the model's outputs.

        Args:
            incoming: the words' numbers on the first stage, else the hidden states.
            real: [rows] bool, False for the rows behind that only fill up a microbatch. The last stage leaves these
                out before the model sees them, since its outputs need not have a row for each; it keeps one at least.
            named: the model's other arguments.
        """
        if self._last and real is not None:
            incoming, named = _first_rows(incoming, named, max(1, int(real.sum())))
        given = {name: value for name, value in named.items() if name in self._accepted}
        if self._first:
            given["input_ids"] = incoming
        else:
            given.pop("token_type_ids", None)  # they were added on the first stage
            given["inputs_embeds"] = incoming
        if "use_cache" in self._accepted:
            given["use_cache"] = False
        if not self._last:
            hidden: Tensor = getattr(self._base[0](**given), _HEADLESS)
            return hidden.to(self._dtype)  # autocast may give another one, and the next stage waits for this one
        leaves, self.outputs = tree_flatten(self.model(**given))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def cut(module: nn.Module, split: PipelineSplit, stages: int, stage: int) -> Stage:
    """Cuts a model down to one of its stages, in place.

    Raises:
        ConfigError: a model of no known family, or a split that does not fit its layers.
    """
    family = known_family(module, 'pipeline_split="auto"')
    prefix = module.base_model_prefix if isinstance(module, HasConfig) else ""
    base = module.get_submodule(prefix) if prefix in dict(module.named_children()) else module
    layers = base.get_submodule(family.layers)
    counts = _counts(module, base, family, split, stages)
    ends = list(accumulate(counts))
    own = range(ends[stage] - counts[stage], ends[stage])
    for number, (name, _) in enumerate(list(layers.named_children())):
        if number not in own:
            setattr(layers, name, Through())
    first, last = stage == 0, stage == stages - 1
    if not first:
        for name, kind in family.begins.items():
            _replace(base, name, STANDINS[kind]())
    if not last:
        for name in family.ends:
            _replace(base, name, Through())
        for name, child in list(module.named_children()):
            if child is not base and base is not module:
                setattr(module, name, nn.Identity())
    return Stage(module, base, first=first, last=last)


def _first_rows(incoming: Tensor, named: dict[str, Any], rows: int) -> tuple[Tensor, dict[str, Any]]:
    def cut_off(value: Any) -> Any:
        return value[:rows] if isinstance(value, Tensor) and value.ndim and len(value) == len(incoming) else value

    return incoming[:rows], {name: cut_off(value) for name, value in named.items()}


STANDINS: dict[str, type[nn.Module]] = {"handed": Handed, "nothing": Nothing, "through": Through}


def _replace(base: nn.Module, name: str, by: nn.Module) -> None:
    if name in dict(base.named_children()) and base.get_submodule(name) is not None:
        setattr(base, name, by)


def _counts(module: nn.Module, base: nn.Module, family: Family, split: PipelineSplit, stages: int) -> tuple[int, ...]:
    layers = [_cost(layer) for layer in base.get_submodule(family.layers).children()]
    if isinstance(split, str):
        heads = [module.get_submodule(name) for name in family.heads if name in dict(module.named_modules())]
        return split_layers(layers, stages, after=float(sum(map(_cost, heads))))
    return check_split(split, stages, len(layers))


def _cost(module: nn.Module) -> float:
    """Multiplications a token, about: its weights. An embedding only looks up, and costs nothing."""
    return float(sum(parameter.numel() for parameter in module.parameters()))
