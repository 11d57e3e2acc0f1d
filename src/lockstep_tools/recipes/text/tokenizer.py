"""Training a WordPiece tokenizer, which takes seconds, and encoding lines as rows of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep_tools.recipes.from_hub import load_named

SPECIAL_TOKENS: Mapping[str, str] = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
"""Name of a special token in transformers -> the token, in the order of their ids."""

_MAX_VOCABULARY = 1_000_000  # the library allocates memory for all tokens at once and aborts if there is not enough
_MIN_FREQUENCY = 2  # occurrences of a pair of pieces before it becomes one piece
_MAX_WORD_LENGTH = 100  # characters; BERT's own limit: a longer word becomes [UNK]
_MAX_CHINESE_RUN = 64  # characters without a space that are split into words at a time: the search is quadratic


@dataclass(frozen=True, kw_only=True)
class WordPieceSettings:
    """Settings of the tokenizer's training. Text is normalised as BERT does it: lower case, no accents.

    A short text gives fewer tokens than ``vocabulary``. "characters" makes every Chinese character a token, as BERT
    does; "words" also learns tokens of several characters, and then no token has a second form that starts with ##.
    """

    vocabulary: int = 30522
    chinese: Literal["characters", "words"] = "characters"

    def __post_init__(self) -> None:
        if not len(SPECIAL_TOKENS) < self.vocabulary <= _MAX_VOCABULARY:
            raise ConfigError(
                f"vocabulary={self.vocabulary} was given, expected more than the {len(SPECIAL_TOKENS)} special tokens"
                f" and at most {_MAX_VOCABULARY} tokens; try 30522"
            )

    @property
    def prefix(self) -> str:
        return "##" if self.chinese == "characters" else ""


def new_tokenizer(lines: Sequence[str], settings: WordPieceSettings, *, max_tokens: int) -> Any:
    """Trains a tokenizer on these lines; returns it as a transformers tokenizer."""
    trained = train_wordpiece(lines, settings)
    return require("transformers", "text").PreTrainedTokenizerFast(
        tokenizer_object=trained,
        model_max_length=max_tokens,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in SPECIAL_TOKENS.items()},
    )


def load_tokenizer(name: str, *, masks: bool = False) -> Any:
    """Loads the tokenizer of a pretrained model.

    Raises a ConfigError if it was not found, or has no padding token, or with ``masks`` no mask token.
    """
    tokenizer = load_named(name, require("transformers", "text").AutoTokenizer)
    if tokenizer.pad_token_id is None or (masks and tokenizer.mask_token_id is None):
        raise ConfigError(f"pretrained={name!r} has a tokenizer without a {'mask or ' * masks}padding token")
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str], *, max_tokens: int) -> list[list[int]]:
    """Returns the token ids of each text, special tokens included, truncated to ``max_tokens``."""
    rows: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=max_tokens)["input_ids"]
    return rows


def train_wordpiece(lines: Sequence[str], settings: WordPieceSettings) -> Any:
    """Trains a tokenizer that puts a line between ``[CLS]`` and ``[SEP]``; the same lines always give the same ids."""
    tokenizers = require("tokenizers", "text")
    untrained = _new_tokenizer(settings, vocabulary=None)
    # The library numbers "##a", "##b" ... in the order of a hash table, which differs between runs, and breaks ties
    # between pairs by these numbers. As special tokens of a trial training they get their numbers first, in our order.
    special = list(SPECIAL_TOKENS.values())
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=settings.vocabulary,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[*special, *(_continuation_characters(untrained, lines) if settings.prefix else ())],
        continuing_subword_prefix=settings.prefix,
        show_progress=False,
    )
    untrained.train_from_iterator(lines, trainer, length=len(lines))
    if untrained.get_vocab_size() > settings.vocabulary:
        raise ConfigError(
            f"vocabulary={settings.vocabulary} was given, but the special tokens and the characters of the text alone"
            f" are {untrained.get_vocab_size()}; give at least that many, such as 30522"
        )
    # A second tokenizer with the trained vocabulary: in the first one the continuation characters are special tokens,
    # and would not be split further (test_only_the_five_special_tokens_are_special).
    tokenizer = _new_tokenizer(settings, vocabulary=untrained.get_vocab())
    tokenizer.add_special_tokens(special)
    ends = [(SPECIAL_TOKENS[end], tokenizer.token_to_id(SPECIAL_TOKENS[end])) for end in ("sep", "cls")]
    tokenizer.post_processor = tokenizers.processors.BertProcessing(*ends)
    return tokenizer


def _new_tokenizer(settings: WordPieceSettings, *, vocabulary: dict[str, int] | None) -> Any:
    tokenizers = require("tokenizers", "text")
    model = tokenizers.models.WordPiece(
        vocabulary,
        unk_token=SPECIAL_TOKENS["unk"],
        max_input_chars_per_word=_MAX_WORD_LENGTH,
        continuing_subword_prefix=settings.prefix,
    )
    by_character = settings.chinese == "characters"
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True, handle_chinese_chars=by_character)
    words = tokenizers.pre_tokenizers.BertPreTokenizer()
    characters = [token for token in vocabulary or () if len(token) == 1]
    tokenizer.pre_tokenizer = words if by_character else _split_long_runs(words, characters=characters)
    tokenizer.decoder = tokenizers.decoders.WordPiece(settings.prefix)
    return tokenizer


def _split_long_runs(words: Any, *, characters: Sequence[str]) -> Any:
    """Splits long runs, and unknown characters out of them: one unknown character would make the whole run [UNK]."""
    tokenizers = require("tokenizers", "text")
    patterns = [f".{{1,{_MAX_CHINESE_RUN}}}"]
    if characters:
        allowed = "".join(f"\\x{{{ord(character):x}}}" for character in sorted(characters))
        patterns.insert(0, f"[^{allowed}]")
    splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    return tokenizers.pre_tokenizers.Sequence([words, *splits])


def _continuation_characters(tokenizer: Any, lines: Sequence[str]) -> list[str]:
    """``##`` and each character that stands inside a word of the text, sorted."""
    inside: set[str] = set()
    for line in lines:
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(line)):
            inside.update(word[1:])
    return [f"##{character}" for character in sorted(inside)]


class TokenRows:
    """Token rows, concatenated: ``tokens`` [all tokens] int32, ``lengths`` and ``ends`` [rows] int64."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        # int32 halves the memory of a text, and no vocabulary is larger.
        self.tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self.ends = self.lengths.cumsum(0)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: Tensor, *, width: int, pad_id: int) -> tuple[Tensor, Tensor]:
        """Returns the rows of these numbers, padded: [rows, width] int64; and which tokens are real, as bool."""
        real = torch.arange(width) < self.lengths[rows, None]
        starts = self.ends[rows, None] - self.lengths[rows, None]
        # Beyond a row's end stand other rows' tokens, and beyond the last row nothing; both are overwritten by padding.
        index = (starts + torch.arange(width)).clamp(max=len(self.tokens) - 1)
        return self.tokens[index].long().masked_fill(~real, pad_id), real
