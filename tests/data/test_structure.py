from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType

import pytest

from lockstep.data.structure import map_leaves, named_leaves

Pair = namedtuple("Pair", ["image", "label"])


def double(_, leaf):
    return leaf * 2


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (1, 2),
        ((1, [2, 3]), (2, [4, 6])),
        ({"a": 1, "b": (2,)}, {"a": 2, "b": (4,)}),
        (Pair(1, {"a": 2}), Pair(2, {"a": 4})),
        ([], []),
        ({"a": ()}, {"a": ()}),
    ],
)
def test_the_structure_is_kept(batch, expected):
    mapped = map_leaves(double, batch)
    assert mapped == expected
    assert type(mapped) is type(expected)


@pytest.mark.parametrize("mapping", [OrderedDict, UserDict, MappingProxyType])
def test_any_mapping_comes_out_as_a_dict(mapping):
    mapped = map_leaves(double, [mapping({"b": 1, "a": 2})])
    assert mapped == [{"b": 2, "a": 4}]
    assert isinstance(mapped[0], dict)
    assert list(mapped[0]) == ["b", "a"]


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (1, ["batch"]),
        ((1, 2), ["x", "y"]),
        ([1, 2, 3], ["batch[0]", "batch[1]", "batch[2]"]),
        (({"input_ids": 1, "mask": 2}, [3, 4]), ['x["input_ids"]', 'x["mask"]', "y[0]", "y[1]"]),
        ((1,), ["batch[0]"]),
        ((1, 2, 3, (4,)), ["batch[0]", "batch[1]", "batch[2]", "batch[3][0]"]),
        ({"a": {0: (1, 2)}}, ['batch["a"][0][0]', 'batch["a"][0][1]']),
        (Pair(1, Pair(2, 3)), ["batch.image", "batch.label.image", "batch.label.label"]),
    ],
)
def test_leaves_are_named_as_a_user_would_write_them(batch, names):
    assert [name for name, _ in named_leaves(batch)] == names


def test_the_item_of_a_model_has_a_weight():
    assert [name for name, _ in named_leaves((1, {"a": 2}, 3), is_item=True)] == ["x", 'y["a"]', "sample_weight"]
