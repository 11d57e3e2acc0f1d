"""Sums between the replicas of one process, by hand."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.mirroring.gradients.local_sum import add_gradients, spread


def copies_with(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(4, 2)) for _ in gradients]
    for copy, gradient in zip(found, gradients, strict=True):
        copy.grad = gradient
    return found


def sum_all(parameters: list[list[nn.Parameter]]) -> None:
    for other in (1, 2):
        add_gradients(parameters, 0, other)


def test_gradients_are_added_in_replica_order_and_a_missing_one_counts_nothing():
    torch.manual_seed(0)
    a, b, c = (torch.randn(4, 2) for _ in range(3))
    expected = (a + b) + c
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (4, 2), check_invariants=False)
    parameters = [copies_with(a, b, c), copies_with(None, b.clone(), None), copies_with(None, None, None)]
    parameters.append(copies_with(sparse, sparse.clone(), torch.ones(4, 2)))
    sum_all(parameters)

    sums = [copies[0].grad for copies in parameters]
    assert all(copy.grad is None for copies in parameters for copy in copies[1:])
    assert sums[0] is not None
    assert torch.equal(sums[0], expected)
    assert sums[1] is not None
    assert torch.equal(sums[1], b)
    assert sums[2] is None
    assert sums[3] is not None
    assert torch.equal(sums[3], 2 * sparse.to_dense() + 1)


def test_one_tensor_that_is_the_gradient_of_all_replicas_counts_once_for_each():
    parameters = [copies_with(*[torch.ones(4, 2)] * 3)]
    sum_all(parameters)
    assert parameters[0][0].grad is not None
    assert torch.equal(parameters[0][0].grad, torch.full((4, 2), 3.0))


def test_every_leader_gets_a_copy_of_its_own():
    first, second = copies_with(torch.ones(4, 2), None)
    spread([[first, second]], (0, 1))
    assert torch.equal(first.grad, second.grad)
    assert first.grad.data_ptr() != second.grad.data_ptr()


def test_leaders_whose_gradients_are_one_tensor_get_one_each():
    gradient = torch.zeros(4, 2)
    first, second, third = copies_with(torch.ones(4, 2), gradient, gradient)
    spread([[first, second, third]], (0, 1, 2))
    assert torch.equal(second.grad, third.grad)
    assert second.grad.data_ptr() != third.grad.data_ptr()
