from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from lockstep.errors import DataError
from lockstep.recipes.images import pixels
from lockstep.recipes.images.pixels import decode_file, decode_to_memory, format_bytes, map_in_workers

if TYPE_CHECKING:
    from tests.recipes.images.conftest import MakeTree


@pytest.fixture
def paths(make_tree: MakeTree) -> list[Path]:
    """Seventy pictures, of which the third is broken."""
    root = make_tree("data", {"a": 70})
    (root / "a" / "002.png").write_bytes(b"")
    return sorted((root / "a").iterdir())


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_any_number_of_workers_gives_the_same_pixels_in_order(workers: int, paths: list[Path]):
    said: list[tuple[int, int]] = []

    store = decode_to_memory(paths, size=6, workers=workers, progress=lambda done, of: said.append((done, of)))

    assert store.broken == {2: "empty file"}
    assert store.pixels.shape == (70, 6, 6, 3)
    for place in (0, 1, 17, 69):
        assert np.array_equal(store.pixels[place], decode_file(paths[place], 6))
    assert not store.pixels[2].any()
    assert said == [(done, 70) for done in range(1, 71)]
    assert store.description == "0.0 MB decoded in memory"


def test_the_callers_random_numbers_are_left_alone(paths: list[Path]):
    state = torch.get_rng_state()

    decode_to_memory(paths, size=6, workers=1)

    assert torch.equal(torch.get_rng_state(), state)


def test_workers_are_processes_and_end_when_nobody_reads_on(paths: list[Path]):
    # conftest fails this test if one of them is left.
    with closing(map_in_workers(_process, paths, workers=2)) as results:
        assert next(results) != os.getpid()


def test_a_worker_that_dies_is_one_line(paths: list[Path]):
    with pytest.raises(DataError, match=r"a process that decodes images died .*; try fewer workers, or --workers 0"):
        list(map_in_workers(_die, paths, workers=1))


def test_what_does_not_fit_into_memory_is_refused(paths: list[Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pixels, "_free_memory", lambda: 10_000_000)

    with pytest.raises(DataError) as caught:
        decode_to_memory(paths, size=224, workers=0)

    assert "70 images of 224x224 take 10.5 MB decoded, expected at most 80% of the 10.0 MB" in str(caught.value)
    assert "--cache disk" in str(caught.value)


def test_the_machine_says_how_much_memory_is_free():
    assert (pixels._free_memory() or 0) > 2**20


def test_sizes_are_for_a_person():
    assert [format_bytes(n) for n in (1_234_567, 3_763_200_000)] == ["1.2 MB", "3.8 GB"]


def _process(path: Path) -> int:
    return os.getpid()


def _die(path: Path) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0
