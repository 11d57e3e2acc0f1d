"""Trained weights in files as transformers' ``save_pretrained`` writes them, read by each worker for its own part.

    folder: model.safetensors, or model.safetensors.index.json and the files that it names
    key in a file -> transformers' renaming -> name in the model -> the rows and columns that this worker holds

All is known from the files' headers before a tensor is read: what is missing, unknown or of another shape is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.communicator import Communicator, check_agreement, error_text, raise_gathered_errors
from lockstep.errors import CheckpointError
from lockstep.extras import require
from lockstep.parallel.regions import Region
from lockstep.parallel.tensor_files import SUFFIX, TensorReader, TensorShard
from lockstep.parallel.tensor_parallel import ties_of
from lockstep.parallel.transformers_plans import HasConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 3


class PretrainedWeights:
    """The tensors of a folder or file, by their names in ``module``, which is whole and may be on the meta device.

    ``names`` are those of the module's parameters and buffers that the files have; a tied weight has all its names.
    ``places`` has, by key in the files, such a name and the index there of the first element: files have some tensors
    in parts, such as the experts of a layer.
    Raises CheckpointError if the files cannot be read or do not fit the module.
    """

    def __init__(self, path: str | os.PathLike[str], module: nn.Module) -> None:
        self.path = Path(path)
        try:
            self._reader = TensorReader(self.path, weight_files(self.path))
        except (OSError, require("safetensors", "train").SafetensorError) as error:
            raise CheckpointError(f"cannot read the weights: {error}; copy or save the file anew") from error
        state: dict[str, Tensor] = module.state_dict()
        merges = _merges(module, self._reader.tensors, state)
        for name, parts in merges.items():
            self._reader.merge(name, parts)
        keys, unknown = _match(module, self._reader.tensors, state)
        self.keys = _with_ties(keys, ties_of(module))
        self.places = {key: (name, (0,) * state[name].ndim) for name, key in self.keys.items() if name in state}
        for name, parts in merges.items():
            self.places |= {key: (name, offsets) for key, offsets in parts.items()}
        self.names = frozenset(self.keys)
        self._check(module, state, unknown)

    def read(self, name: str, region: Region, dtype: torch.dtype) -> Tensor:
        """A worker's part of a tensor, on the CPU. Raises CheckpointError if it cannot be read."""
        part = torch.empty(region.sizes, dtype=dtype, device="cpu")
        try:
            self._reader.read({self.keys[name]: TensorShard(part, region)})
        except (OSError, require("safetensors", "train").SafetensorError) as error:
            raise CheckpointError(f"cannot read {self.keys[name]!r}: {error}; copy or save the file anew") from error
        return part

    def digest(self) -> str:
        """What the headers say, in 16 hex digits."""
        # The headers alone: workers that compared the values would each have to read all files.
        lines = [f"{key} {tuple(tensor.shape)} {tensor.dtype}" for key, tensor in sorted(self._reader.tensors.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def _check(self, module: nn.Module, state: Mapping[str, Tensor], unknown: list[str]) -> None:
        missing = _without(state.keys() - self.names, getattr(module, "_keys_to_ignore_on_load_missing", None))
        if missing and unknown and (name := _renaming(module, state, computed=True)(unknown[0])) in missing:
            raise CheckpointError(
                f"{self.path} has {name} as other tensors, such as {unknown[0]}; transformers computes it from "
                "them, and weights= does not: make the model with from_pretrained, and divide it without weights="
            )
        faults = {
            "lacks": missing,
            "has, unknown to the model,": [f"{key} in {self._file_of(key)}" for key in unknown],
            "has in other shapes or types": self._misfits(state),
        }
        problems = []
        for title, items in faults.items():
            more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
            problems += [f"{title} {', '.join(items[:_SHOWN])}{more}"] if items else []
        if problems:
            raise CheckpointError(
                f"{self.path} does not fit the {type(module).__name__}: it {'; it '.join(problems)}; make the model "
                "from the config.json of these weights"
            )

    def _misfits(self, state: Mapping[str, Tensor]) -> list[str]:
        misfits = []
        for name in sorted(self.names & state.keys()):
            key, expected = self.keys[name], state[name]
            stored = self._reader.tensors[key]
            if stored.shape != expected.shape:
                shapes = f"{tuple(stored.shape)} instead of {tuple(expected.shape)}"
                misfits.append(f"{key} in {self._file_of(key)}: {shapes}")
            elif stored.is_floating_point() != expected.is_floating_point():
                misfits.append(f"{key} in {self._file_of(key)}: {stored.dtype} instead of {expected.dtype}")
        return misfits

    def _file_of(self, key: str) -> str:
        return self._reader.files_of(key)[0].name


def open_weights(path: str | os.PathLike[str], module: nn.Module, workers: Communicator) -> PretrainedWeights:
    """Opens weights for ``module`` on all workers, who must all call it. If one fails, all raise its CheckpointError.

    Each reads the headers only. Raises ClusterError if the workers see different files.
    """
    opened: list[PretrainedWeights] = []
    raise_gathered_errors(
        workers, "the headers of the weights", error_text(lambda: opened.append(PretrainedWeights(path, module)))
    )
    check_agreement(workers, f"the weights in {os.fspath(path)}", [opened[0].digest()])
    return opened[0]


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, an index or a file. Raises CheckpointError if one of them is not there."""
    if path.is_dir():
        if (path / WEIGHTS).is_file():
            return [path / WEIGHTS]
        if (path / INDEX).is_file():
            return _indexed(path / INDEX)
        if files := sorted(entry for entry in path.iterdir() if entry.suffix == SUFFIX):
            return files
        names = ", ".join(sorted(entry.name for entry in path.iterdir())[:_SHOWN]) or "nothing"
        raise CheckpointError(
            f"{path} has neither {WEIGHTS} nor {INDEX} (it has {names}); give a folder that transformers' "
            "save_pretrained has written"
        )
    if not path.is_file():
        raise CheckpointError(
            f"there is no {path}; give a folder that transformers' save_pretrained has written, which all workers see"
        )
    return _indexed(path) if path.suffix == ".json" else [path]


def _indexed(index: Path) -> list[Path]:
    try:
        files = {str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"cannot read the index {index}: {error!r}; copy or save it anew") from error
    for file in sorted(files):
        # An index is data: a name such as ../../x must not lead out of its folder.
        if Path(file).name != file or not (index.parent / file).is_file():
            raise CheckpointError(f"{index} names {file!r}, which is not in its folder; copy the missing file")
    return [index.parent / file for file in sorted(files)]


def _match(
    module: nn.Module, stored: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> tuple[dict[str, str], list[str]]:
    """By the names in the model the keys in the files; and the keys that the model has no use for and should have."""
    rename = _renaming(module, state)
    named = {key: rename(key) for key in stored}
    keys = {name: key for key, name in named.items() if name in state}
    unknown = [key for key, name in named.items() if name not in state]
    return keys, _without(unknown, _ignored(module))


def _merges(
    module: nn.Module, stored: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """By the names of tensors that transformers makes of several: their keys, and where each begins in the tensor."""
    if not isinstance(module, HasConfig):
        return {}
    loading, renamings, converters = _transforms(module)
    merge_of = {pattern: merge for merge in converters if _is_merge(merge) for pattern in merge.source_patterns}
    parts: dict[str, dict[str, list[str]]] = {}  # by name and pattern: the keys
    for key in sorted(stored, key=_natural):
        name, pattern = loading.rename_source_key(key, renamings, converters, module.base_model_prefix, state)
        if pattern in merge_of and name in state:
            parts.setdefault(name, {}).setdefault(pattern, []).append(key)
    merges = {}
    for name, keys in parts.items():
        converter = merge_of[next(iter(keys))]
        columns = [keys.get(pattern, []) for pattern in converter.source_patterns]
        # What does not fill the tensor is no merge: with a lost expert the error says that the tensor is lacking, and
        # not that it has another shape (tests/parallel/test_pretrained.py: test_a_lost_expert_is_told).
        part_keys = [key for column in columns for key in column]
        if (
            len({len(column) for column in columns}) == 1
            and sum(stored[key].numel() for key in part_keys) == state[name].numel()
        ):
            merges[name] = _placed(converter, columns, stored, state[name].ndim)
    return merges


def _is_merge(converter: Any) -> bool:
    """Whether tensors are only put beside one another: stacked in front, such as experts, then along another dim."""
    kinds = [type(operation).__name__ for operation in converter.operations]
    stacked = kinds[:1] == ["MergeModulelist"]
    return kinds[stacked:] in ([], ["Concatenate"]) and not (stacked and converter.operations[0].dim)


def _placed(
    converter: Any, columns: list[list[str]], stored: Mapping[str, Tensor], ndim: int
) -> dict[str, tuple[int, ...]]:
    """Where each part begins. ``columns`` are put along the dim of the last operation; each is one part, or a stack."""
    dim = converter.operations[-1].dim % ndim
    places, begins = {}, [0] * len(columns[0])
    for column in columns:
        for number, key in enumerate(column):
            offsets, is_stacked = [0] * ndim, stored[key].ndim < ndim
            offsets[0] = number if is_stacked else 0
            if len(columns) > 1:
                offsets[dim] = begins[number]
                begins[number] += stored[key].shape[dim - is_stacked]
            places[key] = tuple(offsets)
    return places


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """Sorts 10 after 9."""
    return [(piece.isdigit(), int(piece) if piece.isdigit() else 0, piece) for piece in re.split(r"(\d+)", key)]


def _transforms(module: nn.Module) -> tuple[Any, list[Any], list[Any]]:
    """What renames keys in transformers, and its renamings and conversions for a model."""
    loading = require("transformers.core_model_loading", "transformers")
    mapping = require("transformers.conversion_mapping", "transformers").get_model_conversion_mapping(module)
    renamings = [transform for transform in mapping if isinstance(transform, loading.WeightRenaming)]
    return loading, renamings, [transform for transform in mapping if isinstance(transform, loading.WeightConverter)]


def _renaming(module: nn.Module, state: Mapping[str, Tensor], *, computed: bool = False) -> Callable[[str], str]:
    """What transformers calls the keys of files that its model reads; other modules have the keys themselves.

    ``computed``: those too whose tensors it computes from others, and does not only merge.
    """
    if not isinstance(module, HasConfig):
        return lambda key: key
    loading, renamings, converters = _transforms(module)
    converters = [converter for converter in converters if computed and not _is_merge(converter)]
    prefix = module.base_model_prefix

    def rename(key: str) -> str:
        name = loading.rename_source_key(key, renamings, converters, prefix, state)[0]
        if name not in state and key in state:
            return key
        return str(name)

    return rename


def _ignored(module: nn.Module) -> set[str]:
    """Patterns of keys that transformers leaves out of its models' files, or that older versions put in."""
    patterns = set(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name.rpartition(".")[2] for name, _ in module.named_buffers()]
    patterns |= {r"rotary_emb\.inv_freq"} if "inv_freq" in buffers else set()
    return patterns | ({r"(^|\.)position_ids$"} if "position_ids" in buffers else set())


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """The names that no pattern is found in, sorted."""
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns or ()))


def _with_ties(keys: Mapping[str, str], ties: Iterable[Iterable[str]]) -> dict[str, str]:
    """The same, with all names of a tied weight that has a key under one of them."""
    all_keys = dict(keys)
    for names in ties:
        key = next((keys[name] for name in names if name in keys), None)
        if key is not None:
            all_keys |= dict.fromkeys(names, key)
    return all_keys
