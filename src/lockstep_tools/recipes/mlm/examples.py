"""What a masked language model is compared with, and words that it fills in, both on the test text.

The accuracy of a small model says little alone. Beside it stands the accuracy of always answering the most frequent
token, which a model learns first, and a few lines with one word hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.train.model import Model
from lockstep_tools.recipes.mlm.batches import MaskedBatches
from lockstep_tools.recipes.mlm.model import IGNORED_LABEL

_MOST_LINES = 256
_ROWS = 32  # rows at a time: 512 tokens of 32 rows are what a training batch of 128 shorter lines takes
_ANSWERS = 3
_SHOWN = 5
_BEFORE, _AFTER = 40, 20  # characters of the line that are shown around the hidden token


@dataclass(frozen=True, kw_only=True)
class ConstantAnswer:
    """The most frequent token of the training text, as the answer to every masked token of the test batches.

    Args:
        token: the token.
        accuracy: fraction of the masked tokens of the test batches that it is.
        chance: the expected accuracy of a token drawn at random from the tokenizer's.
    """

    token: str
    accuracy: float
    chance: float

    def __str__(self) -> str:
        return f"{self.accuracy:.4f} by always answering {self.token!r}, {self.chance:.4f} by chance"


def constant_answer(train: MaskedBatches, test: Sequence[tuple[Any, Tensor]], tokenizer: Any) -> ConstantAnswer:
    """Returns the answer that needs no model, and its accuracy on test batches (x, labels [rows, slots])."""
    answer = train.most_frequent_token()
    labels = torch.cat([labels[labels != IGNORED_LABEL] for _, labels in test])
    return ConstantAnswer(
        token=tokenizer.convert_ids_to_tokens(answer),
        accuracy=float((labels == answer).double().mean()),
        chance=1 / len(tokenizer),
    )


@dataclass(frozen=True, kw_only=True)
class FilledToken:
    """A token that was hidden in a line, and what the model puts in its place.

    Args:
        before: the end of the text before the token.
        text: the text of the token.
        after: the beginning of the text after it.
        answers: tokens and their probabilities, the likeliest first.
        right: whether the likeliest one is the hidden token.
    """

    before: str
    text: str
    after: str
    answers: tuple[tuple[str, float], ...]
    right: bool

    def __str__(self) -> str:
        return f"{self.before}____{self.after}"


@dataclass(frozen=True, kw_only=True)
class FilledTokens:
    """Tokens of the test text that a model filled in.

    Args:
        hidden: number of tokens that were hidden, one at a time.
        right: number of them that were the likeliest answer.
        constant: number of them that are the most frequent token of the training text.
        surest: those whose likeliest answers have the highest probabilities, each answer once.
    """

    hidden: int
    right: int
    constant: int
    surest: tuple[FilledToken, ...]


def fill_tokens(model: Model, lines: Sequence[str], tokenizer: Any, *, most_frequent: int) -> FilledTokens:
    """Hides two tokens in each of at most 256 lines, one at a time, and fills them in. Every worker must call it."""
    # At equal distances, so that the whole test text is covered and every run shows the same.
    spaced = lines[:: max(1, math.ceil(len(lines) / _MOST_LINES))]
    hidden = [token for line in spaced for token in _hide_tokens(line, tokenizer)]
    batches = [hidden[start : start + _ROWS] for start in range(0, len(hidden), _ROWS)]
    filled = [token for batch in batches for token in _fill(model, batch, tokenizer)]
    surest: dict[str, FilledToken] = {}
    for token in sorted(filled, key=lambda token: -token.answers[0][1]):
        surest.setdefault(token.answers[0][0], token)
    return FilledTokens(
        hidden=len(filled),
        right=sum(token.right for token in filled),
        constant=sum(token.token == most_frequent for token in hidden),
        surest=tuple(surest.values())[:_SHOWN],
    )


@dataclass(frozen=True, kw_only=True)
class _HiddenToken:
    """A line as token ids with [MASK] at ``position``, where ``token`` was, the characters ``start`` to ``end``."""

    line: str
    input_ids: list[int]
    token: int
    position: int
    start: int
    end: int


def _hide_tokens(line: str, tokenizer: Any) -> list[_HiddenToken]:
    """Hides the tokens at a third and at two thirds of the line."""
    encoded = tokenizer(line, truncation=True, return_offsets_mapping=True)
    tokens: list[int] = encoded["input_ids"]
    positions = sorted({len(tokens) // 3, 2 * len(tokens) // 3} - {0, len(tokens) - 1})  # not [CLS] and [SEP]
    return [
        _HiddenToken(
            line=line,
            input_ids=[*tokens[:position], tokenizer.mask_token_id, *tokens[position + 1 :]],
            token=tokens[position],
            position=position,
            start=encoded["offset_mapping"][position][0],
            end=encoded["offset_mapping"][position][1],
        )
        for position in positions
    ]


def _fill(model: Model, hidden: Sequence[_HiddenToken], tokenizer: Any) -> list[FilledToken]:
    padded = tokenizer.pad({"input_ids": [token.input_ids for token in hidden]}, return_tensors="pt")
    inputs = {**padded, "masked_positions": torch.tensor([[token.position] for token in hidden])}
    logits: Tensor = model.predict([inputs], verbose=0).reshape(len(hidden), -1)
    # A model has embeddings for more tokens than a short text gives its tokenizer; these are no words.
    likeliest = logits.float().softmax(dim=1)[:, : len(tokenizer)].topk(_ANSWERS, dim=1)
    rows = zip(hidden, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
    return [
        FilledToken(
            before=token.line[: token.start][-_BEFORE:],
            text=token.line[token.start : token.end],
            after=token.line[token.end :][:_AFTER],
            answers=tuple(zip(tokenizer.convert_ids_to_tokens(answers), probabilities, strict=True)),
            right=answers[0] == token.token,
        )
        for token, probabilities, answers in rows
    ]
