"""A workload's batches as a file, so that contenders without torch train on equal numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.trial import Batch, Workload
from lockstep.extras import require


def write_inputs(workload: Workload, batches: int, path: Path) -> None:
    """Writes the different ones of so many global batches as an ``.npz`` file of arrays [different, rows, ...].

    The targets are ``y``; the inputs are ``x``, or have the names that the module's arguments have.

    Args:
        workload: whose batches.
        batches: how many are trained on; a batch that comes again is the same object.
        path: of the file.
    """
    numpy = require("numpy", "images")
    different = list({id(batch): batch for batch in workload.make_batches(batches)}.values())
    parts = [_named(batch) for batch in different]
    numpy.savez(path, **{name: numpy.stack([part[name].numpy() for part in parts]) for name in parts[0]})


def _named(batch: Batch) -> dict[str, Tensor]:
    x, y = batch
    inputs: dict[str, Any] = x if isinstance(x, dict) else {"x": x}
    return {**inputs, "y": y}
