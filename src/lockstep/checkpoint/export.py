"""A checkpoint's weights as one safetensors file, without the model and without holding more than one tensor."""

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

_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The names of dtypes in the safetensors format."""


def export_weights(
    checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, module: str | None = None
) -> Path:
    """Writes the weights of a checkpoint to one safetensors file, with the plain module's keys, a tensor at a time.

    transformers' ``from_pretrained`` reads the file if it is called ``model.safetensors`` and the model's
    ``config.json`` is beside it. However many workers divided the model, this needs one process, which holds no more
    than one tensor. Any machine that sees the checkpoint will do.

    Args:
        checkpoint: a checkpoint's folder, or the folder of several: then the newest.
        path: the file. An existing one is replaced; its folder is made.
        module: the name of the module in the ``Checkpoint``, if it has several.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, it has no such module, or the file cannot be written.

    Example:
        >>> ls.export_weights("checkpoints", "exported/model.safetensors")  # doctest: +SKIP
    """
    # Imported here: it takes 0.7 s, which a program that exports nothing need not wait.
    from lockstep.checkpoint.sharded_io import TensorReader

    folder = Path(checkpoint)
    source = folder if (folder / RECORD).exists() else CheckpointFolder(folder).newest()
    if source is None:
        raise CheckpointError(
            f"there is no checkpoint in {folder}; give a folder such as step-00000120, or the one it is in"
        )
    try:
        reader = TensorReader(source / _chosen(weights_of(source), module, source))
    except (OSError, require("safetensors", "train").SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {source} is damaged ({error}); use another one") from error
    infos = {key: torch.empty(each.shape, dtype=each.dtype, device="meta") for key, each in reader.tensors.items()}
    stream_weights(path, infos, ((key, reader.read_whole(key)) for key in infos))
    return source


def stream_weights(
    path: str | os.PathLike[str], described: Mapping[str, Tensor], stream: Iterable[tuple[str, Tensor]]
) -> None:
    """Writes tensors to the safetensors file ``path``, one at a time. The file appears whole or not at all.

    Args:
        path: the file. An existing one is replaced; its folder is made.
        described: for each key a tensor of the same shape and dtype on the meta device.
        stream: keys and tensors, in any order, each key once.

    Raises:
        CheckpointError: it cannot be written; then nothing is left behind.
    """
    target = Path(path)
    header, offsets = _header(described, target)
    try:
        with atomic_file(target) as partial, partial.open("wb") as file:
            file.write(header)
            for key, tensor in stream:
                file.seek(offsets[key])
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the weights to {target}: {error}; choose a folder that can be written to and has room"
        ) from error


def _header(described: Mapping[str, Tensor], target: Path) -> tuple[bytes, dict[str, int]]:
    """The beginning of the file, and where in the file each tensor begins."""
    unknown = [f"{key} is {each.dtype}" for key, each in described.items() if each.dtype not in _DTYPES]
    if unknown:
        raise CheckpointError(f"cannot write the weights to {target}: {unknown[0]}, which safetensors does not have")
    keys = sorted(described, key=lambda key: -described[key].element_size())  # so that each is aligned
    ends = [0]
    for key in keys:
        ends.append(ends[-1] + described[key].numel() * described[key].element_size())
    spans = dict(zip(keys, pairwise(ends), strict=True))
    entries = {
        key: {"dtype": _DTYPES[each.dtype], "shape": list(each.shape), "data_offsets": list(spans[key])}
        for key, each in described.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: begin + start for key, (start, _) in spans.items()}


def _chosen(weights: dict[str, str], module: str | None, source: Path) -> str:
    if module is None and len(weights) == 1:
        return next(iter(weights.values()))
    if module not in weights:
        known = ", ".join(map(repr, sorted(weights))) or "none"
        raise CheckpointError(f"{source} has no weights of module={module!r}; it has: {known}")
    return weights[module]
