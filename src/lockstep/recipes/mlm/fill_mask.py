"""Predictions of a trained model for masked words: of given sentences, or of words of the test text.

sentence with [MASK] -> tokens -> one row for each [MASK] -> model.predict -> the likeliest words
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from lockstep.errors import ConfigError
from lockstep.recipes.mlm.batches import Inputs, special_tokens
from lockstep.recipes.shuffling import seeded_generator
from lockstep.train.model import Model

_MIN_LETTERS = 3  # of a word to mask, if the line has such words: shorter ones depend little on the line


@dataclass(frozen=True, kw_only=True)
class MaskedSentence:
    """A sentence in which some words are masked: its text, its token ids, and the ascending positions of the masks.

    ``answer`` is the word that was masked, if it is known.
    """

    text: str
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    answer: str | None = None


class Guess(NamedTuple):
    """A word and its probability according to the model."""

    word: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class FilledSentence:
    """A masked sentence, and for each mask the likeliest words, the best first."""

    sentence: MaskedSentence
    guesses: tuple[tuple[Guess, ...], ...]


def check_examples(sentences: Sequence[str], mask: str) -> None:
    """Raises ConfigError for a sentence without a mask."""
    for sentence in sentences:
        if mask not in sentence:
            example = f"'the first {mask} of a list'"
            raise ConfigError(
                f"the example {sentence!r} has no {mask}; write {mask} for each word to fill in, such as {example}"
            )


def tokenize_examples(sentences: Sequence[str], tokenizer: Any) -> tuple[MaskedSentence, ...]:
    """Returns the sentences with their tokens, truncated as lines are; raises ConfigError if no mask is left."""
    check_examples(sentences, tokenizer.mask_token)
    found = []
    for sentence in sentences:
        tokens = tuple(tokenizer(sentence, truncation=True)["input_ids"])
        positions = tuple(position for position, token in enumerate(tokens) if token == tokenizer.mask_token_id)
        if not positions:
            raise ConfigError(
                f"the example {sentence[:40]!r}... has no {tokenizer.mask_token} among the first {len(tokens)} tokens,"
                " which is the maximum length of a line; give a shorter sentence"
            )
        found.append(MaskedSentence(text=sentence, tokens=tokens, positions=positions))
    return tuple(found)


def mask_words(lines: Sequence[str], tokenizer: Any, *, number: int, seed: int) -> tuple[MaskedSentence, ...]:
    """Masks one word in each of ``number`` lines that are spread evenly over the text.

    A line in which no word is a single token is left out.
    """
    chosen = [lines[index * len(lines) // number] for index in range(min(number, len(lines)))]
    masked = (_mask_word(line, tokenizer, seeded_generator(seed, index)) for index, line in enumerate(chosen))
    return tuple(sentence for sentence in masked if sentence is not None)


def _mask_word(line: str, tokenizer: Any, generator: torch.Generator) -> MaskedSentence | None:
    """Masks one of the words that are a single token; None if there is none."""
    encoding = tokenizer(line, truncation=True, return_offsets_mapping=True)
    words, tokens, ids = encoding.word_ids(), encoding.tokens(), encoding["input_ids"]
    pieces = Counter(words)
    whole_words = [
        position
        for position, (word, token) in enumerate(zip(words, tokens, strict=True))
        if word is not None and pieces[word] == 1 and token.isalpha()
    ]
    candidates = [position for position in whole_words if len(tokens[position]) >= _MIN_LETTERS] or whole_words
    if not candidates:
        return None
    position = candidates[int(torch.randint(len(candidates), (), generator=generator))]
    begin, end = encoding["offset_mapping"][position]
    return MaskedSentence(
        text=f"{line[:begin]}{tokenizer.mask_token}{line[end:]}",
        tokens=(*ids[:position], tokenizer.mask_token_id, *ids[position + 1 :]),
        positions=(position,),
        answer=tokens[position],
    )


def fill_masks(
    model: Model, sentences: Sequence[MaskedSentence], tokenizer: Any, *, top_k: int
) -> tuple[FilledSentence, ...]:
    """Predicts the masked words: ``top_k`` for each mask, special tokens left out.

    Every worker must call it; all get the same predictions.
    """
    if not sentences:
        return ()
    masks = [(sentence, position) for sentence in sentences for position in sentence.positions]
    logits = model.predict([_inputs(masks, tokenizer.pad_token_id)]).flatten(0, -2)  # on GPUs [rows, 1, tokens]
    probabilities = logits.float().softmax(dim=1)[:, : len(tokenizer)]
    best = probabilities.masked_fill(special_tokens(tokenizer), -1.0).topk(top_k, dim=1)
    guesses = iter(
        tuple(Guess(tokenizer.convert_ids_to_tokens(token), p) for token, p in zip(*row, strict=True))
        for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )
    return tuple(
        FilledSentence(sentence=sentence, guesses=tuple(next(guesses) for _ in sentence.positions))
        for sentence in sentences
    )


def _inputs(masks: Sequence[tuple[MaskedSentence, int]], pad_id: int) -> Inputs:
    """One row for each mask, so that the logits have one row for each too."""
    tokens = [torch.tensor(sentence.tokens) for sentence, _ in masks]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True, padding_value=pad_id),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        "masked_positions": torch.tensor([[position] for _, position in masks]),
    }
