"""What a recorded step gives: its tensors are written anew by every replay, so each caller gets copies of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def own_copies(outputs: Any) -> Any:
    """The same structure with a copy of each tensor, made on the current stream; what was one tensor stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
        return copies[id(tensor)]

    return _mapped(copied, outputs)


def _mapped(change: Change, node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return change(node)
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{each.name: _mapped(change, getattr(node, each.name)) for each in fields(node)})
    if isinstance(node, Mapping):
        return {key: _mapped(change, value) for key, value in node.items()}
    if isinstance(node, (tuple, list)):
        return type(node)(_mapped(change, value) for value in node)
    return node
