from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep_tools.recipes.reviews.trainer import compute_metrics


def test_f1_of_two_classes_is_that_of_the_good_reviews():
    logits = np.array([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    prediction = SimpleNamespace(predictions=logits, label_ids=np.array([0, 0, 1, 1, 1]))
    # Of three called good two are, and of three good ones two are found.
    assert compute_metrics(prediction) == {"accuracy": pytest.approx(3 / 5), "f1": pytest.approx(2 / 3)}


def test_f1_of_more_classes_is_their_mean():
    logits = torch.eye(3)[[0, 0, 1, 2]]
    assert compute_metrics(SimpleNamespace(predictions=logits, label_ids=torch.tensor([0, 1, 1, 2])))[
        "f1"
    ] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


def test_no_good_review_found_is_an_f1_of_nothing():
    prediction = SimpleNamespace(predictions=torch.tensor([[1.0, 0.0], [1.0, 0.0]]), label_ids=torch.tensor([0, 1]))
    assert compute_metrics(prediction)["f1"] == 0.0
