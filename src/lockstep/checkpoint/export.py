"""A checkpoint's weights as one safetensors file, made on any machine that sees the checkpoint, without the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from lockstep.atomic_files import atomic_file
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.format import RECORD, weights_of
from lockstep.errors import CheckpointError
from lockstep.extras import require

_ALIGNED = 8
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What the format calls them."""


def stream_weights(
    path: str | os.PathLike[str], described: Mapping[str, Tensor], stream: Iterable[tuple[str, Tensor]]
) -> None:
    """Writes tensors to the safetensors file ``path``, which appears whole or not at all.

    Args:
        path: a file of that name is replaced. Its folder is made.
        described: by key a tensor of the same lengths and type, without memory, on the meta device.
        stream: key and tensor, in any order; each key once.

    Raises:
        CheckpointError: it cannot be written; then nothing is left behind.
    """
    target = Path(path)
    header, places = _header(described, target)
    try:
        with atomic_file(target) as partial, partial.open("wb") as file:
            file.write(header)
            for key, tensor in stream:
                file.seek(places[key])
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the weights to {target}: {error}; choose a folder that can be written to and has room"
        ) from error


def _header(described: Mapping[str, Tensor], target: Path) -> tuple[bytes, dict[str, int]]:
    """The beginning of the file, and where in the file each tensor begins."""
    unknown = [f"{key} is {each.dtype}" for key, each in described.items() if each.dtype not in _TYPES]
    if unknown:
        raise CheckpointError(f"cannot write the weights to {target}: {unknown[0]}, which safetensors has no word for")
    keys = sorted(described, key=lambda key: -described[key].element_size())  # so that each is aligned
    ends = [0]
    for key in keys:
        ends.append(ends[-1] + described[key].numel() * described[key].element_size())
    places = dict(zip(keys, pairwise(ends), strict=True))
    entries = {
        key: {"dtype": _TYPES[each.dtype], "shape": list(each.shape), "data_offsets": list(places[key])}
        for key, each in described.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % _ALIGNED)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: begin + place for key, (place, _) in places.items()}


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
    from lockstep.checkpoint.sharded_io import TensorReader

    source = _one_of(Path(checkpoint))
    try:
        stored = TensorReader(source / _chosen(weights_of(source), module, source))
    except (OSError, require("safetensors", "train").SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {source} is damaged ({error}); use another one") from error
    described = {key: torch.empty(each.shape, dtype=each.dtype, device="meta") for key, each in stored.tensors.items()}
    stream_weights(path, described, ((key, stored.read_whole(key)) for key in described))
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
