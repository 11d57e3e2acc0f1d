"""In which order the Trainer's sampler gives the rows of an epoch: batches of like length, in random order.

transformers' own ``group_by_length`` goes through an epoch from long to short a few times, which is another order than
a random one where long reviews are better than short ones, and it leaves the order of ``predict`` permuted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from lockstep.recipes.reviews.tokens import ReviewRows
from lockstep.recipes.shuffling import plan_batches, seeded_generator


class GroupedOrder(Sampler[int]):
    """Row numbers whose every ``batch_size`` make a global batch; what is left over comes last.

    Depends on seed and epoch alone: not on the number of replicas, and an epoch that is begun again is the same.

    Args:
        rows: told the epoch too.
        batch_size: rows of a global batch.
        window: global batches that are sorted together.
        seed: where the drawing begins.
    """

    def __init__(self, rows: ReviewRows, *, batch_size: int, window: int, seed: int) -> None:
        self._rows, self._batch_size, self._window, self._seed = rows, batch_size, window, seed
        self._lengths = rows.lengths
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of the epoch, counted from 0."""
        self._epoch = epoch
        self._rows.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        plan = plan_batches(
            self._lengths,
            batch_size=self._batch_size,
            window=self._window,
            generator=seeded_generator(self._seed, self._epoch),
        )
        plan.sort(key=lambda batch: len(batch) < self._batch_size)
        return iter(torch.cat(plan).tolist())
