"""A tokenizer with what masking must know of it, and lines turned to tokens once.

``wordpiece`` trains one; ``mlm.pretrained`` takes the one that came with the weights.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.atomic_files import atomic_write
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.config_checks import one_of

Chinese = Literal["characters", "words"]

PAD, UNKNOWN, START, END, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_FORMAT = "lockstep wordpiece 2"
_MOST_TOKENS = 1_000_000  # the library sets memory aside for all of them at once, and aborts where there is not enough
_LONGEST_WORD = 100  # characters; BERT's own limit, beyond which a word is unknown
_LONGEST_RUN = 64  # characters of Chinese without a space that are cut into words at a time: the search is quadratic


@dataclass(frozen=True, kw_only=True)
class WordPieceSettings:
    """What a tokenizer is trained with; the normalisation is BERT's.

    Args:
        vocabulary: most tokens, special ones included; a short text gives fewer.
        min_frequency: times that a pair of pieces must occur in the text to become one piece.
        lowercase: whether case and accents are dropped (BERT's "uncased").
        chinese: "characters" makes every Chinese character a token, as BERT does; "words" also learns tokens of
            several. It takes no notice of where a word begins, so that no token has a second form with ##.
    """

    vocabulary: int = 30522
    min_frequency: int = 2
    lowercase: bool = True
    chinese: Chinese = "characters"

    def __post_init__(self) -> None:
        one_of("chinese", self.chinese, ("characters", "words"))
        if self.vocabulary <= len(SPECIAL_TOKENS):
            raise ConfigError(
                f"vocabulary={self.vocabulary} was given, expected more than the {len(SPECIAL_TOKENS)} special tokens;"
                " try 30522"
            )
        if self.vocabulary > _MOST_TOKENS:
            raise ConfigError(
                f"vocabulary={self.vocabulary} was given, expected at most {_MOST_TOKENS} tokens; try 30522"
            )
        if self.min_frequency < 0:
            raise ConfigError(f"min_frequency={self.min_frequency} was given, expected 0 or more; try 2")


def cached_wordpiece(lines: Sequence[str], settings: WordPieceSettings, *, cache_dir: Path) -> Any:
    """The tokenizer of these lines and settings: from the cache if it is there and whole, else trained and put there.

    Args:
        lines: the training text.
        settings: what to train with.
        cache_dir: the folder of the cache. If it cannot be written to, a warning says so and nothing is kept.

    Returns:
        A ``tokenizers.Tokenizer`` that puts ``[CLS]`` before and ``[SEP]`` after each line.
    """
    key = cache_key(lines, settings)
    path = cache_dir / f"wordpiece-{key[:16]}.json"
    saved = _read_cache(path, key)
    if saved is not None:
        return require("tokenizers", "text").Tokenizer.from_str(saved)
    tokenizer = train_wordpiece(lines, settings)
    _write_cache(path, key, tokenizer.to_str())
    return tokenizer


def train_wordpiece(lines: Sequence[str], settings: WordPieceSettings) -> Any:
    """Trains a tokenizer (about a second for 1.4 million characters). The same lines give the same ids every time.

    Raises:
        ConfigError: the vocabulary is too small for the characters of the text.
    """
    tokenizers = require("tokenizers", "text")
    blank = _untrained(settings, vocabulary=None)
    # The library numbers "##a", "##b" ... in the order of a hash table that differs from run to run, and settles ties
    # between pairs by those numbers. Named as special tokens in a trial they are numbered first, in our order.
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=settings.vocabulary,
        min_frequency=settings.min_frequency,
        special_tokens=[*SPECIAL_TOKENS, *(_continuations(blank, lines) if settings.chinese == "characters" else ())],
        continuing_subword_prefix=_continued(settings),
        show_progress=False,
    )
    blank.train_from_iterator(lines, trainer, length=len(lines))
    if blank.get_vocab_size() > settings.vocabulary:
        raise ConfigError(
            f"vocabulary={settings.vocabulary} was given, but the special tokens and the characters of the text alone"
            f" are {blank.get_vocab_size()}; give at least that many, such as 30522"
        )
    tokenizer = _untrained(settings, vocabulary=blank.get_vocab())
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    ends = [(token, tokenizer.token_to_id(token)) for token in (END, START)]
    tokenizer.post_processor = tokenizers.processors.BertProcessing(*ends)
    return tokenizer


def _untrained(settings: WordPieceSettings, *, vocabulary: dict[str, int] | None) -> Any:
    tokenizers = require("tokenizers", "text")
    characters = settings.chinese == "characters"
    model = tokenizers.models.WordPiece(
        vocabulary,
        unk_token=UNKNOWN,
        max_input_chars_per_word=_LONGEST_WORD,
        continuing_subword_prefix=_continued(settings),
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(
        lowercase=settings.lowercase, handle_chinese_chars=characters
    )
    words = tokenizers.pre_tokenizers.BertPreTokenizer()
    known = [token for token in vocabulary or () if len(token) == 1]
    tokenizer.pre_tokenizer = words if characters else _runs_cut(words, known=known)
    tokenizer.decoder = tokenizers.decoders.WordPiece(_continued(settings))
    return tokenizer


def _continued(settings: WordPieceSettings) -> str:
    """What stands before a piece inside a word."""
    return "##" if settings.chinese == "characters" else ""


def _runs_cut(words: Any, *, known: Sequence[str]) -> Any:
    """Cuts runs that are too long, and out of them characters that are not known: else the whole run were unknown."""
    tokenizers = require("tokenizers", "text")
    patterns = [f".{{1,{_LONGEST_RUN}}}"]
    if known:
        listed = "".join(f"\\x{{{ord(character):x}}}" for character in sorted(known))
        patterns.insert(0, f"[^{listed}]")
    cuts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    return tokenizers.pre_tokenizers.Sequence([words, *cuts])


def _continuations(tokenizer: Any, lines: Sequence[str]) -> list[str]:
    """``##`` and each character that stands inside a word of the text, sorted."""
    inside: set[str] = set()
    for line in lines:
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(line)):
            inside.update(word[1:])
    return [f"##{character}" for character in sorted(inside)]


def cache_key(lines: Sequence[str], settings: WordPieceSettings) -> str:
    """A hash of all that the tokenizer depends on: text, settings, and the version of the library that trains it."""
    version = require("tokenizers", "text").__version__
    digest = hashlib.sha256(json.dumps([_FORMAT, version, asdict(settings)]).encode())
    for line in lines:
        digest.update(b"\0" + line.encode())
    return digest.hexdigest()


def _read_cache(path: Path, key: str) -> str | None:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, unreadable, torn or not JSON: build it again
        return None
    if not isinstance(saved, dict) or not isinstance(tokenizer := saved.get("tokenizer"), str):
        return None
    return tokenizer if saved == _sealed(key, tokenizer) else None


def _write_cache(path: Path, key: str, tokenizer: str) -> None:
    try:
        atomic_write(path, json.dumps(_sealed(key, tokenizer)))
    except OSError as error:
        warnings.warn(
            f"the tokenizer cannot be kept in {str(path.parent)!r} ({error.strerror}) and will be trained again next"
            " time; give a folder that can be written to as cache_dir",
            stacklevel=3,
        )


def _sealed(key: str, tokenizer: str) -> dict[str, str]:
    return {
        "format": _FORMAT,
        "key": key,
        "sha256": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "tokenizer": tokenizer,
    }


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
