"""The state that the chief has read, on every worker: names and shapes to all, then the tensors, broadcast.

No file system has to be shared, and no worker holds more than one copy.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.checkpoint.nested import OrStored, flatten, unflatten
from lockstep.collectives.communicator import Workers, exchange_values


def spread(workers: Workers, name: str, state: Any) -> Any:
    """The chief's state, on every worker. Every worker must call it.

    Args:
        workers: all of them.
        name: what this call is for.
        state: the chief's, as ``nested.flatten`` takes it; the others' is not looked at.
    """
    if workers.alone:
        return state
    tree, tensors = flatten(state) if workers.is_chief else (None, {})
    shapes = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    tree, shapes = exchange_values(workers, name, (tree, shapes))[0]
    if not workers.is_chief:
        tensors = {key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in shapes.items()}
    workers.broadcast(name, list(tensors.values()))
    return state if workers.is_chief else unflatten(tree, OrStored(tensors))
