"""Sums tensors over the replicas of all workers in the order of the tree, over gloo's point-to-point messages.

    each worker: one tensor for each node of its replicas
    to the worker that owns a slice: that slice of all nodes -> it adds them -> its sum, to all workers

This is a reduce-scatter and an all-gather: where each worker's replicas are one node, as many bytes as a ring has.
Messages are posted at once. Of a sum that is ``start``ed a thread adds what has arrived and sends the sums, while the
caller computes. Small tensors are sent whole to all workers, each of which adds them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lockstep.collectives.sum_order import Node, add_nodes

SMALL_BYTES = 2**17
"""Tensors up to this size are sent whole: one message takes longer to begin than to arrive."""
_CUT_AT = 64
_TAGS = 2**24
_END_LIMIT_S = 5.0


def slice_bounds(length: int, owners: int) -> list[int]:
    """Where a flat tensor is cut into one slice for each owner, at multiples of 64 elements.

    Example:
        >>> slice_bounds(300, 4)
        [0, 64, 128, 192, 300]
    """
    return [length * owner // owners // _CUT_AT * _CUT_AT for owner in range(owners)] + [length]


class TreeSums:
    """The sums of one gloo group. Every member must start the same sums in the same order.

    Args:
        backend: the group's ``ProcessGroupGloo``, which nothing else sends point-to-point messages through.
        rank: of this worker in the group.
        nodes: the nodes of each worker's replicas, in the order of ranks.
    """

    def __init__(self, backend: Any, rank: int, nodes: Sequence[Sequence[Node]]) -> None:
        self.backend, self.rank, self.nodes = backend, rank, nodes
        self.leaves = nodes[-1][-1].end
        self.peers = [(rank + distance) % len(nodes) for distance in range(1, len(nodes))]
        self.messages = max(map(len, nodes)) + 1
        self._number = 0
        self._jobs: queue.SimpleQueue[TreeSum | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def sum(self, parts: Sequence[Tensor]) -> None:
        """Sums over all replicas, and waits for it. Raises RuntimeError if a message does not arrive.

        Args:
            parts: for each node of this worker a flat, contiguous tensor on the CPU, of one length and dtype on all
                workers. They are written to: afterwards the first one is the sum.
        """
        job = self._post(parts)
        job.add_up()
        job.finish()

    def start(self, parts: Sequence[Tensor]) -> TreeSum:
        """Starts a sum over all replicas, of ``parts`` as in ``sum``."""
        if self._thread is None:
            # A daemon: a wait for a worker that is lost must not keep the interpreter from ending.
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="lockstep-sums", daemon=True)
            self._thread.start()
        job = self._post(parts)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Ends the thread; sums that are still in flight stay so. Waits a few seconds at most."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_END_LIMIT_S)

    def _post(self, parts: Sequence[Tensor]) -> TreeSum:
        self._number += 1
        return TreeSum(self, parts, self._number * self.messages % _TAGS)


class TreeSum:
    """A sum in flight."""

    def __init__(self, sums: TreeSums, parts: Sequence[Tensor], tag: int) -> None:
        self._sums, self._parts, self._tag = sums, parts, tag
        first = parts[0]
        self._whole = first.nbytes <= SMALL_BYTES
        bounds = slice_bounds(len(first), len(sums.nodes))
        self._slices = [slice(0, None) if self._whole else slice(*pair) for pair in pairwise(bounds)]
        self._ended = threading.Event()
        self._error: BaseException | None = None
        local_slice, send, receive = self._slices[sums.rank], sums.backend.send, sums.backend.recv
        self._received = {
            other: [torch.empty_like(first[local_slice]) for _ in sums.nodes[other]] for other in sums.peers
        }
        # Receivers first, so that no sender has to ask. A slice's sum can only arrive when its parts have been sent, so
        # both have the same memory.
        self._coming = [
            receive([buffer], other, tag + place)
            for other, of_nodes in self._received.items()
            for place, buffer in enumerate(of_nodes)
        ]
        last = tag + sums.messages - 1
        peers = () if self._whole else sums.peers
        self._sums_coming = [receive([first[self._slices[other]]], other, last) for other in peers]
        self._going = [
            send([part[self._slices[other]]], other, tag + place)
            for other in sums.peers
            for place, part in enumerate(parts)
        ]

    def is_completed(self) -> bool:
        """Whether it has ended, with the sum or with an error."""
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits for the end. Raises a RuntimeError after the time, and what a message raised."""
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the sum has not arrived yet")
        if self._error is not None:
            raise self._error

    def add_up(self) -> None:
        """Waits for the parts of this worker's slice, adds them, and sends the sum. In the thread of the group."""
        sums, local_slice = self._sums, self._slices[self._sums.rank]
        for message in self._coming:
            message.wait()
        # The parts go as they lie in memory, so they must have left before the first one is written to.
        if self._whole:
            self._wait_until_sent()
        parts: list[tuple[Node, Tensor]] = []
        for worker, nodes in enumerate(sums.nodes):
            worker_parts = (
                [part[local_slice] for part in self._parts] if worker == sums.rank else self._received[worker]
            )
            parts += zip(nodes, worker_parts, strict=True)
        ((_, total),) = add_nodes(parts, sums.leaves, lambda one, other: one.add_(other))
        into = self._parts[0][local_slice]
        if total.data_ptr() != into.data_ptr():
            into.copy_(total)
        if not self._whole:
            self._going += [sums.backend.send([into], other, self._tag + sums.messages - 1) for other in sums.peers]

    def finish(self) -> None:
        """Waits for the sums of the other slices. In the thread of the group."""
        for message in self._sums_coming:
            message.wait()
        self._wait_until_sent()
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    def _wait_until_sent(self) -> None:
        while self._going:
            self._going.pop().wait()


def _work(jobs: queue.SimpleQueue[TreeSum | None]) -> None:
    """Adds up each sum as soon as its parts are there, and finishes one while no other has begun."""
    added: list[TreeSum] = []
    while True:
        job = None
        with suppress(queue.Empty):
            # With sums left to finish it does not block: a sum that has begun is added up before others are finished.
            job = jobs.get(block=not added)
            if job is None:
                return
        try:
            if job is None:
                added[0].finish()
                del added[0]
            else:
                added.append(job)
                job.add_up()
        except RuntimeError as error:  # a connection broke, or timed out
            # Whichever sum has failed, its connection is one of the group's, through which the others go too.
            for pending in added:
                pending.fail(error)
            added.clear()
        # Or the tensors of the last sum would live until the next one comes.
        del job
