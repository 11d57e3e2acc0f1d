from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from lockstep.errors import DataError
from lockstep.train.batch import module_arguments, unpack_inputs, unpack_labelled

X, Y, W = torch.zeros(2, 3), torch.ones(2), torch.full((2,), 2.0)


@pytest.mark.parametrize("kind", [tuple, list])
def test_pairs_and_triples_are_unpacked(kind: type):
    pair, triple = unpack_labelled(kind([X, Y])), unpack_labelled(kind([X, Y, W]))
    assert (pair.x, pair.y, pair.sample_weight) == (X, Y, None)
    assert triple.sample_weight is W


@pytest.mark.parametrize(
    ("item", "found"),
    [
        (X, r"a tensor of shape \(2, 3\)"),
        ({"input_ids": X, "labels": Y}, r"a dict with keys \['input_ids', 'labels'\]"),
        ((X,), "a tuple of 1 items"),
        ([X, Y, W, W], "a list of 4 items"),
        (None, "a NoneType"),
    ],
)
def test_what_is_no_labelled_item_is_named(item: Any, found: str):
    with pytest.raises(DataError, match=rf"the data gave {found}; fit and evaluate need items \(x, y\)"):
        unpack_labelled(item)


def test_a_weight_that_is_no_tensor_is_named():
    with pytest.raises(DataError, match="sample_weight of type float"):
        unpack_labelled((X, Y, 2.0))


@pytest.mark.parametrize("item", [X, (X,), (X, Y), [X, Y, W]])
def test_predict_takes_the_inputs_alone(item: Any):
    assert unpack_inputs(item) is X


def test_predict_takes_a_dict_as_inputs():
    item = {"a": X}
    assert unpack_inputs(item) is item


def test_predict_refuses_longer_tuples():
    with pytest.raises(DataError, match="a tuple of 4 items; predict needs x alone"):
        unpack_inputs((X, X, X, X))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ({"a": 1, "b": 2}, ((), {"a": 1, "b": 2})),
        (UserDict({"a": 1}), ((), {"a": 1})),
        ((1, 2), ((1, 2), {})),
        ([1, 2], ((1, 2), {})),
        (3, ((3,), {})),
    ],
)
def test_inputs_become_arguments(x: Any, expected: Any):
    args, kwargs = module_arguments(x)
    assert (tuple(args), dict(kwargs)) == expected
