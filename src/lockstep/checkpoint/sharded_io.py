"""Boxes of tensors written to safetensors files, by the workers that hold them.

    worker 0: its boxes -> shard-00001-....safetensors      each file says where in the whole tensors its boxes are
    worker 1: its boxes -> shard-00002-....safetensors

The files are in the form of torch.distributed.checkpoint's ``HuggingFaceStorageWriter``; ``parallel.tensor_files``
reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint.checksums import metadata_with_sums
from lockstep.checkpoint.weights import contiguous_tensors
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.extras import require
from lockstep.parallel.regions import Box
from lockstep.parallel.tensor_files import OFFSETS, PLACES, TensorShard

FILE_BYTES = 2**30
"""A new file is begun at this size: while a file is written, memory holds a second copy of it."""


def write_shards(shards: Mapping[str, TensorShard], folder: Path, *, prefix: str = "model") -> None:
    """Writes boxes of tensors, by key, to files whose names begin with ``prefix``, and syncs them to the disk.

    ``folder``, which is made, is the same on all workers, and each has a prefix of its own. The tensors are on any
    device; aliased ones are each written in full. Raises OSError or SafetensorError if they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, tuple[Box, Tensor]]] = []
    # A file has each key once, so the boxes of a tensor go to as many files.
    for turn in range(max((len(shard.boxes) for shard in shards.values()), default=0)):
        filled = FILE_BYTES
        for key, shard in shards.items():
            if turn >= len(shard.boxes):
                continue
            view = shard.view(shard.boxes[turn])
            if filled + view.nbytes > FILE_BYTES:
                files.append({})
                filled = 0
            files[-1][key] = shard.boxes[turn], view
            filled += view.nbytes
    for count, file in enumerate(files, start=1):
        path = folder / f"{prefix}-{count:05d}.safetensors"
        places = {key: {OFFSETS: box.offsets} for key, (box, _) in file.items()}
        tensors = contiguous_tensors({key: view for key, (_, view) in file.items()})
        metadata = metadata_with_sums(tensors) | {"DCP_VERSION": "1.0", PLACES: json.dumps(places)}
        require("safetensors.torch", "train").save_file(tensors, str(path), metadata=metadata)
        # The chief renames the folder when all workers have written. A rename can reach the disk before the content of
        # a file that was not synced, and a host that loses power then would leave a checkpoint that looks whole.
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
        for key, shard in tensors.items()
        for box in shard.boxes
    ]
    boxes_to_write = writers(all_gather_object(workers, "who writes what", listed), workers.index)
    result: dict[str, dict[str, TensorShard]] = {folder: {} for folder in shards}
    for folder, tensors in shards.items():
        for key, shard in tensors.items():
            if boxes := [box for box in shard.boxes if (folder, key, box.offsets, box.sizes) in boxes_to_write]:
                result[folder][key] = shard.only(boxes)
    return result


def writers(listed_by_all: list[list[list[Any]]], worker: int) -> set[tuple[Any, ...]]:
    """Returns the boxes that one worker writes. Each box goes to that of its holders which writes least so far.

    ``listed_by_all`` has for each worker its boxes as (folder, key, offsets, sizes, elements).
    """
    holders: dict[tuple[Any, ...], list[int]] = {}
    for number, listed in enumerate(listed_by_all):
        for folder, key, offsets, sizes, elements in listed:
            holders.setdefault((folder, key, tuple(offsets), tuple(sizes), elements), []).append(number)
    written = [0] * len(listed_by_all)
    boxes = set()
    for (*box, elements), candidates in holders.items():
        # min takes the first of equals, so all workers come to the same choice without an exchange.
        writer = min(candidates, key=written.__getitem__)
        written[writer] += elements
        if writer == worker:
            boxes.add(tuple(box))
    return boxes
