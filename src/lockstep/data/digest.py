"""Short digests of what all workers must have alike: the rows of a batch by their indices, or a batch by its looks.

They find data in another order, of another length or of another file, and cost a few microseconds; they prove nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.data.leaves import is_plain
from lockstep.data.structure import named_leaves

_SAMPLED = 16
# What is written alike in every process; of other indices only the type is compared.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def index_digest(indices: Sequence[Any]) -> int:
    """Of a batch's indices in the data set, as a sampler gives them: 32 bits."""
    return zlib.crc32(repr([_written(index) for index in indices]).encode())


def batch_digest(batch: Any) -> int:
    """Of a batch's names, shapes, dtypes and single values, and of a few elements of each tensor: 32 bits."""
    digest = 0
    for name, leaf in named_leaves(batch):
        digest = zlib.crc32(f"{name}:{_looks(leaf)}".encode(), digest)
        if isinstance(leaf, torch.Tensor):
            digest = zlib.crc32(_sample(leaf), digest)
    return digest


def _written(index: Any) -> Any:
    if type(index) in _PLAIN:
        return index
    if isinstance(index, (tuple, list)):
        return [_written(each) for each in index]
    return index.tolist() if isinstance(index, torch.Tensor) else type(index).__name__


def _looks(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{leaf.size(0) if leaf.is_nested else tuple(leaf.shape)}"
    return repr(leaf) if type(leaf) in _PLAIN else type(leaf).__name__


def _sample(tensor: torch.Tensor) -> bytes:
    """Elements from the first to the last, evenly spread, as bytes. Nothing is copied but these."""
    if not is_plain(tensor) or not tensor.numel():
        return b""
    last = tensor.numel() - 1
    places = [last * step // (_SAMPLED - 1) for step in range(_SAMPLED)]
    taken = tensor.detach().take(torch.tensor(places, device=tensor.device))
    return bytes(taken.cpu().view(torch.uint8).tolist())
