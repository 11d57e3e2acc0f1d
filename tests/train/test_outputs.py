from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lockstep.collectives.communicator import SingleWorkerCommunicator
from lockstep.errors import ConfigError
from lockstep.train.inference import CollectedOutputs


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def collect(*shards: tuple[int, Any]) -> Any:
    collected = CollectedOutputs()
    collected.begin_batch()
    for rows, outputs in shards:
        collected.add(rows, outputs)
    return collected.joined(SingleWorkerCommunicator(1))


def test_rows_are_joined_in_order():
    assert collect((2, torch.tensor([0, 1])), (1, torch.tensor([2]))).tolist() == [0, 1, 2]


def test_the_structure_is_kept():
    joined = collect(*[(1, {"a": Pair(torch.tensor([n]), torch.tensor([[n, n]]))}) for n in range(2)])
    assert isinstance(joined["a"], Pair)
    assert joined["a"].second.tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (torch.tensor(1.0), r"the module returned shape \(\) for 2 rows"),
        (torch.ones(3), r"the module returned shape \(3,\) for 2 rows; predict joins rows of tensors"),
        ({"text": "a"}, "the module returned a str for 2 rows"),
    ],
)
def test_what_has_not_a_row_per_example_is_named(outputs: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        collect((2, outputs))


def test_another_structure_is_named():
    with pytest.raises(ConfigError, match="predict needs one structure for all batches"):
        collect((1, torch.ones(1)), (1, (torch.ones(1), torch.ones(1))))
