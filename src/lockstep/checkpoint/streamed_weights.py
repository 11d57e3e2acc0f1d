"""Weights to one safetensors file, or from one, a tensor at a time: for models that no memory need hold whole.

header: each key with its type, its lengths and its place -> the tensors one after another -> rename
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.whole_file import whole_file
from lockstep.errors import CheckpointError

_ALIGNED = 8
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What the format calls them."""


def write_streamed(
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
        with whole_file(target) as partial, partial.open("wb") as file:
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
