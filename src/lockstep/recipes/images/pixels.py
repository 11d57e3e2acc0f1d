"""All pictures of a run as one array, decoded once: in worker processes, or in this one.

The workers are those of torch's DataLoader: they end with the iteration, on an error and on Ctrl-C too, and by
themselves when this process is gone. Epochs read the array: no picture is decoded twice, no process started again.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.errors import DataError
from lockstep.extras import require
from lockstep.recipes.images.decode import decode_file

_AT_ONCE = 16  # pictures that a worker hands over together


@dataclass(frozen=True, kw_only=True)
class PixelStore:
    """Pixels of pictures, and those that could not be had.

    Args:
        pixels: numpy array [pictures, size, size, 3] uint8; the rows of broken pictures are 0.
        broken: place of a broken picture -> the reason.
    """

    pixels: Any
    broken: Mapping[int, str]


def decode_into(pixels: Any, paths: Sequence[Path], *, workers: int) -> dict[int, str]:
    """Decodes the files into ``pixels``, in order; returns place -> reason for those that are broken.

    Args:
        pixels: numpy array [pictures, size, size, 3] uint8 to fill.
        paths: as many files.
        workers: processes that decode; 0 decodes here.

    Raises:
        DataError: a worker died.
    """
    broken: dict[int, str] = {}
    with closing(decoded(paths, size=pixels.shape[1], workers=workers)) as results:
        for place, result in enumerate(results):
            if isinstance(result, str):
                broken[place] = result
            else:
                pixels[place] = result
    return broken


def decoded(paths: Sequence[Path], *, size: int, workers: int) -> Generator[Any, None, None]:
    """The pictures in the order of the paths, each as an array or as the reason why there is none."""
    loader = DataLoader(
        _Files(paths, size),
        batch_size=_AT_ONCE,
        num_workers=min(workers, -(-len(paths) // _AT_ONCE)),
        collate_fn=list,
        generator=torch.Generator(),  # else the loader draws from the caller's random numbers
    )
    try:
        for results in loader:
            yield from results
    except RuntimeError as error:
        raise DataError(f"a process that decodes pictures died ({error}); try fewer workers, or --workers 0") from error


def memory_store(paths: Sequence[Path], *, size: int, workers: int) -> PixelStore:
    """The pictures in the memory of this process."""
    pixels = require("numpy", "images").zeros((len(paths), size, size, 3), dtype="uint8")
    return PixelStore(pixels=pixels, broken=decode_into(pixels, paths, workers=workers))


class _Files(Dataset[Any]):
    def __init__(self, paths: Sequence[Path], size: int) -> None:
        self._paths = paths
        self._decode = partial(decode_file, size=size)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, place: int) -> Any:
        return self._decode(self._paths[place])
