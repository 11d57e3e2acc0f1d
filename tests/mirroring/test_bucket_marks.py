"""Buckets that fill up while replicas of one GPU are in their backward passes: whose gradients are read, and when.

The stand-in follows on which stream each tensor is made and read: gradients that are read without an event are a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch
import torch.nn.functional as F
from tests import oracle
from tests.stand_in import stand_in_gpus
from torch import Tensor, nn

import lockstep as ls
from lockstep.collectives.communicator import SingleWorkerCommunicator
from lockstep.collectives.sum_order import Node
from lockstep.mirroring.gradients.bucketed_all_reduce import BucketExchange, GradientMarks, _Bucket
from lockstep.mirroring.gradients.local_sum import Copies

BUCKET_BYTES = 64


class Loop:
    """A stream to no other worker: the sum over all workers is this one's own."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def start_sum(self, parts: Sequence[Tensor]) -> str:
        (flat,) = parts
        self.sent.append(flat.numel())
        return "on its way"

    def wait(self, work: str, waiting_in: str) -> None:
        assert (work, waiting_in) == ("on its way", "the exchange of gradients")


def train(devices: Sequence[ls.config.LogicalDevice]) -> tuple[nn.Module, Loop]:
    loop = Loop()

    def make_exchange(parameters: Sequence[Copies], groups: Sequence[Sequence[int]]) -> BucketExchange:
        return BucketExchange(
            parameters,
            [group[0] for group in groups],
            workers=SingleWorkerCommunicator(len(devices)),
            bucket_bytes=BUCKET_BYTES,
            stream=loop,  # type: ignore[arg-type]
            travel_as=None,
            marks=GradientMarks(devices),
        )

    with closing(ls.MirroredStrategy(devices, seed=0)) as strategy:
        strategy._mirrored._make_exchange = make_exchange
        module = oracle.mlp()
        replicated = strategy.mirror(module)
        optimizer = strategy.mirror(oracle.sgd(module.parameters()))

        def step(batch: tuple[Tensor, Tensor]) -> None:
            x, y = batch
            ls.compute_average_loss(F.cross_entropy(replicated(x), y, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()

        for batch in strategy.distribute_dataset(oracle.vectors()):
            strategy.run(step, (batch,))
        return module, loop


def test_buckets_of_two_shares_are_in_order_and_give_the_weights_of_one_device():
    with stand_in_gpus((64, 64)) as (devices, _):
        module, loop = train(devices)
    assert len(set(loop.sent)) > 2  # several buckets a step
    oracle.assert_close(module, oracle.train(oracle.mlp(), oracle.vectors()).module)


def test_one_replica_leaves_no_marks():
    with stand_in_gpus((64,)) as (devices, driver):
        before = len(driver.calls("record"))
        marks = GradientMarks(devices)
        marks.note(0)
        marks.precede()
        assert len(driver.calls("record")) == before


def test_flags_are_read_only_of_buckets_that_lack_a_gradient_here():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    full = _Bucket((0, 1, 2), [(each,) for each in parameters], [Node(0, 1)], None)
    assert full.parts[0].tolist() == [1.0] * 6 + [1.0] * 3
    full.parts[0][6:] = 0.0  # what nobody reads
    parameters[1].grad = None
    lacking = _Bucket((0, 1, 2), [(each,) for each in parameters], [Node(0, 1)], None)
    assert lacking.parts[0].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]

    assert all(total is not None for _, total in full.sums())
    assert [total is None for _, total in lacking.sums()] == [False, True, False]
    lacking.parts[0][7] = 1.0  # another worker has one
    assert all(total is not None for _, total in lacking.sums())
