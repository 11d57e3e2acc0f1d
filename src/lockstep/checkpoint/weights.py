"""Weights in one safetensors file: every key of a module's state_dict, and nothing but tensors.

The file is written aside and renamed, so a reader sees the old file or the new one, whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.atomic_files import atomic_file
from lockstep.errors import CheckpointError
from lockstep.extras import require

_SHOWN = 4


def write_weights(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the tensors of a state_dict to ``path``, which appears whole or not at all.

    Args:
        state: key to tensor on any device. Tied, overlapping and non-contiguous tensors are each written in full.
        path: the safetensors file. An existing one is replaced; its folder is made.

    Raises:
        CheckpointError: an entry is not a tensor, or the file cannot be written; then nothing is left behind.
    """
    target = Path(path)
    tensors = contiguous_tensors(state)
    try:
        with atomic_file(target) as partial:
            require("safetensors.torch", "train").save_file(tensors, str(partial), metadata={"format": "pt"})
    except (OSError, require("safetensors", "train").SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the weights to {target}: {error}; choose a folder that can be written to and has room"
        ) from error


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns the tensors in a safetensors file, by key, on the CPU.

    Raises:
        CheckpointError: there is no such file, or it is not a safetensors file.
    """
    source = Path(path)
    if not source.is_file():
        raise CheckpointError(f"there is no weights file {source}; give the path of a file written by save_weights")
    try:
        tensors: dict[str, Tensor] = require("safetensors.torch", "train").load_file(str(source))
    except (OSError, require("safetensors", "train").SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the weights in {source}: {error}; give a safetensors file written by save_weights"
        ) from error
    return tensors


def check_fit(weights: Mapping[str, Any], state: Mapping[str, Any], source: str | os.PathLike[str]) -> None:
    """Checks that weights have the keys and shapes of a module's state_dict, before anything is loaded.

    Args:
        weights: the weights, or anything with their shapes, by key.
        state: the module's state_dict.
        source: where the weights came from, for the message.

    Raises:
        CheckpointError: keys are missing or unexpected, or shapes differ; all of them are named.
    """
    shapes = [
        f"{key} has shape {tuple(weights[key].shape)} instead of {tuple(state[key].shape)}"
        for key in state
        if key in weights and weights[key].shape != state[key].shape
    ]
    faults = [
        _listed("missing keys", [key for key in state if key not in weights]),
        _listed("unexpected keys", [key for key in weights if key not in state]),
        _listed("wrong shapes", shapes),
    ]
    found = "; ".join(fault for fault in faults if fault)
    if found:
        raise CheckpointError(
            f"the weights in {os.fspath(source)} do not fit the module: {found}; "
            "load them into a module built with the settings of the one that was saved"
        )


def contiguous_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns each tensor contiguous and alone in its storage, as safetensors wants it. Copies only where needed."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the state has {key!r}, a {type(value).__name__}; weights files hold tensors only")
        tensor = value.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        alone = storage.nbytes() == tensor.numel() * tensor.element_size() and storage.data_ptr() not in seen
        tensor = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.untyped_storage().data_ptr())
        tensors[key] = tensor
    return tensors


def _listed(title: str, items: list[str]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{title}: {', '.join(items[:_SHOWN])}{more}"
