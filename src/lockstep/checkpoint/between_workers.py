"""What goes between workers when a checkpoint is saved or restored: all to the chief, then from the chief to all.

    save:     every worker's own state -> chief, who alone writes -> written, or its error, to all
    restore:  chief alone reads, or fails -> its error, or names and shapes, to all -> tensors broadcast

So no file system has to be shared, and all workers end in the same state or with the same error. Every worker must
make each of these calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lockstep.checkpoint.nested import flatten, unflatten
from lockstep.checkpoint.weights import own_storages
from lockstep.collectives.workers import Workers
from lockstep.errors import CheckpointError
from lockstep.extras import require

T = TypeVar("T")


def gather(workers: Workers, name: str, state: Any) -> list[Any]:
    """Every worker's state, in worker order. Every worker must call it.

    Args:
        workers: all of them.
        name: what this call is for.
        state: as ``nested.flatten`` takes it; structures may differ between workers.
    """
    if workers.size == 1:
        return [state]
    return [_unpacked(payload) for payload in workers.exchange_bytes(name, _packed(state))]


def on_chief(workers: Workers, name: str, work: Callable[[], T]) -> T | None:
    """Does ``work`` on the chief alone; a CheckpointError of its is raised on all. Every worker must call it.

    Returns:
        What ``work`` gave on the chief; None on the others.
    """
    result: T | None = None
    error: CheckpointError | None = None
    if workers.is_chief:
        try:
            result = work()
        except CheckpointError as raised:
            error = raised
    raise_everywhere(workers, name, error)
    return result


def raise_everywhere(workers: Workers, name: str, error: CheckpointError | None) -> None:
    """Raises the chief's error, if it has one, on all workers. Every worker must call it."""
    said = workers.exchange_bytes(name, b"" if error is None else str(error).encode())[0]
    if error is not None:
        raise error
    if said:
        raise CheckpointError(said.decode())


def spread(workers: Workers, name: str, state: Any) -> Any:
    """The chief's state, on every worker. Every worker must call it.

    Args:
        workers: all of them.
        name: what this call is for.
        state: the chief's; the others' is not looked at.
    """
    if workers.size == 1:
        return state
    tree, tensors = flatten(state) if workers.is_chief else (None, {})
    own = own_storages(tensors)
    shapes = {key: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for key, tensor in own.items()}
    said = json.loads(workers.exchange_bytes(name, json.dumps([tree, shapes]).encode())[0])
    if not workers.is_chief:
        own = {key: torch.empty(shape, dtype=getattr(torch, dtype)) for key, (dtype, shape) in said[1].items()}
    # As bytes: not every backend knows every dtype. Those without an element have no bytes to send.
    workers.broadcast(name, [_bytes_of(own[key]) for key in said[1] if own[key].numel()])
    return state if workers.is_chief else unflatten(said[0], own)


def _packed(state: Any) -> bytes:
    """The length of the JSON, the JSON, and the tensors as safetensors."""
    tree, tensors = flatten(state)
    text = json.dumps(tree).encode()
    body: bytes = require("safetensors.torch", "text").save(own_storages(tensors))
    return len(text).to_bytes(8, "little") + text + body


def _unpacked(payload: bytes) -> Any:
    end = 8 + int.from_bytes(payload[:8], "little")
    return unflatten(json.loads(payload[8:end]), require("safetensors.torch", "text").load(payload[end:]))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
