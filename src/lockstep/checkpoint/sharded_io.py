"""Tensors in safetensors files, whole or in boxes: written by the workers that hold them, read by any others.

    worker 0: its boxes -> shard-00001-....safetensors      each file says where in the whole tensors its boxes are
    worker 1: its boxes -> shard-00002-....safetensors
    any worker: the boxes that it wants <- torch.distributed.checkpoint's load plan, from all files

The steps of torch.distributed.checkpoint (plan, read or write) are called here one after another, not through its
``save`` and ``load``: those warn at every call outside a process group, and wrap an OSError such as a full disk into a
page of traceback. Importing it takes 0.7 s, so this module is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lockstep.checkpoint.weights import contiguous_tensors
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.errors import CheckpointError
from lockstep.extras import require
from lockstep.parallel.regions import Box, Region, whole_region

FILE_BYTES = 2**30
"""A new file is begun at this size: while a file is written, memory holds a second copy of it."""


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes whole tensors into ``folder``, which is made. Neither synced nor atomic: the caller sees to that.

    They are on any device and of any dtype that safetensors has. Aliased and non-contiguous ones are written in full.

    Raises OSError if they cannot be written.
    """
    safetensors = require("safetensors.torch", "train")
    folder.mkdir(parents=True, exist_ok=True)
    own = contiguous_tensors(tensors)
    files = _files_of(own)
    last = max(files.values(), default=0)
    for number in range(1, last + 1):
        chunk = {key: own[key] for key, file in files.items() if file == number}
        name = f"model-{number:05d}-of-{last:05d}.safetensors"
        safetensors.save_file(chunk, str(folder / name), metadata={"format": "pt"})


class TensorShard:
    """What a worker holds of a tensor, with the methods that torch.distributed.checkpoint calls on a sharded tensor.

    The tensor has the elements of ``region``, by default all, in row-major order, or those of them from ``start`` on.
    ``boxes`` are those of interest; None is all.
    """

    def __init__(
        self, tensor: Tensor, region: Region | None = None, *, start: int = 0, boxes: list[Box] | None = None
    ) -> None:
        self._region = whole_region(tensor.shape) if region is None else region
        self._tensor = tensor.detach()
        self._flat = self._tensor.contiguous().view(-1)
        self.boxes = self._region.boxes(start, start + tensor.numel()) if boxes is None else boxes

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self._region.whole)

    @property
    def nbytes(self) -> int:
        """The size of the boxes."""
        return sum(box.elements for box in self.boxes) * self._flat.element_size()

    def only(self, boxes: list[Box]) -> TensorShard:
        """Returns the same with some of the boxes."""
        return TensorShard(self._tensor, self._region, boxes=boxes)

    def copied(self) -> TensorShard:
        """Returns the same with a copy of the elements in host memory."""
        return TensorShard(self._tensor.to("cpu", copy=True), self._region, boxes=self.boxes)

    def finish_read(self) -> None:
        """Copies what was read into the boxes to a tensor whose elements are not in row-major order."""
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat.view(self._tensor.shape))

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(key, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box),
                    properties=TensorProperties.create_from_tensor(box.of(self._flat)),
                    size=self.size(),
                ),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        wanted = tuple(index.offset or ())
        return next(box for box in self.boxes if box.offsets == wanted).of(self._flat)


class TensorReader:
    """Reads the tensors of a safetensors file, or of a folder of such files, each of them whole or in boxes.

    ``tensors`` has, by key, a tensor of the same shape and dtype on the meta device. Raises OSError or SafetensorError
    if a file cannot be read, and CheckpointError if boxes of a tensor are missing.
    """

    def __init__(self, path: Path) -> None:
        require("safetensors", "train")
        self._reader = HuggingFaceStorageReader(str(path))
        self._reader.fs = _FileOrFolder()
        self._metadata = self._reader.read_metadata()
        self.tensors: dict[str, Tensor] = {}
        for key, stored in self._metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                # Boxes of workers that cut a tensor differently may overlap, so there may be more than enough.
                if sum(prod(chunk.sizes) for chunk in stored.chunks) < prod(stored.size):
                    raise CheckpointError(f"{path} lacks a part of {key!r}")
                self.tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")

    def read(self, wanted: Mapping[str, TensorShard]) -> None:
        """Reads into the boxes of ``wanted``, by key, and converts to their dtypes. Raises as the constructor does."""
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(wanted), self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        plan = planner.finish_plan(self._reader.prepare_local_plan(planner.create_local_plan()))
        self._reader.read_data(plan, planner).wait()
        for shard in wanted.values():
            shard.finish_read()

    def read_all(self, *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Returns all tensors but those of some keys, whole and contiguous, on the CPU."""
        left = frozenset(without)
        found = {key: torch.empty_like(each, device="cpu") for key, each in self.tensors.items() if key not in left}
        self.read({key: TensorShard(tensor) for key, tensor in found.items()})
        return found

    def read_whole(self, key: str) -> Tensor:
        """Returns one tensor, whole."""
        tensor = torch.empty_like(self.tensors[key], device="cpu")
        self.read({key: TensorShard(tensor)})
        return tensor


def write_shards(shards: Mapping[str, TensorShard], folder: Path, *, number: int, of: int) -> None:
    """Writes boxes of tensors, by key, to the own files of worker ``number`` ``of`` all, and syncs them to the disk.

    ``folder``, which is made, is the same on all workers.

    Raises OSError if they cannot be written.
    """
    require("safetensors", "train")
    # A file has each key once, so a tensor of several boxes goes to as many files.
    for turn in range(max((len(each.boxes) for each in shards.values()), default=0)):
        single = {key: each.only([each.boxes[turn]]) for key, each in shards.items() if turn < len(each.boxes)}
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_files_of(single), save_distributed=True)
        planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        writer.set_up_storage_writer(False)
        planner.set_up_planner(dict(single), writer.storage_meta(), False)
        prepared = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])[0]
        numbered = replace(prepared, storage_data={**prepared.storage_data, "shard_index": 1 + number + turn * of})
        writer.write_data(numbered, planner).wait()


def balance_writes(
    workers: Communicator, shards: Mapping[str, Mapping[str, TensorShard]]
) -> dict[str, dict[str, TensorShard]]:
    """Returns what this worker writes of what it holds, so that each box is written once and all write about as much.

    Every worker must call it. ``shards`` are what this worker holds, by folder and key.
    """
    listed = [
        [folder, key, list(box.offsets), list(box.sizes), box.elements]
        for folder, tensors in shards.items()
        for key, each in tensors.items()
        for box in each.boxes
    ]
    own = writers(all_gather_object(workers, "who writes what", listed), workers.index)
    found: dict[str, dict[str, TensorShard]] = {folder: {} for folder in shards}
    for folder, tensors in shards.items():
        for key, each in tensors.items():
            if boxes := [box for box in each.boxes if (folder, key, box.offsets, box.sizes) in own]:
                found[folder][key] = each.only(boxes)
    return found


def writers(listed_by_all: list[list[list[Any]]], worker: int) -> set[tuple[Any, ...]]:
    """Returns the boxes that one worker writes. Each box goes to that of its holders which writes least so far.

    ``listed_by_all`` has for each worker its boxes as (folder, key, offsets, sizes, elements); it is equal on all
    workers.
    """
    holders: dict[tuple[Any, ...], list[int]] = {}
    for number, listed in enumerate(listed_by_all):
        for folder, key, offsets, sizes, elements in listed:
            holders.setdefault((folder, key, tuple(offsets), tuple(sizes), elements), []).append(number)
    written = [0] * len(listed_by_all)
    own = set()
    for (*box, elements), candidates in holders.items():
        writer = min(candidates, key=written.__getitem__)
        written[writer] += elements
        if writer == worker:
            own.add(tuple(box))
    return own


class _SavePlanner(DefaultSavePlanner):
    """torch's, for values that are not tensors. Tied ones are each written in full: the format wants copies."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._seen: set[int] = set()

    def lookup_object(self, index: MetadataIndex) -> Any:
        found: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        storage = found.untyped_storage().data_ptr()
        known, self._seen = storage in self._seen, self._seen | {storage}
        return found.clone() if known else found


class _LoadPlanner(DefaultLoadPlanner):
    """torch's, for values that are not tensors."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return found

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator


class _FileOrFolder(FileSystem):
    """Lists a file as the only one in it."""

    def ls(self, path: Any) -> list[str]:
        return [str(path)] if Path(path).is_file() else super().ls(path)


def _files_of(tensors: Mapping[str, Tensor] | Mapping[str, TensorShard]) -> dict[str, int]:
    """The number, from 1, of the file that each tensor goes to."""
    files: dict[str, int] = {}
    number, filled = 1, 0
    for key, tensor in tensors.items():
        if filled and filled + tensor.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        files[key] = number
        filled += tensor.nbytes
    return files


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
