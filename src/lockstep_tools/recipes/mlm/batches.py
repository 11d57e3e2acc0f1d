"""Global batches for a masked language model: rows of similar length, masked anew in every epoch.

    grouped     rows -> shuffled -> windows, sorted by length -> batches in random order -> masked
    published   rows -> shuffled through a buffer, in every epoch alike -> batches -> masked

All random numbers depend on (seed, epoch, batch) alone, so an epoch can be repeated on any number of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.model import IGNORED_LABEL, NO_POSITION
from lockstep_tools.recipes.shuffling import plan_batches, seeded_generator, shuffled_order
from lockstep_tools.recipes.text.tokenizer import TokenRows

Inputs = dict[str, Tensor]
_PAD_TO_MULTIPLE = 8  # matrix kernels work on whole vectors
_MASK_FRACTION, _RANDOM_FRACTION = 0.8, 0.1
"""Fractions of the tokens to predict that are replaced by [MASK] and by a random token; the others are kept."""


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
    config: MlmConfig,
    *,
    mask_id: int,
    ordinary_ids: Tensor,
    generator: torch.Generator,
) -> MaskedRows:
    """Draws the tokens to predict in each row and masks them in a copy of ``input_ids``, [rows, tokens] int64.

    ``eligible`` [rows, tokens] tells which may be predicted (neither padding nor special); a random replacement is one
    of ``ordinary_ids``.
    """
    counts = masked_counts(eligible.sum(dim=1), config)
    positions, is_used = _draw_positions(eligible, counts, generator)
    labels = input_ids.gather(1, positions)
    choice = torch.rand(labels.shape, generator=generator)
    random_ids = ordinary_ids[torch.randint(len(ordinary_ids), labels.shape, generator=generator)]
    replaced = torch.where(choice < _MASK_FRACTION + _RANDOM_FRACTION, random_ids, labels)
    replaced = torch.where(choice < _MASK_FRACTION, mask_id, replaced)
    masked = input_ids.scatter(1, positions, torch.where(is_used, replaced, labels))
    return MaskedRows(masked, positions.masked_fill(~is_used, NO_POSITION), labels.masked_fill(~is_used, IGNORED_LABEL))


def masked_counts(lengths: Tensor, config: MlmConfig) -> Tensor:
    """Returns how many of each row's ordinary tokens to predict: ``max(1, round(fraction * length))``, capped."""
    counts = (lengths.double() * config.mask_fraction).round().long().clamp(1, config.max_masked)
    return torch.minimum(counts, lengths)


def _draw_positions(eligible: Tensor, counts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[rows, slots] positions, and which slots are used."""
    # The positions of the highest of independent uniform numbers are a uniform draw without replacement. Unused slots
    # get a position too, a different one each, so that no two slots write to one place in the scatter above.
    rows, slots = len(counts), int(counts.max()) if len(counts) else 0
    uniform = torch.rand(eligible.shape, generator=generator).masked_fill(~eligible, -1.0)
    drawn = uniform.topk(slots, dim=1).indices
    is_used = torch.arange(slots).expand(rows, slots) < counts[:, None]
    ascending = torch.where(is_used, drawn, drawn + eligible.shape[1]).argsort(dim=1)
    return drawn.gather(1, ascending), is_used


def special_tokens(tokenizer: Any) -> Tensor:
    """Returns [vocabulary] bool: True for special tokens, which are never masked and never replace a masked token."""
    special = torch.zeros(len(tokenizer), dtype=torch.bool)
    special[tokenizer.all_special_ids] = True
    return special


class MaskedBatches:
    """The global batches of an epoch, as items (x, y) of a ``Model``'s data.

    x holds the keyword arguments of ``MaskedLanguageModel``: ``input_ids`` and ``attention_mask`` [rows, tokens],
    ``masked_positions`` [rows, slots]; y is the labels [rows, slots]. All are int64 on the CPU. A row has at most
    ``max_tokens``; ``seed`` decides order and masks.
    """

    may_be_read_ahead = True  # each batch has a generator of its own

    def __init__(self, rows: TokenRows, tokenizer: Any, config: MlmConfig, *, max_tokens: int, seed: int) -> None:
        self._rows = rows
        self._pad_id, self._mask_id = tokenizer.pad_token_id, tokenizer.mask_token_id
        self._config = config
        self._max_tokens, self._seed = max_tokens, seed
        self._is_special = special_tokens(tokenizer)
        self._ordinary_ids = (~self._is_special).nonzero()[:, 0]
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, counted from 0, whose order and masks the next iteration draws."""
        self._epoch = epoch

    def most_frequent_token(self) -> int:
        """Returns the ordinary token that is most frequent in the rows."""
        counts = torch.bincount(self._rows.tokens, minlength=len(self._is_special))
        return int(counts.masked_fill(self._is_special, 0).argmax())

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._config.batch_size)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        epoch = self._epoch
        for batch, rows in enumerate(self._plan(epoch)):
            tokens, real = self._rows.padded(rows, width=self._width(rows), pad_id=self._pad_id)
            yield self._mask(tokens, real, seeded_generator(self._seed, epoch, batch))

    def _plan(self, epoch: int) -> Sequence[Tensor]:
        """The rows of each batch of an epoch."""
        config = self._config
        if config.order == "published":  # the order that tf.data caches is that of its first pass
            order = shuffled_order(len(self._rows), buffer=config.buffer, generator=seeded_generator(self._seed, 0))
            return torch.split(order, config.batch_size)
        return plan_batches(
            self._rows.lengths,
            batch_size=config.batch_size,
            window=config.window,
            buffer=config.buffer,
            generator=seeded_generator(self._seed, epoch),
        )

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def longest(self, rows: int) -> tuple[Inputs, Tensor]:
        """Returns a batch of the longest rows, as many as there are up to ``rows``."""
        longest = self._rows.lengths.argsort(descending=True, stable=True)[:rows]
        tokens, real = self._rows.padded(longest, width=self._width(longest), pad_id=self._pad_id)
        return self._mask(tokens, real, seeded_generator(self._seed))

    def _mask(self, tokens: Tensor, real: Tensor, generator: torch.Generator) -> tuple[Inputs, Tensor]:
        input_ids, positions, labels = mask_tokens(
            tokens,
            real & ~self._is_special[tokens],
            self._config,
            mask_id=self._mask_id,
            ordinary_ids=self._ordinary_ids,
            generator=generator,
        )
        return {"input_ids": input_ids, "attention_mask": real.long(), "masked_positions": positions}, labels

    def _width(self, rows: Tensor) -> int:
        if self._config.padding == "full":
            return self._max_tokens
        # Padding to the longest row of the batch and not of the text: most lines are far shorter than sequence_length.
        longest = int(self._rows.lengths[rows].max())
        return min(self._max_tokens, math.ceil(longest / _PAD_TO_MULTIPLE) * _PAD_TO_MULTIPLE)
