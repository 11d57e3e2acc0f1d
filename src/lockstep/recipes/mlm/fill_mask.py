"""What a trained model would fill in: for words of the test text that it does not see, or of sentences that are given.

sentence with [MASK] -> tokens -> a row for each [MASK] -> model.predict -> the likeliest words
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.errors import ConfigError
from lockstep.recipes.mlm.batches import Inputs
from lockstep.recipes.shuffling import seeded_generator
from lockstep.recipes.text.tokenizer import Vocabulary
from lockstep.train.model import Model

_SHORTEST = 3
"""Letters of a word that is hidden, where a line has such words: shorter ones say little about the line."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A sentence of which the model does not see some words.

    Args:
        text: the sentence, with the mask token where they stood.
        tokens: the ids of its tokens, special ones included.
        places: of the hidden ones among them, ascending.
        hidden: the word that stood there; None where nobody knows.
    """

    text: str
    tokens: tuple[int, ...]
    places: tuple[int, ...]
    hidden: str | None = None


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A word, and how likely the model takes it to be."""

    word: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A sentence and what the model would fill in.

    Args:
        question: the sentence.
        guesses: for each hidden word the likeliest, the best first.
    """

    question: Question
    guesses: tuple[tuple[Guess, ...], ...]


def mask_token(vocabulary: Vocabulary) -> str:
    """What stands for a hidden word in a text: "[MASK]" in every BERT that is known."""
    return str(vocabulary.tokenizer.id_to_token(vocabulary.mask_id))


def check_examples(sentences: Sequence[str], mask: str) -> None:
    """Refuses sentences in which no word is hidden.

    Raises:
        ConfigError: there is one; the message shows how it is done.
    """
    for sentence in sentences:
        if mask not in sentence:
            raise ConfigError(
                f"the example {sentence!r} hides no word; write {mask} for each word to fill in, such as"
                f" 'the first {mask} of a list'"
            )


def questions_of(sentences: Sequence[str], vocabulary: Vocabulary) -> tuple[Question, ...]:
    """The sentences with their tokens, cut off where the vocabulary's tokenizer cuts lines off.

    Raises:
        ConfigError: one without a hidden word, or whose hidden words are all cut off.
    """
    mask = mask_token(vocabulary)
    check_examples(sentences, mask)
    return tuple(_question(sentence, vocabulary, mask) for sentence in sentences)


def hidden_words(lines: Sequence[str], vocabulary: Vocabulary, *, number: int, seed: int) -> tuple[Question, ...]:
    """A word hidden in each of ``number`` lines, spread evenly over the text; fewer where lines have no whole word.

    Args:
        lines: of the text.
        vocabulary: whose tokenizer knows them.
        number: how many lines are wanted.
        seed: where the choice of the words begins.
    """
    chosen = [lines[place * len(lines) // number] for place in range(min(number, len(lines)))]
    asked = (_hide_one(line, vocabulary, seeded_generator(seed, place)) for place, line in enumerate(chosen))
    return tuple(question for question in asked if question is not None)


def fill(model: Model, questions: Sequence[Question], vocabulary: Vocabulary, *, likeliest: int) -> tuple[Filled, ...]:
    """Asks the model. Every worker must call it; all know the answers.

    Args:
        model: of a ``MaskedLanguageModel``.
        questions: what to ask.
        vocabulary: the model's.
        likeliest: how many words are wanted for each hidden one; special tokens are none.
    """
    if not questions:
        return ()
    asked = [(question, place) for question in questions for place in question.places]
    logits = model.predict([_rows(asked, vocabulary.pad_id)]).flatten(0, -2)  # [rows, one slot, vocabulary] on GPUs
    probabilities = logits.float().softmax(dim=1)[:, : vocabulary.size]
    words = probabilities.masked_fill(vocabulary.special(), -1.0).topk(likeliest, dim=1)
    guesses = iter(
        tuple(Guess(word=vocabulary.tokenizer.id_to_token(token), probability=p) for token, p in zip(*row, strict=True))
        for row in zip(words.indices.tolist(), words.values.tolist(), strict=True)
    )
    return tuple(Filled(question=each, guesses=tuple(next(guesses) for _ in each.places)) for each in questions)


def _question(sentence: str, vocabulary: Vocabulary, mask: str) -> Question:
    tokens = tuple(vocabulary.tokenizer.encode(sentence).ids)
    places = tuple(place for place, token in enumerate(tokens) if token == vocabulary.mask_id)
    if not places:
        raise ConfigError(
            f"the example {sentence[:40]!r}... has no {mask} among the first {len(tokens)} tokens, and no line can be"
            " longer; give a shorter one"
        )
    return Question(text=sentence, tokens=tokens, places=places)


def _hide_one(line: str, vocabulary: Vocabulary, generator: torch.Generator) -> Question | None:
    """The line with one of its words hidden, of those that are one token."""
    encoding = vocabulary.tokenizer.encode(line)
    pieces = Counter(encoding.word_ids)
    whole = [
        place
        for place, (word, token) in enumerate(zip(encoding.word_ids, encoding.tokens, strict=True))
        if word is not None and pieces[word] == 1 and token.isalpha()
    ]
    telling = [place for place in whole if len(encoding.tokens[place]) >= _SHORTEST] or whole
    if not telling:
        return None
    place = telling[int(torch.randint(len(telling), (), generator=generator))]
    begin, end = encoding.offsets[place]
    tokens = [*encoding.ids[:place], vocabulary.mask_id, *encoding.ids[place + 1 :]]
    text = f"{line[:begin]}{mask_token(vocabulary)}{line[end:]}"
    return Question(text=text, tokens=tuple(tokens), places=(place,), hidden=encoding.tokens[place])


def _rows(asked: Sequence[tuple[Question, int]], pad_id: int) -> Inputs:
    """A row for each hidden word, so that the logits have one too."""
    width = max(len(question.tokens) for question, _ in asked)
    tokens = torch.full((len(asked), width), pad_id)
    real = torch.zeros(len(asked), width, dtype=torch.long)
    for row, (question, _) in enumerate(asked):
        tokens[row, : len(question.tokens)] = torch.tensor(question.tokens)
        real[row, : len(question.tokens)] = 1
    places = torch.tensor([[place] for _, place in asked])
    return {"input_ids": tokens, "attention_mask": real, "masked_positions": places}
