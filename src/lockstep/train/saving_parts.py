"""One weights file of a model that is divided among workers: its tensors go over the network one after another.

save   the workers that hold a tensor -> whole, on all of them -> the chief writes it    no worker keeps it
load   the chief reads a tensor -> all workers -> each takes what it holds of it
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.checkpoint.export import write_streamed
from lockstep.checkpoint.weights import check_fit
from lockstep.collectives.values import on_chief
from lockstep.collectives.workers import Workers
from lockstep.errors import CheckpointError
from lockstep.mirroring.module import MirroredModule

if TYPE_CHECKING:
    from lockstep.checkpoint.sharded_io import StoredTensors

_TOGETHER_BYTES = 32 * 2**20


def save_parts(module: MirroredModule, workers: Workers, path: str | os.PathLike[str]) -> None:
    """Writes the whole model's state_dict to a safetensors file. Every worker must call it; the chief writes."""
    from lockstep.checkpoint.sharded_state import part_of_model

    part = part_of_model(module)
    module.exchange_buffers()
    averages = dict(module.named_buffers())
    described, stream = part.described(), part.stream()
    averaged = ((name, averages.get(name, tensor)) for name, tensor in stream)
    failed: CheckpointError | None = None
    if workers.is_chief:
        try:
            write_streamed(path, described, averaged)
        except CheckpointError as error:
            failed = error
    for _ in stream:  # what the others, and a chief that could not write, do with the rest
        pass
    on_chief(workers, "save the weights", lambda: _raise(failed))


def load_parts(module: MirroredModule, workers: Workers, path: str | os.PathLike[str]) -> None:
    """Loads a whole model's safetensors file, if everything fits. Every worker must call it; the chief reads."""
    from lockstep.checkpoint.sharded_state import part_of_model

    part = part_of_model(module)
    described = part.described()
    stored = on_chief(workers, "load the weights", lambda: _opened(Path(path), described))
    for names in _together(described):
        tensors = [torch.empty_like(described[name], device="cpu") for name in names]
        on_chief(workers, "load the weights", lambda names=names, into=tensors: _read(stored, names, into))  # type: ignore[misc]
        workers.broadcast("loaded weights", tensors)
        for name, tensor in zip(names, tensors, strict=True):
            part.take(name, tensor)


def _opened(path: Path, described: Mapping[str, Tensor]) -> StoredTensors:
    from safetensors import SafetensorError

    from lockstep.checkpoint.sharded_io import StoredTensors

    if not path.is_file():
        raise CheckpointError(f"there is no weights file {path}; give the path of a file written by save_weights")
    try:
        stored = StoredTensors(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the weights in {path}: {error}; give a safetensors file written by save_weights"
        ) from error
    check_fit(stored.tensors, described, path)
    return stored


def _read(stored: StoredTensors | None, names: list[str], into: list[Tensor]) -> None:
    from lockstep.checkpoint.sharded_io import HeldTensor

    if stored is not None:
        stored.read({name: HeldTensor(tensor) for name, tensor in zip(names, into, strict=True)})


def _together(described: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names, in runs whose tensors are small enough together."""
    names: list[str] = []
    filled = 0
    for name, tensor in described.items():
        if names and filled + tensor.nbytes > _TOGETHER_BYTES:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += tensor.nbytes
    if names:
        yield names


def _raise(error: CheckpointError | None) -> None:
    if error is not None:
        raise error
