"""Global batches for a masked language model: rows of like length, masked anew in every epoch.

    rows -> shuffled -> windows, sorted by length -> batches, in a seeded order -> masks

Everything drawn depends on (seed, epoch, batch) alone, so an epoch can be repeated, on any number of replicas. Without
a shuffle buffer all rows are permuted: they are in memory anyhow, and it mixes better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.recipes.shuffling import plan_batches, seeded_generator
from lockstep.recipes.text.tokenizer import TokenRows, Vocabulary

IGNORED_LABEL = -100
"""Label of a slot that pads a row's list of masked positions (torch's own default ``ignore_index``)."""

NO_POSITION = -1
"""Position of a slot that pads a row's list of masked positions."""


@dataclass(frozen=True, kw_only=True)
class MaskingRule:
    """How many tokens of a row are masked, and how.

    Args:
        fraction: part of a row's ordinary tokens to predict, in (0, 1].
        max_masked: most tokens to predict in one row.
        mask_share: part of the predicted tokens replaced by ``[MASK]``.
        random_share: part replaced by a random ordinary token; the rest stay as they are.
    """

    fraction: float = 0.15
    max_masked: int = 96
    mask_share: float = 0.8
    random_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"mask fraction {self.fraction} was given, expected a number in (0, 1]; try 0.15")
        if self.max_masked < 1:
            raise ConfigError(f"max_masked={self.max_masked} was given, expected at least 1 token a row; try 96")
        if min(self.mask_share, self.random_share) < 0 or self.mask_share + self.random_share > 1:
            raise ConfigError(
                f"mask_share={self.mask_share} and random_share={self.random_share} were given, expected two"
                " numbers from 0 that add up to at most 1; try 0.8 and 0.1"
            )


class MaskedRows(NamedTuple):
    """A masked batch. All tensors have one entry per row in dim 0, so that a batch divides into shards by rows."""

    input_ids: Tensor
    """[rows, tokens] int64: the tokens as the module sees them."""
    positions: Tensor
    """[rows, slots] int64: positions to predict, ascending; ``NO_POSITION`` pads."""
    labels: Tensor
    """[rows, slots] int64: the tokens that stood there; ``IGNORED_LABEL`` pads."""


def mask_tokens(
    input_ids: Tensor,
    eligible: Tensor,
    *,
    rule: MaskingRule,
    mask_id: int,
    ordinary_ids: Tensor,
    generator: torch.Generator,
) -> MaskedRows:
    """Draws the tokens to predict in each row and hides them. ``input_ids`` itself is left as it is.

    Args:
        input_ids: [rows, tokens] int64, on the CPU.
        eligible: [rows, tokens] bool: real tokens that may be predicted (neither padding nor special).
        rule: how many, and how.
        mask_id: id of ``[MASK]``.
        ordinary_ids: [ids] int64: the ids that a random replacement is drawn from.
        generator: the only source of randomness.
    """
    counts = masked_counts(eligible.sum(dim=1), rule)
    positions, valid = _draw_positions(eligible, counts, generator)
    labels = input_ids.gather(1, positions)
    shown = _replace(labels, rule=rule, mask_id=mask_id, ordinary_ids=ordinary_ids, generator=generator)
    hidden = input_ids.scatter(1, positions, torch.where(valid, shown, labels))
    return MaskedRows(hidden, positions.masked_fill(~valid, NO_POSITION), labels.masked_fill(~valid, IGNORED_LABEL))


def masked_counts(lengths: Tensor, rule: MaskingRule) -> Tensor:
    """How many tokens to predict in rows of so many ordinary tokens: ``max(1, round(fraction * length))``, capped.

    >>> masked_counts(torch.tensor([0, 1, 20, 510]), MaskingRule())
    tensor([ 0,  1,  3, 76])
    """
    wanted = (lengths.double() * rule.fraction).round().long().clamp(1, rule.max_masked)
    return torch.minimum(wanted, lengths)


def _draw_positions(eligible: Tensor, counts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    # The highest of independent uniform scores are a uniform draw without replacement. Slots past a row's count
    # keep a position too (a different one each, so that the scatter above has no two writers), marked not valid.
    rows, slots = len(counts), int(counts.max()) if len(counts) else 0
    scores = torch.rand(eligible.shape, generator=generator).masked_fill(~eligible, -1.0)
    drawn = scores.topk(slots, dim=1).indices
    valid = torch.arange(slots).expand(rows, slots) < counts[:, None]
    ascending = torch.where(valid, drawn, drawn + eligible.shape[1]).argsort(dim=1)
    return drawn.gather(1, ascending), valid


def _replace(
    labels: Tensor, *, rule: MaskingRule, mask_id: int, ordinary_ids: Tensor, generator: torch.Generator
) -> Tensor:
    fate = torch.rand(labels.shape, generator=generator)
    drawn = torch.randint(len(ordinary_ids), labels.shape, generator=generator)
    kept_or_random = torch.where(fate < rule.mask_share + rule.random_share, ordinary_ids[drawn], labels)
    return torch.where(fate < rule.mask_share, mask_id, kept_or_random)


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
