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

from lockstep.recipes.mlm.batches import MaskedBatches
from lockstep.recipes.mlm.model import IGNORED_LABEL
from lockstep.train.model import Model

_MOST_LINES = 128
_ROWS = 32  # rows at a time: 512 tokens of 32 rows are what a training batch of 128 shorter lines takes
_ANSWERS = 3
_SHOWN = 5
_BEFORE, _AFTER = 40, 20  # characters of the line that are shown around the hidden word
_SHORTEST_WORD = 2  # letters


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
class FilledWord:
    """A word that was hidden in a line, and what the model puts in its place.

    Args:
        before: the end of the text before the word.
        word: the word.
        after: the beginning of the text after it.
        answers: tokens and their probabilities, the likeliest first.
        right: whether the likeliest one is the word.
    """

    before: str
    word: str
    after: str
    answers: tuple[tuple[str, float], ...]
    right: bool

    def __str__(self) -> str:
        return f"{self.before}____{self.after}"


@dataclass(frozen=True, kw_only=True)
class FilledWords:
    """Words of the test text that a model filled in.

    Args:
        hidden: number of words that were hidden, one at a time.
        right: number of them that were the likeliest answer.
        surest: those whose likeliest answer is a word and has the highest probability, each answer once.
    """

    hidden: int
    right: int
    surest: tuple[FilledWord, ...]


def fill_words(model: Model, lines: Sequence[str], tokenizer: Any) -> FilledWords:
    """Hides two words in each of at most 128 lines, one at a time, and fills them in. Every worker must call it.

    A word is one token of at least two letters.
    """
    spaced = lines[:: max(1, math.ceil(len(lines) / _MOST_LINES))]
    hidden = [word for line in spaced for word in _hide_words(line, tokenizer)]
    filled = [
        word
        for start in range(0, len(hidden), _ROWS)
        for word in _fill(model, hidden[start : start + _ROWS], tokenizer)
    ]
    surest: dict[str, FilledWord] = {}
    for word in sorted(filled, key=lambda word: -word.answers[0][1]):
        if word.answers[0][0].isalpha():
            surest.setdefault(word.answers[0][0], word)
    return FilledWords(
        hidden=len(filled),
        right=sum(word.right for word in filled),
        surest=tuple(surest.values())[:_SHOWN],
    )


def _fill(model: Model, hidden: Sequence[_HiddenWord], tokenizer: Any) -> list[FilledWord]:
    padded = tokenizer.pad({"input_ids": [word.input_ids for word in hidden]}, return_tensors="pt")
    inputs = {**padded, "masked_positions": torch.tensor([[word.position] for word in hidden])}
    logits: Tensor = model.predict([inputs], verbose=0).reshape(len(hidden), -1)
    likeliest = logits.float().softmax(dim=1)[:, : len(tokenizer)].topk(_ANSWERS, dim=1)
    rows = zip(hidden, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
    return [
        FilledWord(
            before=word.line[: word.start][-_BEFORE:],
            word=word.line[word.start : word.end],
            after=word.line[word.end :][:_AFTER],
            answers=tuple(zip(tokenizer.convert_ids_to_tokens(tokens), probabilities, strict=True)),
            right=tokens[0] == word.token,
        )
        for word, probabilities, tokens in rows
    ]


@dataclass(frozen=True, kw_only=True)
class _HiddenWord:
    """A line as token ids with [MASK] at ``position``, where ``token`` was, the characters ``start`` to ``end``."""

    line: str
    input_ids: list[int]
    token: int
    position: int
    start: int
    end: int


def _hide_words(line: str, tokenizer: Any) -> list[_HiddenWord]:
    """Hides the words of one token that are nearest to a third and to two thirds of the line."""
    encoded = tokenizer(line, truncation=True, return_offsets_mapping=True)
    spans: list[tuple[int, int]] = encoded["offset_mapping"]
    words = [
        position
        for position, (start, end) in enumerate(spans)
        if _is_long(line[start:end])
        and not line[start - 1 : start].isalnum()  # a piece of a longer word otherwise
        and not line[end : end + 1].isalnum()
    ]
    places = (len(spans) / 3, 2 * len(spans) / 3)
    positions = {min(words, key=lambda word: abs(word - place)) for place in places} if words else ()
    return [_hide(line, encoded["input_ids"], spans, position, tokenizer) for position in sorted(positions)]


def _hide(
    line: str, tokens: Sequence[int], spans: Sequence[tuple[int, int]], position: int, tokenizer: Any
) -> _HiddenWord:
    input_ids = [*tokens[:position], tokenizer.mask_token_id, *tokens[position + 1 :]]
    start, end = spans[position]
    return _HiddenWord(line=line, input_ids=input_ids, token=tokens[position], position=position, start=start, end=end)


def _is_long(word: str) -> bool:
    return word.isalpha() and len(word) >= _SHORTEST_WORD
