"""Masking of tokens for a masked language model, vectorised: a pure function on tensors and a generator.

The recipe is BERT's (Devlin et al., 2019, section 3.1 and its published ``create_pretraining_data.py``): in every row
15% of the tokens, at least one, are to be predicted; of these 80% become ``[MASK]``, 10% another token, 10% stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import ConfigError

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
