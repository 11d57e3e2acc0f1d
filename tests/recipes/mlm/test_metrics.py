from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torchmetrics.classification import MulticlassAccuracy

from lockstep.mirroring.metric import merge_metrics, states_of
from lockstep_tools.recipes.mlm.model import MaskedTokenAccuracy


def test_it_counts_as_torchmetrics_does_over_all_updates():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = MaskedTokenAccuracy(), MulticlassAccuracy(9, average="micro")

    for rows in (3, 1, 7):
        labels = torch.randint(9, (rows, 2), generator=generator)
        logits = torch.randn(2 * rows, 9, generator=generator) + 2 * F.one_hot(labels.flatten(), 9)
        ours.update(logits, F.pad(labels, (0, 1), value=-100))
        theirs.update(logits, labels.flatten())

    assert 0 < ours.compute() < 1
    assert ours.compute() == theirs.compute()


def test_the_states_of_replicas_are_added_up():
    copies = [MaskedTokenAccuracy() for _ in range(3)]
    copies[0].update(torch.eye(4), torch.tensor([[0, -100, 1], [3, 3, -100]]))
    copies[2].update(torch.eye(4)[:2], torch.tensor([[0, 1, -100]]))
    merged = merge_metrics(copies, [states_of(each) for each in copies])
    assert (int(merged.correct), int(merged.masked)) == (5, 6)
    assert float(merged.compute()) == pytest.approx(5 / 6)
    assert (int(copies[0].correct), int(copies[0].masked)) == (3, 4)


def test_a_reset_metric_counts_from_zero():
    metric = MaskedTokenAccuracy()
    metric.update(torch.eye(4), torch.tensor([[0, -100, 1], [3, 3, -100]]))
    metric.reset()
    metric.update(torch.eye(4)[:1], torch.tensor([[1]]))
    assert (float(metric.compute()), metric.update_count) == (0.0, 1)


def test_a_batch_without_masked_tokens_changes_nothing():
    metric = MaskedTokenAccuracy()
    metric.update(torch.zeros(0, 4), torch.full((2, 1), -100))
    assert metric.compute().isnan()
    metric.update(torch.eye(4)[:1], torch.tensor([[0]]))
    assert float(metric.compute()) == pytest.approx(1.0)


def test_logits_of_every_slot_count_where_there_is_a_label():
    metric = MaskedTokenAccuracy()
    metric.update(torch.eye(4)[torch.tensor([[0, 2, 1], [3, 0, 0]])], torch.tensor([[0, -100, 1], [3, 3, -100]]))
    assert (int(metric.correct), int(metric.masked)) == (3, 4)
