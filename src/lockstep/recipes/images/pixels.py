"""All pictures of a run as one array, decoded once: in worker processes, or in this one.

The workers are those of torch's DataLoader: they end with the iteration, on an error and on Ctrl-C too, and by
themselves when this process is gone. Epochs read the array: no picture is decoded twice, no process started again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.errors import DataError
from lockstep.extras import require
from lockstep.recipes.images.decode import decode_file

Result = TypeVar("Result")

Progress = Callable[[int, int], None]
"""Told how many pictures are decoded, of how many."""

_AT_ONCE = 16  # pictures that a worker hands over together
_MEMORY_SHARE = 0.8  # of the memory that is free; the model and its batches need some too


@dataclass(frozen=True, kw_only=True)
class PixelStore:
    """Pixels of pictures, and those that could not be had.

    Args:
        pixels: numpy array [pictures, size, size, 3] uint8; the rows of broken pictures are 0.
        broken: place of a broken picture -> the reason.
        file: where the pixels lie; None is in memory.
    """

    pixels: Any
    broken: Mapping[int, str]
    file: Path | None = None

    @property
    def kept(self) -> str:
        """Where the pixels are and how much room they take, in words for a person."""
        place = "in memory" if self.file is None else f"in {self.file}"
        return f"{said_size(self.pixels.nbytes)} decoded {place}"


def memory_store(paths: Sequence[Path], *, size: int, workers: int, progress: Progress | None = None) -> PixelStore:
    """The pictures in the memory of this process.

    Raises:
        DataError: they do not fit.
    """
    needed, free = len(paths) * size * size * 3, _free_memory()
    if free is not None and needed > _MEMORY_SHARE * free:
        raise DataError(
            f"{len(paths):,} pictures of {size}x{size} take {said_size(needed)} decoded, expected at most"
            f" {_MEMORY_SHARE:.0%} of the {said_size(free)} of memory that are free;"
            ' give cache="disk" (--cache disk) or a smaller size'
        )
    pixels = require("numpy", "images").zeros((len(paths), size, size, 3), dtype="uint8")
    return PixelStore(pixels=pixels, broken=decode_into(pixels, paths, workers=workers, progress=progress))


def decode_into(
    pixels: Any, paths: Sequence[Path], *, workers: int, progress: Progress | None = None
) -> dict[int, str]:
    """Decodes the files into ``pixels``, in order; returns place -> reason for those that are broken.

    Args:
        pixels: numpy array [pictures, size, size, 3] uint8 to fill.
        paths: as many files.
        workers: processes that decode; 0 decodes here.
        progress: told after each picture.

    Raises:
        DataError: a worker died.
    """
    broken: dict[int, str] = {}
    decode = partial(decode_file, size=pixels.shape[1])
    with closing(in_workers(decode, paths, workers=workers)) as results:
        for place, result in enumerate(results):
            if isinstance(result, str):
                broken[place] = result
            else:
                pixels[place] = result
            if progress is not None:
                progress(place + 1, len(paths))
    return broken


def in_workers(
    function: Callable[[Path], Result], paths: Sequence[Path], *, workers: int
) -> Generator[Result, None, None]:
    """What ``function`` returns for each path, in order. Close the generator, or read it to its end.

    Args:
        function: runs in the workers; what it returns is sent here.
        paths: the files.
        workers: processes; 0 runs it here. Few files take fewer.

    Raises:
        DataError: a worker died.
    """
    loader = DataLoader(
        _Results(function, paths),
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


def said_size(length: int) -> str:
    """A number of bytes for a person: ``5.5 MB``, ``3.8 GB``."""
    return f"{length / 1e9:.1f} GB" if length >= 1e9 else f"{length / 1e6:.1f} MB"


def _free_memory() -> int | None:
    """Bytes that the machine can give without swapping; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


class _Results(Dataset[Result]):
    def __init__(self, function: Callable[[Path], Result], paths: Sequence[Path]) -> None:
        self._function = function
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, place: int) -> Result:
        return self._function(self._paths[place])
