"""Random orders that can be repeated: they depend only on given numbers, such as (seed, epoch)."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.replicas.rng.generators import derived_seed


def seeded_generator(*numbers: int) -> torch.Generator:
    """Returns a generator that depends only on a sequence of numbers, such as (seed, epoch, batch)."""
    return torch.Generator().manual_seed(derived_seed(*numbers))


def shuffled_order(rows: int, *, buffer: int, generator: torch.Generator) -> Tensor:
    """Returns the row numbers, [rows] int64, shuffled as tf.data does it.

    Each row is drawn from a buffer, and the next row takes its place; a ``buffer`` of 0 permutes all rows.
    """
    if not 0 < buffer < rows:
        return torch.randperm(rows, generator=generator)
    contents, order = list(range(buffer)), []
    # All slots in one draw: a draw for each row would be a call of torch for each line of the text.
    slots = torch.randint(buffer, (rows - buffer,), generator=generator).tolist()
    for row, slot in enumerate(slots, start=buffer):
        order.append(contents[slot])
        contents[slot] = row
    last = torch.tensor(contents)[torch.randperm(buffer, generator=generator)]
    return torch.cat([torch.tensor(order), last])


def plan_batches(
    lengths: Tensor, *, batch_size: int, window: int, buffer: int = 0, generator: torch.Generator
) -> list[Tensor]:
    """Returns the rows of each batch of an epoch: every row once, in batches of similar length, in random order.

    Rows are shuffled; each ``window`` batches are sorted by length and cut. Then the batches are put in random order,
    and so are the rows in each, so that the shards of a batch are alike. One batch may be smaller than the others.
    """
    order = shuffled_order(len(lengths), buffer=buffer, generator=generator)
    batches = [
        batch
        for span in torch.split(order, batch_size * window)
        for batch in torch.split(span[lengths[span].argsort(stable=True)], batch_size)
    ]
    mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
    return [batch[torch.randperm(len(batch), generator=generator)] for batch in mixed]
