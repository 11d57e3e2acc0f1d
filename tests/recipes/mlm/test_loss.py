from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import UsageError
from lockstep_tools.recipes.mlm.model import IGNORED_LABEL, masked_token_loss

VOCABULARY = 50


def padded(targets: Tensor, slots: int = 4) -> Tensor:
    """Labels [rows, slots] that hold ``targets`` in order, one slot of every row but the last left empty."""
    rows = torch.split(targets, slots - 1)
    return torch.stack([F.pad(row, (0, slots - len(row)), value=IGNORED_LABEL) for row in rows])


def drawn(count: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    logits = scale * torch.randn(count, VOCABULARY, generator=generator)
    return logits.requires_grad_(), torch.randint(VOCABULARY, (count,), generator=generator)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_total_and_gradient_are_those_of_torch(count: int):
    logits, targets = drawn(count)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(3 * expected, logits)
    total, number = masked_token_loss(logits, padded(targets))
    (3 * total).backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert int(number) == count
    torch.testing.assert_close(logits.grad, gradient, rtol=1e-5, atol=1e-6)


def test_a_hopeless_token_costs_its_distance_and_no_infinity():
    logits, targets = drawn(8, scale=500.0)
    total, _ = masked_token_loss(logits, padded(targets))
    assert total.item() == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-6)
    assert total.item() > 1000


def test_half_precision_logits_are_summed_in_single_precision():
    logits, targets = drawn(20)
    half = logits.detach().bfloat16().requires_grad_()
    total, _ = masked_token_loss(half, padded(targets))
    total.backward()
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(F.cross_entropy(half.float(), targets, reduction="sum").item(), rel=1e-6)
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_without_gradients_the_total_is_the_same():
    logits, targets = drawn(20)
    with torch.no_grad():
        total, _ = masked_token_loss(logits.detach(), padded(targets))
    assert total.item() == masked_token_loss(logits, padded(targets))[0].item()


def test_the_logits_are_left_for_the_metrics():
    logits, targets = drawn(20)
    before = logits.detach().clone()
    masked_token_loss(logits, padded(targets))[0].backward()
    assert torch.equal(logits, before)


def test_nothing_masked_is_a_total_of_zero_that_can_be_differentiated():
    logits = torch.zeros(0, VOCABULARY, requires_grad=True)
    total, count = masked_token_loss(logits, torch.full((3, 2), IGNORED_LABEL))
    total.backward()
    assert (float(total.detach()), int(count)) == (0.0, 0)


def test_a_logit_that_is_no_number_shows_in_the_total():
    logits, targets = drawn(20)
    total, _ = masked_token_loss(logits.detach().index_fill(0, torch.tensor([7]), float("nan")), padded(targets))
    assert total.isnan()


def test_a_second_backward_is_refused():
    logits, targets = drawn(4)
    total, _ = masked_token_loss(logits, padded(targets))
    total.backward(retain_graph=True)
    with pytest.raises(
        UsageError, match=r"backward was called twice through one masked-token loss; compute the loss again"
    ):
        total.backward()


def test_logits_of_every_slot_give_the_same_and_no_gradient_to_empty_ones():
    logits, targets = drawn(15)
    labels = padded(targets)
    every = torch.full((*labels.shape, VOCABULARY), 7.0).masked_scatter(
        (labels != IGNORED_LABEL).unsqueeze(-1), logits.detach()
    )
    every.requires_grad_()
    packed, _ = masked_token_loss(logits, labels)
    packed.backward()

    total, number = masked_token_loss(every, labels)
    total.backward()

    assert total.item() == pytest.approx(packed.item(), rel=1e-6)
    assert int(number) == 15
    assert every.grad is not None
    torch.testing.assert_close(every.grad[labels != IGNORED_LABEL], logits.grad, rtol=1e-5, atol=1e-6)
    assert not every.grad[labels == IGNORED_LABEL].any()
