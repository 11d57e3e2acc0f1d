"""Random orders that a recipe can repeat: everything drawn depends on given numbers, such as (seed, epoch), alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def shuffled_order(rows: int, *, buffer: int, generator: torch.Generator) -> Tensor:
    """The row numbers, [rows] int64, as tf.data shuffles: each from a random place of a buffer, which the next refills.

    Args:
        rows: how many there are.
        buffer: rows that are shuffled together; 0, or as many as there are, permutes them all.
        generator: the only source of randomness.
    """
    if not 0 < buffer < rows:
        return torch.randperm(rows, generator=generator)
    held, order = list(range(buffer)), []
    places = torch.randint(buffer, (rows - buffer,), generator=generator).tolist()
    for following, place in enumerate(places, start=buffer):
        order.append(held[place])
        held[place] = following
    last = torch.tensor(held)[torch.randperm(buffer, generator=generator)]
    return torch.cat([torch.tensor(order), last])


def plan_batches(
    lengths: Tensor, *, batch_size: int, window: int, buffer: int = 0, generator: torch.Generator
) -> list[Tensor]:
    """Which rows make up which batch: every row once, in batches of like length, in random order.

    Rows are shuffled, and ``window`` batches at a time sorted by length and cut; then the batches of the epoch are
    put in random order, and the rows inside each, so that the shards of a batch are alike. One batch may be short.

    Args:
        lengths: [rows] tokens of each row.
        batch_size: rows a batch.
        window: batches that are sorted together.
        buffer: rows that are shuffled together; 0 permutes all.
        generator: the only source of randomness.
    """
    order = shuffled_order(len(lengths), buffer=buffer, generator=generator)
    batches = [
        batch
        for span in torch.split(order, batch_size * window)
        for batch in torch.split(span[lengths[span].argsort(stable=True)], batch_size)
    ]
    mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
    return [batch[torch.randperm(len(batch), generator=generator)] for batch in mixed]


def seeded_generator(*numbers: int) -> torch.Generator:
    """A generator of its own for each sequence of numbers, such as (seed, epoch, batch)."""
    digest = hashlib.sha256("/".join(map(str, numbers)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
