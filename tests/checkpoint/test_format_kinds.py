from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lockstep.checkpoint.format import DamagedStateError, TensorRef, check_kind, check_like


@dataclass(frozen=True, kw_only=True)
class Place:
    epoch: int
    name: str | None = None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, int),
        (1, float),
        (float("nan"), float),
        (None, None),
        (None, str | None),
        ("a", str | None),
        (torch.ones(2), torch.Tensor),
        (TensorRef("a"), torch.Tensor),
        ([1, 2.5], list[float]),
        ({"a": [torch.ones(1)]}, dict[str, list[torch.Tensor]]),
        ({"a": 1, "besides": "x"}, {"a": int}),
        ([{"a": 1}], [{"a": int}]),
        ({"epoch": 1, "name": None}, Place),
        (object(), Any),
    ],
)
def test_what_is_of_its_kind_passes(value: Any, kind: Any):
    check_kind(value, kind, "value")


@pytest.mark.parametrize(
    ("value", "kind", "place"),
    [
        (True, int, "value"),
        (1.5, int, "value"),
        ("1", float, "value"),
        (None, str, "value"),
        ([1, "a"], list[int], r"value\[1\]"),
        ({"a": {"b": None}}, dict[str, dict[str, int]], r"value\.a\.b"),
        ({1: 1}, dict[str, int], "1"),
        ({}, {"a": int}, "a"),
        ([{"a": "x"}], [{"a": int}], r"value\[0\]\.a"),
        ({"epoch": "x", "name": None}, Place, r"value\.epoch"),
        ([torch.ones(1), 3], list[torch.Tensor], r"value\[1\]"),
    ],
)
def test_what_is_of_another_kind_is_told_with_its_place(value: Any, kind: Any, place: str):
    with pytest.raises(DamagedStateError, match=place):
        check_kind(value, kind, "value")


@pytest.mark.parametrize(
    ("value", "like"),
    [
        (0.5, 1),
        (torch.tensor(0.1), 0.1),
        (0.1, torch.tensor(0.1)),
        (None, False),
        (True, None),
        ({"lr": 0.1, "new": "x"}, {"lr": 1, "gone": 3}),
        ([0.9, 0.99], (0.9, 0.999)),
        ([1, 2, 3], [1]),
    ],
)
def test_what_can_stand_for_a_value_in_use_passes(value: Any, like: Any):
    check_like(value, like, "value")


@pytest.mark.parametrize(
    ("value", "like", "place"),
    [
        ("x", 0.1, "value"),
        (None, 0.1, "value"),
        (1, True, "value"),
        ("x", None, "value"),
        ({"group": {"lr": []}}, {"group": {"lr": 0.1}}, r"value\.group\.lr"),
        ([0.9], (0.9, 0.999), "value"),
        ([], [1], "value"),
        ([{"a": "x"}], [{"a": 1}], r"value\[0\]\.a"),
        (torch.ones(2), "x", "value"),
    ],
)
def test_what_cannot_is_told_with_its_place(value: Any, like: Any, place: str):
    with pytest.raises(DamagedStateError, match=place):
        check_like(value, like, "value")
