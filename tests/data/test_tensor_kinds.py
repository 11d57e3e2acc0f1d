"""Sparse, nested and packed tensors in a batch are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.data.sharding import split_batch
from lockstep.errors import DataError

SEQUENCES = [torch.ones(length) for length in (4, 3, 2, 1)]


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.eye(4).to_sparse_coo(), "sparse_coo"),
        (torch.eye(4).to_sparse_csr(), "sparse_csr"),
        (torch.nested.nested_tensor(SEQUENCES), "nested"),
        (torch.nested.nested_tensor(SEQUENCES, layout=torch.jagged), "nested"),
        (pack_sequence(SEQUENCES), "PackedSequence"),
    ],
)
def test_a_tensor_that_is_not_dense_is_refused_by_name(batch: Any, said: str):
    with pytest.raises(DataError, match=f"x is a .*{said}.*cannot be divided"):
        split_batch((batch, torch.ones(4)), 2)
