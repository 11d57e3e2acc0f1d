"""What a replay hands out is the caller's own."""

from __future__ import annotations

import torch

from lockstep.mirroring.optim.step import StepResult
from lockstep.train.cuda_graphs.capture import cloned_outputs
from lockstep.train.step import StepOutput


def test_every_tensor_is_copied_once_and_all_else_stays() -> None:
    total = torch.ones(())
    output = StepOutput(rows=3, total=total, count=2.0, update=StepResult(total, 2.0, None, torch.zeros(())))

    (first, second), metrics = cloned_outputs(((output, output), [None, {"logits": total}]))
    total.zero_()

    assert first.update is not None
    assert float(first.total) == float(first.update.total) == float(metrics[1]["logits"]) == 1.0
    assert first.total is first.update.total is metrics[1]["logits"] is second.total
    assert (first.rows, first.count, first.update.grad_norm, metrics[0]) == (3, 2.0, None, None)
