"""Sums over workers in the order of the tree: the bits of a sum in one process, however the replicas are divided."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from itertools import accumulate, count, pairwise
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from lockstep.collectives.gloo_sums import SMALL_BYTES, TreeSums, slice_bounds
from lockstep.collectives.sum_order import Node, add_nodes, nodes_within, tree_sum

LIMIT_S = 30.0
_numbers = count()
T = TypeVar("T")


def together(size: int, call: Callable[[int], T]) -> list[T]:
    """Calls a function for each rank, each in a thread."""
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        results[rank] = call(rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return results


def make_group(replicas: Sequence[int]) -> list[TreeSums]:
    """The members of a group, all of them in this process."""
    store = dist.PrefixStore(f"group {next(_numbers)}", dist.HashStore())

    def make(rank: int) -> TreeSums:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=LIMIT_S)
        ends = list(accumulate(replicas, initial=0))
        nodes = [nodes_within(*block, ends[-1]) for block in pairwise(ends)]
        return TreeSums(dist.ProcessGroupGloo(store, rank, len(replicas), options), rank, nodes)

    return together(len(replicas), make)


def own_parts(values: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    nodes = [(Node(at, at + 1), values[at].clone()) for at in range(begin, end)]
    return [value for _, value in add_nodes(nodes, len(values), torch.add)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("replicas", [(4, 4), (3, 3, 2), (2, 1, 1), (1, 1, 1, 1), (5, 2), (1, 6)], ids=str)
def test_the_bits_are_those_of_one_process(replicas: tuple[int, ...], dtype: torch.dtype):
    lengths = [1, 100, 5000, SMALL_BYTES // dtype.itemsize + 1, 3 * SMALL_BYTES // dtype.itemsize + 7]
    generator = torch.Generator().manual_seed(0)
    values = [
        [(torch.randn(length, generator=generator) * 1e3).to(dtype) for length in lengths] for _ in range(sum(replicas))
    ]
    begins = [sum(replicas[:worker]) for worker in range(len(replicas) + 1)]
    blocks = list(pairwise(begins))

    with ExitStack() as stack:
        group = [stack.enter_context(closing(each)) for each in make_group(replicas)]

        def sums(rank: int) -> list[torch.Tensor]:
            parts = [own_parts([of[number] for of in values], *blocks[rank]) for number in range(len(lengths))]
            started = [group[rank].start(each) for each in parts]
            for each in started:
                each.wait(timedelta(seconds=LIMIT_S))
            return [each[0] for each in parts]

        found = together(len(replicas), sums)

    for number in range(len(lengths)):
        expected = tree_sum([of[number] for of in values], torch.add)
        assert {bits(own[number]) for own in found} == {bits(expected)}


def test_a_sum_of_another_order_has_other_bits():
    values = [torch.tensor(value) for value in (1.0, 2**-24, 2**-24, 2**-24)]
    assert tree_sum(values, torch.add) != sum(values[1:], values[0])


@pytest.mark.parametrize(("length", "owners"), [(0, 3), (1, 2), (63, 4), (64, 2), (1000, 3)])
def test_slices_cover_the_tensor_once(length: int, owners: int):
    bounds = slice_bounds(length, owners)
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, length, owners + 1)
