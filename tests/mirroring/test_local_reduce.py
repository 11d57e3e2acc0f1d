"""Sums between devices: how they are chosen, and both ways by hand. NCCL's part is a sum of lists of tensors here."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from lockstep.mirroring.gradients.exchange import NcclSums, choose_sum, plan_runs, sum_by_copies

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("devices", "nccl", "expected"),
    [
        ([FIRST, SECOND], True, "nccl"),
        ([FIRST, SECOND], False, "copies"),  # this torch has no NCCL
        ([FIRST, FIRST], True, "copies"),  # shares of one GPU
        ([FIRST, SECOND, FIRST], True, "copies"),
        ([FIRST, CPU], True, "copies"),
        ([CPU, CPU], True, "copies"),
        ([FIRST], True, "copies"),
        ([], True, "copies"),
    ],
)
def test_nccl_is_for_replicas_with_a_gpu_each(devices: list[torch.device], nccl: bool, expected: str):
    assert choose_sum(devices, nccl=nccl) == expected


@pytest.mark.parametrize(
    ("sizes", "kinds", "expected"),
    [
        ([], [], ()),
        ([4, 4, 4], ["a"] * 3, ((0, 1), (2,))),
        ([4, 9, 4], ["a"] * 3, ((0,), (1,), (2,))),  # one that is larger is alone
        ([0, 8, 0], ["a"] * 3, ((0, 1, 2),)),
        ([4, 4, 4], ["a", "b", "a"], ((0, 2), (1,))),
    ],
)
def test_the_runs_of_gradients(sizes: list[int], kinds: list[str], expected: tuple[tuple[int, ...], ...]):
    assert plan_runs(sizes, kinds, 8) == expected


class Reduced:
    """Sums what it is given, as NCCL does, and keeps what that was."""

    def __init__(self, works: bool = True) -> None:
        self.given: list[list[torch.Tensor]] = []
        self.works = works

    def __call__(self, flats: list[torch.Tensor]) -> None:
        if not self.works:
            raise RuntimeError("NCCL Error 2: unhandled system error")
        self.given.append([flat.clone() for flat in flats])
        total = sum(flats[1:], start=flats[0].clone())
        for flat in flats:
            flat.copy_(total)


def parameters() -> list[list[nn.Parameter]]:
    """Per parameter two copies with gradients: dense, permuted, of another dtype, missing here, everywhere, sparse."""
    torch.manual_seed(0)
    permuted = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    shapes = [torch.zeros(5, 3), permuted, torch.zeros(7, dtype=torch.float64), torch.zeros(4), torch.zeros(3)]
    found = [[nn.Parameter(shape.clone()) for _ in range(2)] for shape in [*shapes, torch.zeros(4, 2)]]
    for number, copies in enumerate(found):
        for replica, copy in enumerate(copies):
            if number != 4 and (number, replica) != (3, 0):
                copy.grad = torch.randn_like(copy)
    for copy in found[5]:
        copy.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.randn(2, 2), (4, 2), check_invariants=False)
    return found


def gradients(found: list[list[nn.Parameter]]) -> list[list[torch.Tensor | None]]:
    return [[None if copy.grad is None else copy.grad.to_dense() for copy in copies] for copies in found]


def test_two_gpus_have_the_bits_that_copies_give():
    by_hand, over_nccl, reduced = parameters(), parameters(), Reduced()
    expected = [[None if g is None else g.clone() for g in pair] for pair in gradients(by_hand)]
    sum_by_copies(by_hand, (0, 1))
    NcclSums(reduced, bucket_bytes=200)(over_nccl, (0, 1))

    for (first, second), (own, other), (a, b) in zip(gradients(by_hand), gradients(over_nccl), expected, strict=True):
        if first is None or second is None or own is None or other is None:
            assert first is second is own is other is None
            continue
        total = sum(each for each in (a, b) if each is not None)
        for each in (first, second, own, other):
            assert torch.equal(each, total)  # of two numbers there is one sum
    assert over_nccl[1][0].grad is not None
    assert over_nccl[1][0].grad.is_contiguous(memory_format=torch.channels_last)
    # One number each to begin with; then 60 bytes, 384 alone, 16 beside nothing, 56 of another dtype. No sparse ones.
    assert [flats[0].numel() for flats in reduced.given] == [1, 15, 96, 4, 7]
    assert all(flat.dtype == flats[0].dtype for flats in reduced.given for flat in flats)


def test_gpus_that_nccl_cannot_join_are_summed_by_copies_and_that_is_said_once(caplog: pytest.LogCaptureFixture):
    by_hand, found, sums = parameters(), parameters(), NcclSums(Reduced(works=False))
    with caplog.at_level(logging.WARNING, "lockstep"):
        for _ in range(2):
            sum_by_copies(by_hand, (0, 1))
            sums(found, (0, 1))

    for expected, got in zip(gradients(by_hand), gradients(found), strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(expected, got, strict=True))  # type: ignore[arg-type]
    assert len(caplog.messages) == 1
    assert (
        "NCCL cannot join cpu, cpu (NCCL Error 2: unhandled system error); their gradients are added by" in caplog.text
    )


def test_an_error_after_that_is_raised():
    reduced = Reduced()
    sums = NcclSums(reduced)
    sums(parameters(), (0, 1))
    reduced.works = False

    with pytest.raises(RuntimeError, match="NCCL Error 2"):
        sums(parameters(), (0, 1))


@pytest.mark.parametrize(
    ("strides", "in_place"),
    [
        ((9, 9, 3, 1), True),  # as the weights
        ((9, 1, 3, 1), True),  # a depthwise convolution's in channels_last: the same order
        ((9, 9, 1, 3), False),  # another order
        ((0, 9, 3, 1), False),  # expanded: all four in one place
    ],
)
def test_gradients_are_summed_in_their_own_memory(strides: tuple[int, ...], in_place: bool):
    copies = [nn.Parameter(torch.zeros(4, 1, 3, 3)) for _ in range(2)]
    for copy in copies:
        copy.grad = torch.randn(36).as_strided((4, 1, 3, 3), strides)
    given = [copy.grad for copy in copies if copy.grad is not None]
    total = given[0] + given[1]
    sum_by_copies([copies], (0, 1))
    assert all(copy.grad is not None and torch.equal(copy.grad, total) for copy in copies)
    assert [copy.grad is own for copy, own in zip(copies, given, strict=True)] == [in_place] * 2
