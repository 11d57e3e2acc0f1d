"""Tensors in safetensors files, whole or in boxes: written by the workers that hold them, read by any others.

    worker 0: its boxes -> shard-00001-....safetensors      each file says where in the whole tensors its boxes are
    worker 1: its boxes -> shard-00002-....safetensors
    any worker: the boxes that it wants <- what overlaps them in all files

The files are in the form of torch.distributed.checkpoint's ``HuggingFaceStorageWriter``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.checksums import metadata_with_sums
from lockstep.checkpoint.weights import contiguous_tensors
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.errors import CheckpointError
from lockstep.extras import require
from lockstep.parallel.regions import Box, Region, Sizes, whole_region

FILE_BYTES = 2**30
"""A new file is begun at this size: while a file is written, memory holds a second copy of it."""
_PLACES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class TensorShard:
    """What a worker holds of a tensor.

    The tensor has the elements of ``region``, by default all, in row-major order, or those of them from ``start`` on.
    ``boxes`` are those of interest; None is all.
    """

    def __init__(
        self, tensor: Tensor, region: Region | None = None, *, start: int = 0, boxes: list[Box] | None = None
    ) -> None:
        self._tensor = tensor.detach()
        self._flat = self._tensor.contiguous().view(-1)
        self._region = whole_region(tensor.shape) if region is None else region
        self.boxes = self._region.boxes(start, start + tensor.numel()) if boxes is None else boxes

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def whole(self) -> Sizes:
        """The shape of the whole tensor."""
        return self._region.whole

    def view(self, box: Box) -> Tensor:
        return box.of(self._flat)

    def only(self, boxes: list[Box]) -> TensorShard:
        return TensorShard(self._tensor, self._region, boxes=boxes)

    def copied(self) -> TensorShard:
        """Returns the same with a copy of the elements in host memory."""
        return TensorShard(self._tensor.to("cpu", copy=True), self._region, boxes=self.boxes)

    def finish_read(self) -> None:
        """Copies what was read into the boxes to a tensor whose elements are not in row-major order."""
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat.view(self._tensor.shape))


class TensorReader:
    """Reads the tensors of a safetensors file, or of a folder of such files, each of them whole or in boxes.

    ``tensors`` has, by key, a tensor of the same shape and dtype on the meta device. Raises OSError or SafetensorError
    if a file cannot be read, and CheckpointError if boxes of a tensor are missing.
    """

    def __init__(self, path: Path) -> None:
        self._chunks: dict[Path, dict[str, tuple[Sizes, Sizes]]] = {}  # by file and key: offsets and sizes
        self.tensors: dict[str, Tensor] = {}
        stored: dict[str, int] = {}
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix == ".safetensors")
        for file in files:
            chunks = self._chunks.setdefault(file, {})
            with _opened(file) as opened:
                places = json.loads((opened.metadata() or {}).get(_PLACES, "{}"))
                for key in opened.keys():  # noqa: SIM118  it is not a dict
                    own = opened.get_slice(key)
                    sizes = tuple(own.get_shape())
                    offsets = tuple(places[key][_OFFSETS]) if key in places else (0,) * len(sizes)
                    chunks[key] = offsets, sizes
                    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
                    ends = list(map(max, ends, self.tensors[key].shape)) if key in self.tensors else ends
                    dtype = own[tuple(slice(0, 0) for _ in sizes)].dtype
                    self.tensors[key] = torch.empty(ends, dtype=dtype, device="meta")
                    # Boxes of workers that cut a tensor differently may overlap, so there may be more than enough.
                    stored[key] = stored.get(key, 0) + prod(sizes)
        for key, tensor in self.tensors.items():
            if stored[key] < tensor.numel():
                raise CheckpointError(f"{path} lacks a part of {key!r}")

    def read(self, wanted: Mapping[str, TensorShard]) -> None:
        """Reads into the boxes of ``wanted``, by key, and converts to their dtypes. Raises as the constructor does."""
        for file, chunks in self._chunks.items():
            if not (keys := [key for key in wanted if key in chunks]):
                continue
            with _opened(file) as opened:
                for key in keys:
                    stored = opened.get_tensor(key)  # maps the file: what is not copied is not read
                    for box in wanted[key].boxes:
                        _copy_overlap(stored, *chunks[key], box, wanted[key].view(box))
        for shard in wanted.values():
            shard.finish_read()

    def read_all(self, *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Returns all tensors but those of some keys, whole and contiguous, on the CPU."""
        left = frozenset(without)
        found = {key: torch.empty_like(each, device="cpu") for key, each in self.tensors.items() if key not in left}
        self.read({key: TensorShard(tensor) for key, tensor in found.items()})
        return found

    def read_whole(self, key: str) -> Tensor:
        tensor = torch.empty_like(self.tensors[key], device="cpu")
        self.read({key: TensorShard(tensor)})
        return tensor


def _opened(file: Path) -> Any:
    return require("safetensors", "train").safe_open(file, framework="pt")


def _copy_overlap(stored: Tensor, offsets: Sizes, sizes: Sizes, box: Box, target: Tensor) -> None:
    """Copies to ``target``, the view of a box, what a chunk that begins at ``offsets`` has of it."""
    here: list[slice] = []
    there: list[slice] = []
    for offset, size, begin, length in zip(offsets, sizes, box.offsets, box.sizes, strict=True):
        first, end = max(offset, begin), min(offset + size, begin + length)
        if first >= end:
            return
        here.append(slice(first - begin, end - begin))
        there.append(slice(first - offset, end - offset))
    target[tuple(here)].copy_(stored[tuple(there)])


def write_shards(shards: Mapping[str, TensorShard], folder: Path, *, prefix: str = "model") -> None:
    """Writes boxes of tensors, by key, to files whose names begin with ``prefix``, and syncs them to the disk.

    ``folder``, which is made, is the same on all workers, and each has a prefix of its own. The tensors are on any
    device; aliased ones are each written in full. Raises OSError or SafetensorError if they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, tuple[Box, Tensor]]] = []
    # A file has each key once, so the boxes of a tensor go to as many files.
    for turn in range(max((len(each.boxes) for each in shards.values()), default=0)):
        filled = FILE_BYTES
        for key, each in shards.items():
            if turn >= len(each.boxes):
                continue
            view = each.view(each.boxes[turn])
            if filled + view.nbytes > FILE_BYTES:
                files.append({})
                filled = 0
            files[-1][key] = each.boxes[turn], view
            filled += view.nbytes
    for count, file in enumerate(files, start=1):
        path = folder / f"{prefix}-{count:05d}.safetensors"
        places = {key: {_OFFSETS: box.offsets} for key, (box, _) in file.items()}
        tensors = contiguous_tensors({key: view for key, (_, view) in file.items()})
        metadata = metadata_with_sums(tensors) | {"DCP_VERSION": "1.0", _PLACES: json.dumps(places)}
        require("safetensors.torch", "train").save_file(tensors, str(path), metadata=metadata)
        with path.open("rb") as written:
            os.fsync(written.fileno())


def balance_writes(
    workers: Communicator, shards: Mapping[str, Mapping[str, TensorShard]]
) -> dict[str, dict[str, TensorShard]]:
    """Returns what this worker writes of the ``shards`` that it holds, by folder and key: each box is written once.

    All workers write about as much. Every worker must call it.
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

    ``listed_by_all`` has for each worker its boxes as (folder, key, offsets, sizes, elements).
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
