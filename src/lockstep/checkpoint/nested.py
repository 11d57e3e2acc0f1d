"""Nested state as JSON and a flat dict of tensors, and back. Pure.

    {"lr": 0.1, "mean": tensor}  <->  {"lr": 0.1, "mean": {"#": "tensor", "key": "mean"}} and {"mean": tensor}

What JSON has no word for is an object with the key "#". Nothing here can run code when it is read.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import CheckpointError

TAG = "#"


@dataclass(frozen=True)
class Stored:
    """Stands for a tensor that is, or will be, in a file under a key."""

    key: str


class OrStored(dict[str, Any]):
    """Tensors by key, and for those that are not here what stands for them in the files."""

    def __missing__(self, key: str) -> Stored:
        return Stored(key)


def flatten(state: Any, name: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Takes the tensors out of ``state``.

    Args:
        state: None, numbers, texts, tensors and what stands for them, in lists, tuples, dicts and Counters.
        name: what the state is called, if anything; begins the tensors' keys.

    Returns:
        What ``json.dumps`` can write, and the tensors by key, as they are; without those that are ``Stored``.

    Raises:
        CheckpointError: something else, which is named with its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encoded(state, name, tensors), tensors


def unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that ``flatten`` was given; non-contiguous dense tensors get their strides back.

    Raises:
        CheckpointError: a tensor that is not there, or an unknown kind of object.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(TAG)
    if kind is None:
        return {key: unflatten(value, tensors) for key, value in tree.items()}
    if kind not in _DECODERS:
        raise CheckpointError(f"the checkpoint holds a {kind!r}, which this version does not know; use a newer one")
    return _DECODERS[kind](tree, tensors)


def _encoded(state: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if state is None or isinstance(state, (bool, str)):
        return state
    if isinstance(state, torch.Tensor):
        return _tensor(state, path, tensors)
    if isinstance(state, Stored):
        return {TAG: "tensor", "key": state.key}
    if isinstance(state, numbers.Integral):
        return int(state)
    if isinstance(state, numbers.Real):
        number = float(state)
        return number if math.isfinite(number) else {TAG: "float", "value": str(number)}
    if isinstance(state, Mapping):
        return _mapping(state, path, tensors)
    if isinstance(state, (list, tuple)):
        items = [_encoded(item, _below(path, place), tensors) for place, item in enumerate(state)]
        return items if isinstance(state, list) else {TAG: "tuple", "items": items}
    raise CheckpointError(
        f"{path} is a {type(state).__name__}; a checkpoint holds numbers, texts and tensors, in lists, tuples and "
        "dicts: turn it into one of these in state_dict()"
    )


def _mapping(state: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    values = {key: _encoded(value, _below(path, key), tensors) for key, value in state.items()}
    if isinstance(state, Counter) or TAG in values or not all(isinstance(key, str) for key in values):
        kind = "counter" if isinstance(state, Counter) else "dict"
        return {TAG: kind, "items": [[_encoded(key, f"{path}: a key", {}), value] for key, value in values.items()]}
    return values


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _tensor(state: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    if state.layout is not torch.strided or state.is_meta or state.is_quantized:
        raise CheckpointError(f"{path} is no dense tensor ({state.layout}, {state.device}); make it dense to save it")
    key = path if path not in tensors else f"{path}#{len(tensors)}"  # keys 1 and "1" of one dict have one path
    tensors[key] = state.detach()
    strides = None if state.is_contiguous() else _dense_strides(state)
    return {TAG: "tensor", "key": key} | ({} if strides is None else {"strides": strides})


def _dense_strides(tensor: torch.Tensor) -> list[int] | None:
    """The strides of a tensor without gaps or overlaps, such as channels_last; None for any other."""
    expected = 1
    for stride, size in sorted(pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] > 1):
        if stride != expected:
            return None
        expected *= size
    return list(tensor.stride())


def _decoded_tensor(tree: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | Stored:
    try:
        tensor: torch.Tensor | Stored = tensors[tree["key"]]
    except KeyError:
        raise CheckpointError(
            f"the checkpoint lacks the tensor {tree['key']!r}; it is damaged: use another one"
        ) from None
    if "strides" not in tree or isinstance(tensor, Stored):
        return tensor
    strides = tree["strides"]
    if all(type(stride) is int for stride in strides) and len(strides) == tensor.ndim:
        strided = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
        if _dense_strides(strided):
            return strided.copy_(tensor)
    raise CheckpointError(
        f"the checkpoint has the tensor {tree['key']!r} with strides {strides}; it is damaged: use another one"
    )


def _decoded_dict(tree: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    found = {unflatten(key, tensors): unflatten(value, tensors) for key, value in tree["items"]}
    if len(found) < len(tree["items"]):
        raise CheckpointError(f"the checkpoint has one of the keys {list(found)} twice; it is damaged: use another one")
    return found


_DECODERS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "tensor": _decoded_tensor,
    "float": lambda tree, tensors: float(tree["value"]),
    "tuple": lambda tree, tensors: tuple(unflatten(tree["items"], tensors)),
    "dict": _decoded_dict,
    "counter": lambda tree, tensors: Counter(_decoded_dict(tree, tensors)),
}
