"""Who writes what of tensors that several workers hold: each box is written once, and all write about as much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

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
"""A file is begun anew at this size: the writer holds a second copy of the whole file in memory."""


def write_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes tensors into ``folder``, which is made. Not synced, not atomic: that is the caller's business.

    Args:
        tensors: on any device, of any dtype that safetensors has; shared and non-contiguous ones are written in full.
        folder: where to.

    Raises:
        OSError: it cannot be written, for lack of room or permission.
    """
    require("safetensors", "train")
    own = contiguous_tensors(tensors)
    if not own:
        folder.mkdir(parents=True, exist_ok=True)
        return
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=divide_into_files(own))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer.set_up_storage_writer(True)
    planner.set_up_planner(own, writer.storage_meta(), True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def _all_of_them(key: str) -> bool:
    return True


def read_tensors(folder: Path, wanted: Callable[[str], bool] = _all_of_them) -> dict[str, torch.Tensor]:
    """The tensors in ``folder``, contiguous, on the CPU; also those of which several files hold parts.

    Args:
        folder: where they are.
        wanted: whether to read the one with a key.

    Raises:
        OSError: a file cannot be read.
        SafetensorError: a file is damaged.
    """
    require("safetensors", "train")
    reader = HuggingFaceStorageReader(str(folder))
    metadata = reader.read_metadata()
    tensors = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata) and wanted(key)
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()
    return tensors


class HasBytes(Protocol):
    """What takes up room in a file."""

    @property
    def nbytes(self) -> int: ...


def divide_into_files(tensors: Mapping[str, HasBytes]) -> dict[str, int]:
    """The number, from 1, of the file that each tensor goes to."""
    files: dict[str, int] = {}
    number, filled = 1, 0
    for key, tensor in tensors.items():
        if filled and filled + tensor.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        files[key] = number
        filled += tensor.nbytes
    return files


class TensorShard:
    """What a worker holds of a tensor, as torch.distributed.checkpoint asks tensors for it.

    Args:
        tensor: the elements, in row-major order.
        region: where they stand in the whole tensor; None is all of it.
        start: the first of the region's elements that is held, where not all are.
        boxes: those of interest; None is all.
    """

    def __init__(
        self, tensor: Tensor, region: Region | None = None, *, start: int = 0, boxes: list[Box] | None = None
    ) -> None:
        self._region = whole_region(tensor.shape) if region is None else region
        self._tensor = tensor.detach()
        self._flat = self._tensor.contiguous().view(-1)
        self.boxes = self._region.boxes(start, start + tensor.numel()) if boxes is None else boxes

    def size(self) -> torch.Size:
        """The lengths of the whole tensor."""
        return torch.Size(self._region.whole)

    @property
    def nbytes(self) -> int:
        """Of the boxes."""
        return sum(box.elements for box in self.boxes) * self._flat.element_size()

    def only(self, boxes: list[Box]) -> TensorShard:
        """The same with some of the boxes."""
        return TensorShard(self._tensor, self._region, boxes=boxes)

    def copied(self) -> TensorShard:
        """The same, of a copy in host memory."""
        return TensorShard(self._tensor.to("cpu", copy=True), self._region, boxes=self.boxes)

    def settle(self) -> None:
        """After its boxes were written to: brings that to a tensor whose elements are not in row-major order."""
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


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file: its lengths and its type."""

    shape: torch.Size
    dtype: torch.dtype


class TensorReader:
    """The tensors of a safetensors file, or of a folder of such files, each of them whole or in boxes.

    Args:
        path: the file or folder.

    Raises:
        OSError: it cannot be read.
        SafetensorError: a file is damaged.
        CheckpointError: boxes of a tensor are not there.
    """

    def __init__(self, path: Path) -> None:
        require("safetensors", "train")
        self._reader = HuggingFaceStorageReader(str(path))
        self._reader.fs = _FileOrFolder()
        self._metadata = self._reader.read_metadata()
        found = self._metadata.state_dict_metadata
        self.tensors = {
            key: TensorInfo(each.size, each.properties.dtype)
            for key, each in found.items()
            if isinstance(each, TensorStorageMetadata) and _is_complete(key, each, path)
        }

    def read(self, wanted: Mapping[str, TensorShard]) -> None:
        """Reads what is wanted of some tensors into its place; other types are converted.

        Raises:
            OSError: it cannot be read.
            SafetensorError: a file is damaged.
        """
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(wanted), self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        plan = planner.finish_plan(self._reader.prepare_local_plan(planner.create_local_plan()))
        self._reader.read_data(plan, planner).wait()
        for held in wanted.values():
            held.settle()

    def read_whole(self, key: str) -> Tensor:
        """One tensor, all of it."""
        stored = self.tensors[key]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.read({key: TensorShard(tensor)})
        return tensor


def write_shards(held: Mapping[str, TensorShard], folder: Path, *, number: int, of: int) -> None:
    """Writes boxes of tensors to files of this worker's own in ``folder``, which is made. They are on the disk then.

    Args:
        held: what to write, by key.
        folder: the same for all workers.
        number: this worker's, from 0.
        of: how many workers there are.

    Raises:
        OSError: it cannot be written.
    """
    require("safetensors", "train")
    # A file has a tensor's key once: what has several boxes goes to as many files.
    for turn, single in enumerate(_turns(held)):
        writer = HuggingFaceStorageWriter(
            str(folder), fqn_to_index_mapping=divide_into_files(single), save_distributed=True
        )
        planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        writer.set_up_storage_writer(False)
        planner.set_up_planner(dict(single), writer.storage_meta(), False)
        prepared = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])[0]
        numbered = replace(prepared, storage_data={**prepared.storage_data, "shard_index": 1 + number + turn * of})
        writer.write_data(numbered, planner).wait()


class _SavePlanner(DefaultSavePlanner):
    """Torch's, for values that are no tensors. Tied ones are each written in full: the format wants copies for it."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._seen: set[int] = set()

    def lookup_object(self, index: MetadataIndex) -> Any:
        found: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        storage = found.untyped_storage().data_ptr()
        known, self._seen = storage in self._seen, self._seen | {storage}
        return found.clone() if known else found


class _LoadPlanner(DefaultLoadPlanner):
    """Torch's, for values that are no tensors."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return found

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator


class _FileOrFolder(FileSystem):
    """Lists a file as the one in it."""

    def ls(self, path: Any) -> list[str]:
        return [str(path)] if Path(path).is_file() else super().ls(path)


def _turns(held: Mapping[str, TensorShard]) -> Iterator[dict[str, TensorShard]]:
    for turn in range(max((len(each.boxes) for each in held.values()), default=0)):
        yield {key: each.only([each.boxes[turn]]) for key, each in held.items() if turn < len(each.boxes)}


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _is_complete(key: str, stored: TensorStorageMetadata, path: Path) -> bool:
    """Always; boxes that two workers have cut differently may overlap, so there can be more than enough.

    Raises:
        CheckpointError: there are fewer elements than the tensor has.
    """
    if sum(prod(chunk.sizes) for chunk in stored.chunks) < prod(stored.size):
        raise CheckpointError(f"{path} lacks a part of {key!r}")
    return True


def balance_writes(
    workers: Communicator, held: Mapping[str, Mapping[str, TensorShard]]
) -> dict[str, dict[str, TensorShard]]:
    """What this worker writes of what it holds. Every worker must call it.

    Args:
        workers: all that write.
        held: by folder and key what this one holds.
    """
    listed = [
        [folder, key, list(box.offsets), list(box.sizes), box.elements]
        for folder, tensors in held.items()
        for key, each in tensors.items()
        for box in each.boxes
    ]
    own = writers(all_gather_object(workers, "who writes what", listed), workers.index)
    found: dict[str, dict[str, TensorShard]] = {}
    for folder, tensors in held.items():
        chosen = {
            key: each.only([box for box in each.boxes if (folder, key, box.offsets, box.sizes) in own])
            for key, each in tensors.items()
        }
        found[folder] = {key: each for key, each in chosen.items() if each.boxes}
    return found


def writers(everyones: list[list[list[Any]]], worker: int) -> set[tuple[Any, ...]]:
    """Of the boxes that all workers list, those that one of them writes: each is given to the holder with least so far.

    Args:
        everyones: of each worker (folder, key, offsets, sizes, elements), the same on all of them.
        worker: whose boxes are wanted.
    """
    holders: dict[tuple[Any, ...], list[int]] = {}
    weight: dict[tuple[Any, ...], int] = {}
    for number, listed in enumerate(everyones):
        for folder, key, offsets, sizes, elements in listed:
            box = (folder, key, tuple(offsets), tuple(sizes))
            holders.setdefault(box, []).append(number)
            weight[box] = elements
    so_far = [0] * len(everyones)
    own = set()
    for box, candidates in holders.items():
        writer = min(candidates, key=so_far.__getitem__)
        so_far[writer] += weight[box]
        if writer == worker:
            own.add(box)
    return own
