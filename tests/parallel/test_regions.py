from __future__ import annotations

import pytest
import torch

from lockstep.parallel.regions import Region, whole_region


def put_together(region: Region, held: torch.Tensor, start: int) -> torch.Tensor:
    """A whole tensor with the boxes of some held elements in their places, and -1 elsewhere."""
    whole = torch.full(region.whole, -1, dtype=held.dtype)
    for box in region.boxes(start, start + held.numel()):
        places = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        assert (whole[places] == -1).all()  # no two boxes overlap
        whole[places] = box.of(held)
    return whole


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (1, 6), (4, 1), (2, 3, 4)])
def test_any_run_of_elements_is_boxes_of_the_whole(shape: tuple[int, ...]):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    for start in range(whole.numel()):
        for stop in range(start + 1, whole.numel() + 1):
            found = put_together(whole_region(shape), whole.reshape(-1)[start:stop], start)
            expected = torch.where((whole >= start) & (whole < stop), whole, -1)
            assert torch.equal(found, expected)


def test_a_run_is_few_boxes():
    assert len(whole_region((8, 8)).boxes()) == 1
    assert len(whole_region((8, 8)).boxes(8, 40)) == 1
    assert len(whole_region((8, 8)).boxes(3, 61)) == 3


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (0, 5), (4, 9), (7, 8)])
def test_columns_in_another_order_go_back_to_their_places(start: int, stop: int):
    columns = (0, 1, 4, 5, 8, 9)  # what one of two ranks has of q0 .. q3, k0 .. k3, v0 .. v3
    whole = torch.arange(24).view(2, 12)
    held = whole[:, list(columns)].reshape(-1)
    region = Region(whole=(2, 12), sizes=(2, 6), offsets=(0, 0), columns=columns)

    found = put_together(region, held[start:stop], start)

    assert torch.equal(found, torch.where(torch.isin(whole, held[start:stop]), whole, -1))


def test_a_part_stands_at_its_offsets():
    whole = torch.arange(24).view(4, 6)
    region = Region(whole=(4, 6), sizes=(2, 3), offsets=(2, 3))

    found = put_together(region, whole[2:, 3:].reshape(-1), 0)

    assert torch.equal(found[2:, 3:], whole[2:, 3:])
    assert (found[:2] == -1).all()
    assert (found[:, :3] == -1).all()


def test_a_tensor_without_elements_is_one_box():
    (box,) = whole_region((0, 3)).boxes()

    assert box.of(torch.empty(0)).shape == (0, 3)
    assert Region(whole=(4, 3), sizes=(0, 3), offsets=(4, 0)).boxes() == []
