"""Tensors in safetensors files, read whole or in boxes.

    any worker: the boxes that it wants <- what overlaps them in all files

A file has whole tensors, or boxes of them in the form of torch.distributed.checkpoint's ``HuggingFaceStorageWriter``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.extras import require
from lockstep.parallel.regions import Box, Region, Sizes, whole_region

SUFFIX = ".safetensors"
PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class TensorShard:
    """What a worker holds of a tensor.

    The tensor has the elements of ``region``, by default all, in row-major order, or those of them from ``start`` on.
    ``boxes`` are those of interest; None is all.
    """

    def __init__(
        self, tensor: Tensor, region: Region | None = None, *, start: int = 0, boxes: list[Box] | None = None
    ) -> None:
        # contiguous() copies a tensor in another memory format, such as channels_last; ``finish_read`` copies back.
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


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, which a file has under a key."""

    name: str  # of the tensor
    key: str
    offsets: Sizes  # the index of its first element in the tensor
    sizes: Sizes


class TensorReader:
    """Reads the tensors of a safetensors file, or of a folder of such files, each of them whole or in boxes.

    ``files`` are those to read; None is ``path``, or all in that folder. ``tensors`` has, by key, a tensor of the same
    shape and dtype on the meta device. Raises OSError or SafetensorError if a file cannot be read, and CheckpointError
    if boxes of a tensor are missing.
    """

    def __init__(self, path: Path, files: Sequence[Path] | None = None) -> None:
        self._chunks: dict[Path, list[_Chunk]] = {}  # by file
        self.tensors: dict[str, Tensor] = {}
        stored: dict[str, int] = {}
        if files is None:
            files = [path] if path.is_file() else sorted(entry for entry in path.iterdir() if entry.suffix == SUFFIX)
        for file in files:
            chunks = self._chunks.setdefault(file, [])
            with _opened(file) as opened:
                places = json.loads((opened.metadata() or {}).get(PLACES, "{}"))
                for key in opened.keys():  # noqa: SIM118  it is not a dict
                    tensor_slice = opened.get_slice(key)
                    sizes = tuple(tensor_slice.get_shape())
                    offsets = tuple(places[key][OFFSETS]) if key in places else (0,) * len(sizes)
                    chunks.append(_Chunk(key, key, offsets, sizes))
                    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
                    ends = list(map(max, ends, self.tensors[key].shape)) if key in self.tensors else ends
                    # safetensors names dtypes in its own words; an empty slice has torch's, and reads nothing.
                    dtype = uninterrupted(tensor_slice.__getitem__, tuple(slice(0, 0) for _ in sizes)).dtype
                    self.tensors[key] = torch.empty(ends, dtype=dtype, device="meta")
                    # Boxes of workers that cut a tensor differently may overlap, so there may be more than enough.
                    stored[key] = stored.get(key, 0) + prod(sizes)
        for key, tensor in self.tensors.items():
            if stored[key] < tensor.numel():
                raise CheckpointError(f"{path} lacks a part of {key!r}")

    def merge(self, name: str, parts: Mapping[str, Sizes]) -> None:
        """Makes one tensor of several, which it has in place of them.

        ``parts`` has, by key, the index in it of each one's first element. They fill it; one that has fewer dims has
        the last ones.
        """
        ends = [0] * len(next(iter(parts.values())))
        for file, chunks in self._chunks.items():
            for number, chunk in enumerate(chunks):
                if (first := parts.get(chunk.name)) is None:
                    continue
                more = len(first) - len(chunk.sizes)
                offsets = [begin + offset for begin, offset in zip(first, (0,) * more + chunk.offsets, strict=True)]
                sizes = (1,) * more + chunk.sizes
                ends = [max(end, offset + size) for end, offset, size in zip(ends, offsets, sizes, strict=True)]
                self._chunks[file][number] = replace(chunk, name=name, offsets=tuple(offsets), sizes=sizes)
        merged = [self.tensors.pop(key) for key in parts]
        self.tensors[name] = torch.empty(ends, dtype=merged[0].dtype, device="meta")

    def read(self, shards: Mapping[str, TensorShard]) -> None:
        """Reads into the boxes of ``shards``, by key, and converts to their dtypes. Raises as the constructor does."""
        for file, chunks in self._chunks.items():
            if not (matches := [chunk for chunk in chunks if chunk.name in shards]):
                continue
            with _opened(file) as opened:
                for chunk in matches:
                    # The file is mapped, so a chunk is not in memory before it is copied from.
                    stored = uninterrupted(opened.get_tensor, chunk.key).view(chunk.sizes)
                    shard = shards[chunk.name]
                    for box in shard.boxes:
                        _copy_overlap(stored, chunk.offsets, chunk.sizes, box, shard.view(box))
        for shard in shards.values():
            shard.finish_read()

    def read_all(self, *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Returns all tensors but those of some keys, whole and contiguous, on the CPU."""
        excluded_keys = frozenset(without)
        tensors = {
            key: torch.empty_like(blank, device="cpu")
            for key, blank in self.tensors.items()
            if key not in excluded_keys
        }
        self.read({key: TensorShard(tensor) for key, tensor in tensors.items()})
        return tensors

    def files_of(self, key: str) -> list[Path]:
        return [file for file, chunks in self._chunks.items() if any(chunk.name == key for chunk in chunks)]

    def read_whole(self, key: str) -> Tensor:
        tensor = torch.empty_like(self.tensors[key], device="cpu")
        self.read({key: TensorShard(tensor)})
        return tensor


def uninterrupted(read: Callable[[Any], Tensor], what: Any) -> Tensor:
    """``read(what)``, where safetensors makes a tensor; it maps the file, so what is not copied is not read.

    A Ctrl-C in it becomes a ValueError of torch, which would pass for damage. What is damaged fails again.
    """
    try:
        return read(what)
    except ValueError as error:
        read(what)
        raise KeyboardInterrupt from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a file; an error of the format names it, as those of the system do."""
    library = require("safetensors", "train")
    try:
        with library.safe_open(file, framework="pt") as opened:
            yield opened
    except library.SafetensorError as error:
        raise library.SafetensorError(f"{file}: {error}") from error


def _copy_overlap(stored: Tensor, offsets: Sizes, sizes: Sizes, box: Box, target: Tensor) -> None:
    """Copies to ``target``, the view of a box, what a chunk that begins at ``offsets`` has of it."""
    target_slices: list[slice] = []
    stored_slices: list[slice] = []
    for offset, size, begin, length in zip(offsets, sizes, box.offsets, box.sizes, strict=True):
        first, end = max(offset, begin), min(offset + size, begin + length)
        if first >= end:
            return
        target_slices.append(slice(first - begin, end - begin))
        stored_slices.append(slice(first - offset, end - offset))
    target[tuple(target_slices)].copy_(stored[tuple(stored_slices)])
