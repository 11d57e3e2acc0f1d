"""A checkpoint's weights as one safetensors file, made on any machine that sees the checkpoint, without the model."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.record import weights_of
from lockstep.checkpoint.streamed_weights import write_streamed
from lockstep.checkpoint.whole_folder import RECORD
from lockstep.errors import CheckpointError
from lockstep.extras import require


def export_weights(
    checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, module: str | None = None
) -> Path:
    """Writes the weights of a checkpoint to one safetensors file with the plain module's keys, a tensor at a time.

    It is what ``from_pretrained`` of transformers reads, where it is called ``model.safetensors`` and the model's
    ``config.json`` is beside it. However many workers divided the model, this needs one process, which holds no more
    than one tensor.

    Args:
        checkpoint: the folder of one, or the folder that several are in: then the newest.
        path: the file; one of that name is replaced. Its folder is made.
        module: the name that the ``Checkpoint`` had for it, where it has several.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; it has no such module; or the file cannot be written.

    Example:
        >>> ls.export_weights("checkpoints", "exported/model.safetensors")  # doctest: +SKIP
    """
    # Imported here: it takes 0.7 s, which a program that exports nothing need not wait.
    from lockstep.checkpoint.held_tensors import StoredTensors

    source = _one_of(Path(checkpoint))
    try:
        stored = StoredTensors(source / _chosen(weights_of(source), module, source))
    except (OSError, require("safetensors", "train").SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {source} is damaged ({error}); use another one") from error
    described = {key: torch.empty(each.shape, dtype=each.dtype, device="meta") for key, each in stored.tensors.items()}
    write_streamed(path, described, ((key, stored.read_whole(key)) for key in described))
    return source


def _one_of(path: Path) -> Path:
    newest = path if (path / RECORD).exists() else CheckpointFolder(path).newest()
    if newest is None:
        raise CheckpointError(
            f"there is no checkpoint in {path}; give a folder such as step-00000120, or the one it is in"
        )
    return newest


def _chosen(weights: dict[str, str], module: str | None, source: Path) -> str:
    if module is None and len(weights) == 1:
        return next(iter(weights.values()))
    if module not in weights:
        known = ", ".join(map(repr, sorted(weights))) or "none"
        raise CheckpointError(f"{source} has no weights of module={module!r}; it has: {known}")
    return weights[module]
