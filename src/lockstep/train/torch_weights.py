"""Weights in a file of torch.save, for programs that read them with torch.load: the state_dict, and nothing else.

``checkpoint.weights`` has the format of all other weights files, safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from lockstep.atomic_files import atomic_file
from lockstep.checkpoint.weights import check_tensors, contiguous_tensors
from lockstep.errors import CheckpointError

_BEGINNINGS = (b"PK\x03\x04", b"\x80")
"""Of a zip archive, and of a pickle, before torch 1.6."""
_SHOWN = 4


def write_torch_weights(state: Mapping[str, Tensor], target: Path) -> None:
    """Writes tensors, on any device, as torch.save does, atomically. Raises CheckpointError if it cannot be written."""
    check_tensors(state)
    tensors = contiguous_tensors(state)  # a view would be saved with the whole storage behind it
    try:
        with atomic_file(target) as partial, partial.open("wb") as file:  # a path would be named within the archive
            torch.save(tensors, file)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the weights to {target}: {error}; choose a folder that can be written to and has room"
        ) from error


def is_of_torch(file: Path) -> bool:
    """Whether a file, if it exists, begins as those of torch.save do."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        begin = opened.read(9)
    # A safetensors file begins with eight bytes, the length of its header, which may be these; then with a brace.
    return begin.startswith(_BEGINNINGS) and not begin.endswith(b"{")


def read_torch_weights(source: Path) -> dict[str, Tensor]:
    """Returns the state_dict that torch.save wrote, on the CPU. Nothing but tensors is unpickled.

    Raises CheckpointError if the file is damaged, or holds something else.
    """
    try:
        with source.open("rb") as file:  # torch 2.13 reads a path that ends in .safetensors with safetensors
            state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            f"cannot read the weights in {source}: {reason}; give a safetensors file written by save_weights, or a"
            " state_dict written by torch.save"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        content = f"a {type(state).__name__}"
        if isinstance(state, dict):
            content = f"the keys {', '.join(map(str, list(state)[:_SHOWN]))}"
        raise CheckpointError(
            f"{source} has {content}, expected the tensors of a state_dict alone; load it with torch.load, and give"
            " load_state_dict its state_dict"
        )
    return state
