from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.sharded_io import write_shards, writers
from lockstep.errors import CheckpointError
from lockstep.parallel.regions import Region, whole_region
from lockstep.parallel.tensor_files import TensorReader, TensorShard

WHOLE = {
    "columns": torch.randn(4, 12, generator=torch.Generator().manual_seed(1)),
    "rows": torch.randn(6, 3, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "step": torch.tensor(3.0),
}


def half(rank: int) -> dict[str, TensorShard]:
    """What one of two tensor ranks holds: of the first every second pair of columns, put side by side."""
    columns = tuple(each for each in range(12) if each // 2 % 2 == rank)
    rows = Region(whole=(6, 3), sizes=(3, 3), offsets=(3 * rank, 0))
    fused = Region(whole=(4, 12), sizes=(4, 6), offsets=(0, 6 * rank), columns=columns)
    return {
        "columns": TensorShard(WHOLE["columns"][:, list(columns)], fused),
        "rows": TensorShard(WHOLE["rows"][3 * rank : 3 * rank + 3], rows),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Written by two workers, and a third one that has the rest."""
    for rank in (0, 1):
        write_shards(half(rank), tmp_path, prefix=f"shard-{rank}")
    write_shards({"step": TensorShard(WHOLE["step"])}, tmp_path, prefix="shard-2")
    return tmp_path


def test_what_two_wrote_one_reads_whole(folder: Path):
    found = TensorReader(folder).read_all()
    assert {name: value.dtype for name, value in found.items()} == {name: each.dtype for name, each in WHOLE.items()}
    assert all(torch.equal(found[name], value) for name, value in WHOLE.items())


@pytest.mark.parametrize("written_whole", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, 48), (5, 31), (47, 48)])
def test_any_elements_are_read_from_whole_files_and_from_boxes(
    folder: Path, tmp_path: Path, written_whole: bool, start: int, stop: int
):
    if written_whole:
        folder = tmp_path / "whole"
        write_shards({key: TensorShard(each) for key, each in WHOLE.items()}, folder)
    found = torch.full((stop - start,), float("nan"))
    TensorReader(folder).read({"columns": TensorShard(found, whole_region((4, 12)), start=start)})
    assert torch.equal(found, WHOLE["columns"].view(-1)[start:stop])


def test_another_rank_of_another_order_reads_its_columns(folder: Path):
    columns = (0, 4, 8, 1)
    found = torch.empty(4, 4)
    region = Region(whole=(4, 12), sizes=(4, 4), offsets=(0, 0), columns=columns)
    TensorReader(folder).read({"columns": TensorShard(found, region)})
    assert torch.equal(found, WHOLE["columns"][:, list(columns)])


def test_a_tensor_in_column_major_order_is_read_into(folder: Path):
    found = torch.empty(12, 4).t()
    TensorReader(folder).read({"columns": TensorShard(found)})
    assert torch.equal(found, WHOLE["columns"])


def test_other_types_are_converted(folder: Path):
    found = torch.empty(6, 3, dtype=torch.float64)
    TensorReader(folder).read({"rows": TensorShard(found)})
    assert torch.equal(found, WHOLE["rows"].double())


def test_a_lost_file_is_told(folder: Path):
    next(folder.glob("shard-1-00001*")).unlink()
    with pytest.raises(CheckpointError, match="lacks a part of"):
        TensorReader(folder)


def test_a_copy_is_what_was_held_then(folder: Path):
    tensor = torch.ones(2)
    held = TensorShard(tensor)
    copied = held.copied()
    tensor.zero_()
    write_shards({"late": copied}, folder / "late")
    assert torch.equal(TensorReader(folder / "late").read_all()["late"], torch.ones(2))


def test_tied_tensors_are_each_written_in_full(tmp_path: Path):
    tensor = torch.ones(2, 3)
    write_shards({"words": TensorShard(tensor), "head": TensorShard(tensor)}, tmp_path)
    assert all(torch.equal(value, tensor) for value in TensorReader(tmp_path).read_all().values())


def test_each_box_has_one_writer_and_all_write_about_as_much():
    boxes = [["weights", f"layer {number}", [0], [4], 4] for number in range(8)]
    everyones = [boxes[:6], boxes, boxes[2:]]
    own = [writers(everyones, worker) for worker in range(3)]
    assert sum(map(len, own)) == len(set.union(*own)) == 8
    assert [len(each) for each in own] in ([3, 3, 2], [3, 2, 3], [2, 3, 3])
    assert own[0] <= {(folder, key, tuple(offsets), tuple(sizes)) for folder, key, offsets, sizes, _ in boxes[:6]}


def test_torchs_own_reader_reads_the_files(folder: Path):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    found = {name: torch.empty_like(value) for name, value in WHOLE.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(found, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert all(torch.equal(found[name], value) for name, value in WHOLE.items())
