"""Checksums of a checkpoint's files: damage that leaves a file's size as it was is found before anything is loaded.

    tensor's bytes -> CRC-32 -> the header of its file, by the worker that writes it
    header's bytes -> CRC-32 -> the record, by the chief, which reads no more of the files of other workers

Against damage, not against forgery.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.extras import require
from lockstep.parallel.tensor_files import uninterrupted

_SUMS = "lockstep_crc32"


def metadata_with_sums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a safetensors file of these tensors, by key, which may be on any device."""
    return {"format": "pt", _SUMS: json.dumps({key: _sum_of(tensor) for key, tensor in tensors.items()})}


def sum_of_header(file: Path) -> int:
    """The checksum of the header of a safetensors file, which says what is where in it. Raises OSError."""
    with file.open("rb") as opened:
        size = opened.read(8)
        # A damaged size may be any number.
        return zlib.crc32(size + opened.read(min(int.from_bytes(size, "little"), file.stat().st_size)))


def damage_of(file: Path, header_sum: int) -> str:
    """What is not as it was written in a safetensors file; empty if all is.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: its header has no meaning.
    """
    if sum_of_header(file) != header_sum:
        return f"{file.name}: the checksum of its header is not that of its content"
    with require("safetensors", "train").safe_open(file, framework="pt") as opened:
        for key, expected in json.loads(opened.metadata()[_SUMS]).items():
            # Ctrl-C inside of safetensors comes out as a ValueError, which would pass for damage
            # (test_ctrl_c_while_it_is_read_is_not_taken_for_damage).
            if _sum_of(uninterrupted(opened.get_tensor, key)) != expected:
                return f"{file.name}: the checksum of {key!r} is not that of its content"
    return ""


def _sum_of(tensor: Tensor) -> int:
    elements = tensor.detach().cpu().contiguous().reshape(-1)
    # crc32 reads the array's own memory, so no second copy of the tensor is made.
    as_bytes: Any = elements.view(torch.uint8).numpy()
    return zlib.crc32(as_bytes)
