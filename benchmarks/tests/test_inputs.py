from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.programs import write_inputs
from benchmarks.workloads import WORKLOADS


@pytest.mark.parametrize(("name", "inputs"), [("mobilenetv2", {"x"}), ("mlm", {"input_ids", "masked_positions"})])
def test_the_file_holds_each_different_batch_once(name: str, inputs: set[str], tmp_path: Path):
    write_inputs(WORKLOADS[name], 6, tmp_path / "inputs.npz")

    batches = WORKLOADS[name].make_batches(4)
    with np.load(tmp_path / "inputs.npz") as stored:
        assert set(stored.files) - {"attention_mask"} == {*inputs, "y"}
        assert [len(stored[key]) for key in stored.files] == [4] * len(stored.files)
        assert all(np.array_equal(stored["y"][index], y.numpy()) for index, (_, y) in enumerate(batches))
