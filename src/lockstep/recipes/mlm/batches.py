"""Global batches for a masked language model: rows of similar length, masked anew in every epoch.

    rows -> shuffled -> windows, sorted by length -> batches in random order -> masked

All random numbers depend on (seed, epoch, batch) alone, so an epoch can be repeated on any number of replicas.
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
"""Label of an unused slot in a row's list of masked positions (the default ``ignore_index`` of torch)."""

NO_POSITION = -1
"""Position in an unused slot of a row's list of masked positions."""


@dataclass(frozen=True, kw_only=True)
class MaskingRule:
    """How many tokens of a row are masked, and by what they are replaced.

    Args:
        fraction: fraction of a row's ordinary tokens to predict, in (0, 1].
        max_masked: maximum number of tokens to predict in one row.
        mask_replace_fraction: fraction of the predicted tokens that are replaced by ``[MASK]``.
        random_replace_fraction: fraction that is replaced by a random ordinary token; the rest is left unchanged.
    """

    fraction: float = 0.15
    max_masked: int = 96
    mask_replace_fraction: float = 0.8
    random_replace_fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"mask_fraction={self.fraction} was given, expected a number in (0, 1]; try 0.15")
        if self.max_masked < 1:
            raise ConfigError(f"max_masked={self.max_masked} was given, expected at least 1 token per row; try 96")
        fractions = self.mask_replace_fraction, self.random_replace_fraction
        if min(fractions) < 0 or sum(fractions) > 1:
            raise ConfigError(
                f"mask_replace_fraction={fractions[0]} and random_replace_fraction={fractions[1]} were given, expected"
                " two numbers from 0 whose sum is at most 1; try 0.8 and 0.1"
            )


class MaskedRows(NamedTuple):
    """A masked batch. Dim 0 of each tensor is the rows, so a batch divides into shards by rows."""

    input_ids: Tensor
    """[rows, tokens] int64: the tokens as the module sees them."""
    positions: Tensor
    """[rows, slots] int64: positions to predict, ascending; ``NO_POSITION`` in unused slots."""
    labels: Tensor
    """[rows, slots] int64: the original tokens at these positions; ``IGNORED_LABEL`` in unused slots."""


def mask_tokens(
    input_ids: Tensor,
    eligible: Tensor,
    *,
    rule: MaskingRule,
    mask_id: int,
    ordinary_ids: Tensor,
    generator: torch.Generator,
) -> MaskedRows:
    """Draws the tokens to predict in each row and masks them in a copy of ``input_ids``.

    Args:
        input_ids: [rows, tokens] int64, on the CPU.
        eligible: [rows, tokens] bool: tokens that may be predicted (neither padding nor special).
        rule: how many tokens are masked, and by what they are replaced.
        mask_id: id of ``[MASK]``.
        ordinary_ids: [ids] int64: the ids from which a random replacement is drawn.
        generator: the only source of randomness.
    """
    counts = masked_counts(eligible.sum(dim=1), rule)
    positions, used = _draw_positions(eligible, counts, generator)
    labels = input_ids.gather(1, positions)
    replaced = _replacements(labels, rule=rule, mask_id=mask_id, ordinary_ids=ordinary_ids, generator=generator)
    masked = input_ids.scatter(1, positions, torch.where(used, replaced, labels))
    return MaskedRows(masked, positions.masked_fill(~used, NO_POSITION), labels.masked_fill(~used, IGNORED_LABEL))


def masked_counts(lengths: Tensor, rule: MaskingRule) -> Tensor:
    """Returns how many of each row's ordinary tokens to predict: ``max(1, round(fraction * length))``, capped.

    >>> masked_counts(torch.tensor([0, 1, 20, 510]), MaskingRule())
    tensor([ 0,  1,  3, 76])
    """
    wanted = (lengths.double() * rule.fraction).round().long().clamp(1, rule.max_masked)
    return torch.minimum(wanted, lengths)


def _draw_positions(eligible: Tensor, counts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[rows, slots] positions, and which slots are used."""
    # The positions of the highest of independent uniform numbers are a uniform draw without replacement. Unused slots
    # get a position too, a different one each, so that no two slots write to one place in the scatter above.
    rows, slots = len(counts), int(counts.max()) if len(counts) else 0
    uniform = torch.rand(eligible.shape, generator=generator).masked_fill(~eligible, -1.0)
    drawn = uniform.topk(slots, dim=1).indices
    used = torch.arange(slots).expand(rows, slots) < counts[:, None]
    ascending = torch.where(used, drawn, drawn + eligible.shape[1]).argsort(dim=1)
    return drawn.gather(1, ascending), used


def _replacements(
    labels: Tensor, *, rule: MaskingRule, mask_id: int, ordinary_ids: Tensor, generator: torch.Generator
) -> Tensor:
    choice = torch.rand(labels.shape, generator=generator)
    random_ids = ordinary_ids[torch.randint(len(ordinary_ids), labels.shape, generator=generator)]
    mask_or_random = rule.mask_replace_fraction + rule.random_replace_fraction
    random_or_same = torch.where(choice < mask_or_random, random_ids, labels)
    return torch.where(choice < rule.mask_replace_fraction, mask_id, random_or_same)


Inputs = dict[str, Tensor]
Padding = Literal["longest", "full"]

_PAD_TO_MULTIPLE = 8  # matrix kernels work on whole vectors


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How rows become batches.

    Args:
        batch_size: rows in a global batch; the last batch may be smaller.
        shuffle_buffer: rows that are shuffled together; 0 shuffles all rows together.
        length_window: global batches whose rows are sorted by length together; 1 does not sort.
        padding: "longest" pads a batch to its longest row (and a multiple of 8), "full" to ``sequence_length``.
        sequence_length: maximum length of a row, in tokens.
        seed: seed of the order and of the masks.
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
    ``masked_positions`` [rows, slots]; y is the labels [rows, slots]. All are int64 on the CPU.

    Args:
        rows: the token rows.
        vocabulary: the vocabulary of the tokens.
        rule: how rows are masked.
        settings: how rows become batches.
    """

    def __init__(self, rows: TokenRows, vocabulary: Vocabulary, *, rule: MaskingRule, settings: BatchSettings) -> None:
        self._rows = rows
        self._vocabulary = vocabulary
        self._rule = rule
        self._settings = settings
        self._is_special = vocabulary.is_special()
        self._ordinary_ids = (~self._is_special).nonzero()[:, 0]
        self._epoch = 0

    @property
    def num_rows(self) -> int:
        """The number of rows in an epoch."""
        return len(self._rows)

    def longest_batch(self, rows: int) -> tuple[Inputs, Tensor]:
        """Returns a batch of random tokens whose rows all have the maximum length: no real batch needs more memory."""
        generator = seeded_generator(self._settings.seed, rows)
        shape = (rows, self._settings.sequence_length)
        tokens = self._ordinary_ids[torch.randint(len(self._ordinary_ids), shape, generator=generator)]
        return self._mask(tokens, torch.ones(shape, dtype=torch.bool), generator)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, counted from 0, whose order and masks the next iteration draws."""
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
            tokens, real = self._rows.padded(rows, width=self._width(rows), pad_id=self._vocabulary.pad_id)
            yield self._mask(tokens, real, seeded_generator(seed, epoch, batch))

    def _mask(self, tokens: Tensor, real: Tensor, generator: torch.Generator) -> tuple[Inputs, Tensor]:
        masked = mask_tokens(
            tokens,
            real & ~self._is_special[tokens],
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
        return min(limit, -(-int(self._rows.lengths[rows].max()) // _PAD_TO_MULTIPLE) * _PAD_TO_MULTIPLE)
