"""Global batches for a masked language model: rows of like length, masked anew in every epoch.

    rows -> shuffled -> windows, sorted by length -> batches, in a seeded order -> masks

Everything drawn depends on (seed, epoch, batch) alone, so an epoch can be repeated, on any number of replicas. Without
a shuffle buffer all rows are permuted: they are in memory anyhow, and it mixes better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.recipes.mlm.masking import MaskingRule, mask_tokens
from lockstep.recipes.shuffling import plan_batches, seeded_generator
from lockstep.recipes.text.vocabulary import TokenRows, Vocabulary

Inputs = dict[str, Tensor]
Padding = Literal["longest", "full"]

_MULTIPLE = 8
"""Rows are padded to a multiple of so many tokens: matrix kernels take whole vectors."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How rows become batches.

    Args:
        batch_size: rows in a global batch; the last may be smaller.
        shuffle_buffer: rows that are shuffled together; 0 is all of them.
        length_window: global batches that are sorted by length together; 1 keeps the order of the shuffle.
        padding: "longest" pads to the longest row of the batch (and a multiple of 8), "full" to ``sequence_length``.
        sequence_length: longest row, in tokens.
        seed: where all that is drawn begins.
    """

    batch_size: int
    shuffle_buffer: int
    length_window: int
    padding: Padding
    sequence_length: int
    seed: int


class MaskedBatches:
    """The global batches of an epoch, as items (x, y) of a ``Model``'s data.

    x holds the keyword arguments of ``MaskedLanguageModel``: ``input_ids`` and ``attention_mask`` [rows, tokens],
    ``masked_positions`` [rows, slots]; y the labels [rows, slots]. All int64, on the CPU.

    Args:
        rows: the tokens.
        vocabulary: which of them are special.
        rule: how they are masked.
        settings: how they are batched.
    """

    def __init__(self, rows: TokenRows, vocabulary: Vocabulary, *, rule: MaskingRule, settings: BatchSettings) -> None:
        self._rows = rows
        self._vocabulary = vocabulary
        self._rule = rule
        self._settings = settings
        self._special = vocabulary.special()
        self._ordinary_ids = (~self._special).nonzero()[:, 0]
        self._epoch = 0

    @property
    def lines(self) -> int:
        """Lines in an epoch."""
        return len(self._rows)

    def longest(self, rows: int) -> tuple[Inputs, Tensor]:
        """A batch of ``rows`` made-up lines, masked, each as long as a line can be: none takes more memory."""
        generator = seeded_generator(self._settings.seed, rows)
        shape = (rows, self._settings.sequence_length)
        tokens = self._ordinary_ids[torch.randint(len(self._ordinary_ids), shape, generator=generator)]
        return self._mask(tokens, torch.ones(shape, dtype=torch.bool), generator)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration draw the order and the masks of that epoch, counted from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._settings.batch_size)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        seed, epoch = self._settings.seed, self._epoch
        plan = plan_batches(
            self._rows.lengths,
            batch_size=self._settings.batch_size,
            window=self._settings.length_window,
            buffer=self._settings.shuffle_buffer,
            generator=seeded_generator(seed, epoch),
        )
        for batch, rows in enumerate(plan):
            yield self._masked(rows, seeded_generator(seed, epoch, batch))

    def _masked(self, rows: Tensor, generator: torch.Generator) -> tuple[Inputs, Tensor]:
        tokens, real = self._rows.padded(rows, width=self._width(rows), pad_id=self._vocabulary.pad_id)
        return self._mask(tokens, real, generator)

    def _mask(self, tokens: Tensor, real: Tensor, generator: torch.Generator) -> tuple[Inputs, Tensor]:
        masked = mask_tokens(
            tokens,
            real & ~self._special[tokens],
            rule=self._rule,
            mask_id=self._vocabulary.mask_id,
            ordinary_ids=self._ordinary_ids,
            generator=generator,
        )
        inputs = {
            "input_ids": masked.input_ids,
            "attention_mask": real.long(),
            "masked_positions": masked.positions,
        }
        return inputs, masked.labels

    def _width(self, rows: Tensor) -> int:
        limit = self._settings.sequence_length
        if self._settings.padding == "full":
            return limit
        return min(limit, -(-int(self._rows.lengths[rows].max()) // _MULTIPLE) * _MULTIPLE)
