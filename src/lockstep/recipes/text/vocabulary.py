"""A tokenizer with what masking must know of it, and lines turned to tokens once.

``wordpiece`` trains one; ``mlm.pretrained`` takes the one that came with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.recipes.text.wordpiece import END, MASK, PAD, START, UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Token ids and their meaning.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` that adds the special tokens around a line.
        named_ids: ids of special tokens by transformers' names for them ("pad", "mask" and others): they are never
            predicted and never stand in for a token.
    """

    tokenizer: Any
    named_ids: Mapping[str, int]

    @property
    def pad_id(self) -> int:
        """Id of the token that fills up a row."""
        return self.named_ids["pad"]

    @property
    def mask_id(self) -> int:
        """Id of the token that hides another."""
        return self.named_ids["mask"]

    @property
    def size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self.tokenizer.get_vocab_size())

    def special(self) -> Tensor:
        """[size] bool: True for special ids."""
        return torch.zeros(self.size, dtype=torch.bool).index_fill_(
            0, torch.tensor(sorted(set(self.named_ids.values()))), True
        )

    def encode(self, lines: Sequence[str], *, max_tokens: int) -> TokenRows:
        """Tokens of each line, special ones included, cut off at ``max_tokens``."""
        self.tokenizer.enable_truncation(max_tokens)
        self.tokenizer.no_padding()
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(lines)]
        lengths = torch.tensor([len(row) for row in rows])
        return TokenRows(
            tokens=torch.tensor([token for row in rows for token in row], dtype=torch.int32), lengths=lengths
        )


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """All rows of a part of the text in memory, end to end.

    Args:
        tokens: [all tokens] int32.
        lengths: [rows] int64: tokens of each row.
    """

    tokens: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", self.lengths.cumsum(0) - self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: Tensor, *, width: int, pad_id: int) -> tuple[Tensor, Tensor]:
        """Some rows side by side.

        Args:
            rows: [chosen] int64: which rows.
            width: tokens a row; at least the longest of them.
            pad_id: fills up the others.

        Returns:
            The tokens and whether each is real, [chosen, width] int64 and bool.
        """
        starts: Tensor = self._starts  # type: ignore[attr-defined]
        real = torch.arange(width) < self.lengths[rows, None]
        places = (starts[rows, None] + torch.arange(width)).clamp(max=len(self.tokens) - 1)
        return self.tokens[places].long().masked_fill(~real, pad_id), real


def wordpiece_vocabulary(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a tokenizer that ``wordpiece`` trained."""
    names = {"pad": PAD, "unk": UNKNOWN, "cls": START, "sep": END, "mask": MASK}
    return Vocabulary(
        tokenizer=tokenizer, named_ids={name: tokenizer.token_to_id(token) for name, token in names.items()}
    )
