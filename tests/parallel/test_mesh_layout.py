"""The grid of workers: pure."""

from __future__ import annotations

import pytest

from lockstep.checks import check_divides
from lockstep.errors import ConfigError
from lockstep.parallel.mesh_layout import MeshCoordinate, MeshLayout, choose_mesh_layout


@pytest.mark.parametrize(
    ("workers", "degrees", "expected"),
    [
        (1, {}, MeshLayout()),
        (8, {}, MeshLayout(data=8)),
        (8, {"tensor": 2}, MeshLayout(data=4, tensor=2)),
        (8, {"data": 1, "pipeline": 2, "tensor": -1}, MeshLayout(pipeline=2, tensor=4)),
        (8, {"data": 2, "pipeline": 2, "tensor": 2}, MeshLayout(data=2, pipeline=2, tensor=2)),
    ],
)
def test_what_is_left_is_taken(workers: int, degrees: dict[str, int], expected: MeshLayout):
    assert choose_mesh_layout(workers, **degrees) == expected


@pytest.mark.parametrize(
    ("workers", "degrees", "message"),
    [
        (
            8,
            {"tensor": 3},
            "tensor=3 = 3 does not divide the 8 workers of the job; start 3, .* choose degrees whose product is 1, 2, ",
        ),
        (
            8,
            {"data": 2, "tensor": 2},
            "is a mesh of 4 workers, and the job has 8; start 4 with .*--workers 4`, or leave data at -1$",
        ),
        (2, {"data": 2, "pipeline": 2, "tensor": 2}, "and the job has 2; start 8 with `lockstep run --workers 8`$"),
        (2, {"pipeline": 4}, "pipeline=4 = 4 does not divide the 2 workers of the job; .* product is 1 or 2"),
        (4, {"data": -1, "tensor": -1}, "data=-1 and tensor=-1: only one degree can be what is left"),
        (4, {"tensor": 0}, "tensor=0 is no degree; give a number from 1, or -1"),
        (4, {"pipeline": True}, "pipeline=True is no degree"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_those_that_would(workers: int, degrees: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        choose_mesh_layout(workers, **degrees)


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart():
    grid = MeshLayout(data=2, pipeline=2, tensor=2)

    assert [grid.coordinate(worker) for worker in (0, 1, 2, 4)] == [
        MeshCoordinate(stage=0, replica=0, tensor=0),
        MeshCoordinate(stage=0, replica=0, tensor=1),
        MeshCoordinate(stage=0, replica=1, tensor=0),
        MeshCoordinate(stage=1, replica=0, tensor=0),
    ]
    assert [grid.rank(grid.coordinate(worker)) for worker in range(8)] == list(range(8))


def test_who_belongs_together():
    grid = MeshLayout(data=2, pipeline=2, tensor=2)

    assert grid.data_group(5) == (5, 7)
    assert grid.replica_group(1) == (2, 3, 6, 7)
    assert grid.leaders(1) == (4, 6)
    assert MeshLayout(tensor=4).leaders(0) == (0,)


def test_a_degree_that_does_not_divide_the_model_is_refused_with_those_that_would():
    check_divides("tensor", 2, ("num_attention_heads", 4), ("hidden_size", 16))

    with pytest.raises(ConfigError, match=r"tensor=8 does not divide num_attention_heads=12; choose 1, 2, 3, 4, 6 or"):
        check_divides("tensor", 8, ("hidden_size", 768), ("num_attention_heads", 12))
