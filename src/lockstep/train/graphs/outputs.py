"""What a recorded step gives: its tensors are written anew by every replay, so each caller gets copies of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

Change = Callable[[torch.Tensor], torch.Tensor]


def own_copies(outputs: Any) -> Any:
    """The same structure with a copy of each tensor, made on the current stream; what was one tensor stays one.

    Args:
        outputs: nested dataclasses and whatever else torch knows as structure, such as transformers' outputs.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
        return copies[id(tensor)]

    return tree_map(partial(_of_leaf, copied), outputs)


def _of_leaf(change: Change, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        values = {each.name: getattr(leaf, each.name) for each in fields(leaf)}
        return replace(leaf, **tree_map(partial(_of_leaf, change), values))
    return leaf
