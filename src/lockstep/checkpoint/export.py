"""Weights of a checkpoint as safetensors files that other programs read: one file, or those of a model on the hub.

tensors of the checkpoint, one at a time -> path
... with like=: the files of that folder  -> path/<the same files>: their headers as they are, and the new tensors
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.format import RECORD, damage_in, damaged, weights_of
from lockstep.checkpoint.weights import FileHeader, stream_weights, write_file
from lockstep.checks import check_kind, check_path
from lockstep.errors import CheckpointError, ConfigError
from lockstep.extras import require
from lockstep.parallel.regions import Region
from lockstep.parallel.tensor_files import TensorReader, TensorShard
from lockstep.weights_formats import weights_format

Place = tuple[str, tuple[int, ...]]
"""The name of a tensor, and the index in it of the first element."""
_CONFIG = "config.json"
_BESIDE = (".json", ".txt", ".model", ".jinja")
"""Endings of the files beside the weights, of configurations and tokenizers."""


def export_weights(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    module: str | None = None,
    like: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes the weights of a checkpoint of any layout to safetensors files, in one process, a tensor at a time.

    Without ``like`` it is one file. transformers' ``from_pretrained`` reads it if it is called ``model.safetensors``
    and the model's ``config.json`` is beside it.

    Args:
        checkpoint: a checkpoint's folder, or the folder of several: then the newest whose weights are not damaged.
        path: the file, or with ``like`` the folder. Existing files are replaced; folders are made.
        module: the name of the module in the ``Checkpoint``, if it has several.
        like: a folder that transformers' ``save_pretrained`` has written, such as the one given to
            ``parallelize(weights=)``. The same files are written: with the same names, the same tensors in each, under
            the same keys and in the same dtypes. The index and the files of configurations and tokenizers are copied.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, it has no such module, the weights are not those of the
            files of ``like``, or the files cannot be written.

    Example:
        >>> ls.export_weights("checkpoints", "exported/model.safetensors")  # doctest: +SKIP
    """
    folder = Path(check_path(checkpoint, "export_weights(checkpoint)"))
    target = Path(check_path(path, "export_weights(path)"))
    check_kind("module", module, str, "the name of a module of the checkpoint")
    read = partial(_read_weights, module=module)
    is_one = (folder / RECORD).exists()
    newest = (folder, read(folder)) if is_one else CheckpointFolder(folder).read_newest(read)
    if newest is None:
        raise CheckpointError(
            f"there is no checkpoint in {folder}; give a folder such as step-00000120, or the one it is in"
        )
    source, (names, reader) = newest
    if reader is None:
        listed = ", ".join(map(repr, sorted(names))) or "none"
        raise CheckpointError(f"{source} has no weights of module={module!r}; it has: {listed}")
    if like is None:
        if weights_format(target, "export_weights(path)") == "torch":
            raise ConfigError(
                f"export_weights(path) is {str(target)!r}, and weights are exported as safetensors; call the file"
                f" {target.stem}.safetensors"
            )
        stream_weights(target, reader.tensors, ((key, reader.read_whole(key)) for key in reader.tensors))
    else:
        _write_like(reader, Path(check_path(like, "export_weights(like)")), target)
    return source


def _read_weights(path: Path, *, module: str | None) -> tuple[Iterable[str], TensorReader | None]:
    """The modules of a checkpoint, and the weights of one; None if there is no such. Raises CheckpointError."""
    weights = weights_of(path)
    name = next(iter(weights)) if module is None and len(weights) == 1 else module
    if name not in weights:
        return weights, None
    if damage := damage_in(path, below=weights[name]):
        raise damaged(path, damage)
    try:
        return weights, TensorReader(path / weights[name])
    except (OSError, require("safetensors", "train").SafetensorError) as error:
        raise damaged(path, str(error)) from error


def _write_like(reader: TensorReader, like: Path, target: Path) -> None:
    """Writes the files of ``like`` to the folder ``target``, with the tensors of a checkpoint."""
    from lockstep.parallel.pretrained import INDEX, weight_files  # late: torch's part of it takes over a second

    files = weight_files(like)
    folder = files[0].parent
    if target.exists() and target.samefile(folder):
        raise CheckpointError(
            f"the weights in {like} would be replaced by those exported like them; give another folder"
        )
    headers = {file: FileHeader.read(file) for file in files}
    described = {key: tensor for header in headers.values() for key, tensor in header.described.items()}
    places = _places(reader, described, like)
    _check_shapes(reader, described, places, like)
    _check_left_out(reader, {name for name, _ in places.values()}, like)
    for file, header in headers.items():
        write_file(target / file.name, header, _converted(reader, header.described, places))
    beside = [entry for entry in folder.iterdir() if entry.is_file() and entry.suffix in _BESIDE]
    try:
        for entry in sorted(beside, key=lambda entry: entry.name == INDEX):  # the index last, which names all others
            shutil.copyfile(entry, target / entry.name)
    except OSError as error:
        raise CheckpointError(
            f"cannot copy the files beside the weights to {target}: {error}; choose a folder that can be written to"
        ) from error


def _converted(
    reader: TensorReader, keys: Mapping[str, Tensor], places: Mapping[str, Place]
) -> Iterator[tuple[str, Tensor]]:
    for key, described in keys.items():
        name, offsets = places[key]
        whole = reader.tensors[name]
        sizes = (1,) * (len(offsets) - described.ndim) + tuple(described.shape)
        buffer = torch.empty(sizes, dtype=whole.dtype, device="cpu")
        reader.read({name: TensorShard(buffer, Region(whole=tuple(whole.shape), sizes=sizes, offsets=offsets))})
        yield key, buffer.view(described.shape).to(described.dtype)


def _places(reader: TensorReader, described: Mapping[str, Tensor], like: Path) -> dict[str, Place]:
    """By the keys in the files the places in the checkpoint: the same names, or what transformers makes of them."""
    same = {key: (key, (0,) * tensor.ndim) for key, tensor in described.items()}
    if described.keys() <= reader.tensors.keys():
        return same
    from lockstep.parallel.pretrained import PretrainedWeights

    module = _module_of(like)
    places = dict(same)
    if module is not None:
        stored = PretrainedWeights(like, module)
        names: dict[str, list[str]] = {}
        for name, key in stored.keys.items():
            names.setdefault(key, []).append(name)
        for key, (name, offsets) in stored.places.items():
            places[key] = (
                next((candidate for candidate in names.get(key, ()) if candidate in reader.tensors), name),
                offsets,
            )
    if missing := sorted(key for key in described if places[key][0] not in reader.tensors):
        raise CheckpointError(
            f"the checkpoint lacks {missing[0]!r}, which {like} has, as {len(missing) - 1} more; give like= the folder "
            "of the model that was trained, with its config.json"
        )
    return places


def _module_of(like: Path) -> nn.Module | None:
    """The model of a folder on the meta device, as its config.json says; None if it has none that is known."""
    config = (like if like.is_dir() else like.parent) / _CONFIG
    try:
        names = json.loads(config.read_text(encoding="utf-8")).get("architectures") or [""]
    except (OSError, ValueError, AttributeError):
        return None
    transformers: Any = require("transformers", "transformers")
    kind = getattr(transformers, str(names[0]), None)
    if kind is None:
        return None
    with torch.device("meta"):
        model: nn.Module = kind(kind.config_class.from_pretrained(config.parent))
    return model


def _check_shapes(
    reader: TensorReader, described: Mapping[str, Tensor], places: Mapping[str, Place], like: Path
) -> None:
    in_parts = {name for name, offsets in places.values() if any(offsets)}
    for key, tensor in described.items():
        name, offsets = places[key]
        saved = reader.tensors[name]
        sizes = (1,) * (len(offsets) - tensor.ndim) + tuple(tensor.shape)
        fits = len(sizes) == saved.ndim and all(
            begin + size <= length if name in in_parts else size == length
            for begin, size, length in zip(offsets, sizes, saved.shape, strict=True)
        )
        if not fits or saved.is_floating_point() != tensor.is_floating_point():
            raise CheckpointError(
                f"{name} is {tuple(saved.shape)}, {saved.dtype} in the checkpoint, and {tuple(tensor.shape)}, "
                f"{tensor.dtype} in {like}; give like= the folder of the model that was trained"
            )


def _check_left_out(reader: TensorReader, exported_names: set[str], like: Path) -> None:
    """Raises CheckpointError for a tensor that the files do not have, unless it is a tied one that they have."""
    for key in sorted(reader.tensors.keys() - exported_names):
        shape, value = reader.tensors[key].shape, reader.read_whole(key)
        alike = [name for name in exported_names if reader.tensors[name].shape == shape]
        if not any(torch.equal(value, reader.read_whole(name)) for name in alike):
            raise CheckpointError(
                f"the checkpoint has {key!r}, which {like} does not have; give like= the folder of the model that was "
                "trained, or leave it out and export one file"
            )
