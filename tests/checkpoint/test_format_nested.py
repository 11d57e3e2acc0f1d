from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.checkpoint.format import flatten, unflatten
from lockstep.errors import CheckpointError


def there_and_back(state: Any) -> Any:
    tree, tensors = flatten(state, "state")
    return unflatten(json.loads(json.dumps(tree)), tensors)


@pytest.mark.parametrize(
    "state",
    [
        None,
        True,
        0.1,
        -1e-300,
        2**200,
        "ü#",
        [],
        {},
        (),
        [1, (2.0, None), {"a": [False]}],
        {0: "zero", "0": "text", (1, 2): {3: 4}},
        {"#": "tag", "items": 3},
        Counter({5: 2, 9: 1}),
        math.inf,
        -math.inf,
    ],
)
def test_plain_values_come_back_as_they_were(state: Any):
    back = there_and_back(state)
    assert back == state
    assert type(back) is type(state)


def test_nan_and_the_numbers_of_numpy_come_back_as_numbers():
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back([np.float64(0.1), np.float32(0.5), np.int64(3)]) == [0.1, 0.5, 3]
    assert there_and_back(OrderedDict(a=1)) == {"a": 1}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0).view(3, 4).t(),
        torch.zeros(0, 3),
        torch.tensor(2),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_tensors_keep_their_values(tensor: torch.Tensor):
    tree, tensors = flatten({"deep": [tensor]}, "state")
    stored = {key: value.contiguous() for key, value in tensors.items()}
    back = unflatten(json.loads(json.dumps(tree)), stored)["deep"][0]
    assert torch.equal(back, tensor)
    assert not back.requires_grad


def test_two_keys_with_one_text_have_two_tensors():
    back = there_and_back({1: torch.zeros(1), "1": torch.ones(1)})
    assert (back[1].item(), back["1"].item()) == (0.0, 1.0)


@pytest.mark.parametrize("thing", [print, object(), {1, 2}, torch.float32, b"bytes"])
def test_what_no_checkpoint_can_hold_is_named_with_its_place(thing: Any):
    with pytest.raises(CheckpointError, match=r"state\.callbacks\.0\.it is a \w+; a checkpoint holds numbers, texts"):
        flatten({"callbacks": [{"it": thing}]}, "state")


def test_a_sparse_tensor_is_refused():
    with pytest.raises(CheckpointError, match=r"state\.a is not a dense tensor \(torch\.sparse_coo"):
        flatten({"a": torch.eye(2).to_sparse()}, "state")


def test_a_tree_of_a_newer_kind_or_without_its_tensor_is_refused():
    with pytest.raises(CheckpointError, match="holds a 'graph', which this version does not know"):
        unflatten({"#": "graph"}, {})
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'a\.b'; use another"):
        unflatten({"#": "tensor", "key": "a.b"}, {})
