from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.programs import write_inputs
from benchmarks.workloads import WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_batches_are_the_same_wherever_they_are_made(name: str):
    torch.manual_seed(1)
    once = WORKLOADS[name].make_batches(6)
    torch.manual_seed(2)
    again = WORKLOADS[name].make_batches(6)

    assert len(once) == 6
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(once), tree_leaves(again), strict=True))
    assert not torch.equal(once[0][1], once[1][1])


def test_the_masked_tokens_of_a_batch_are_as_many_as_the_count_says():
    workload = WORKLOADS["mlm"]
    ((x, y),) = workload.make_batches(1)

    assert y.numel() == workload.count
    assert torch.equal(x["input_ids"].gather(1, x["masked_positions"]), y)
    assert all(len(set(row)) == len(row) for row in x["masked_positions"].tolist())


def test_the_loss_is_a_sum_and_its_count():
    workload = WORKLOADS["linear"]
    ((_, y),) = workload.make_batches(1)
    total, count = workload.loss(torch.zeros(len(y), 2), y)

    assert int(count) == workload.count
    assert float(total) == pytest.approx(workload.count * torch.log(torch.tensor(2.0)).item())


@pytest.mark.parametrize(("name", "inputs"), [("mobilenetv2", {"x"}), ("mlm", {"input_ids", "masked_positions"})])
def test_the_file_of_a_program_holds_each_different_batch_once(name: str, inputs: set[str], tmp_path: Path):
    write_inputs(WORKLOADS[name], 6, tmp_path / "inputs.npz")

    batches = WORKLOADS[name].make_batches(4)
    with np.load(tmp_path / "inputs.npz") as stored:
        assert set(stored.files) - {"attention_mask"} == {*inputs, "y"}
        assert [len(stored[key]) for key in stored.files] == [4] * len(stored.files)
        assert all(np.array_equal(stored["y"][index], y.numpy()) for index, (_, y) in enumerate(batches))
