"""What a replay hands out is the caller's own."""

from __future__ import annotations

import torch

from lockstep.mirroring.optim.step import StepResult
from lockstep.train.cuda_graphs.capture import StepResults
from lockstep.train.step import StepOutput


def test_every_tensor_is_copied_once_and_all_else_stays() -> None:
    total = torch.ones(())
    output = StepOutput(rows=3, total=total, count=2.0, update=StepResult(total, 2.0, None, torch.zeros(())))

    copied = StepResults((output, output), [[], [({"logits": total}, None)]]).copied()
    (first, second), logits = copied.outputs, copied.metrics[1][0][0]["logits"]
    total.zero_()

    assert first.update is not None
    assert float(first.total) == float(first.update.total) == float(logits) == 1.0
    assert first.total is first.update.total is logits is second.total
    assert (first.rows, first.count, first.update.grad_norm, copied.metrics[0]) == (3, 2.0, None, [])
