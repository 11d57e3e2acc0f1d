"""The recipe ``mlm``: a small BERT learns to fill in masked words.

``mlm()`` returns the whole configuration; ``build`` turns it into a module, data and an optimizer, and ``run``
trains it. The defaults are the published ones, but for what is said at each field.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.recipes.config_checks import at_least, between, one_of, positive
from lockstep.recipes.mlm.batches import MaskingRule
from lockstep.recipes.mlm.model import BertShape
from lockstep.recipes.text.corpus import MINIMUM_CHARACTERS
from lockstep.recipes.text.tokenizer import WordPieceSettings


@dataclass(frozen=True, kw_only=True)
class MlmConfig:
    """Everything that a run of the recipe depends on, but the devices.

    Args:
        text: folder with *.train.tokens, *.valid.tokens and *.test.tokens; without it, the prose of Python itself.
        min_characters: lines of this many characters or fewer are left out.
        pretrained: folder or Hugging Face name of a BERT to begin with; it brings its own size and tokenizer.
        layers: encoder layers.
        hidden: width of a token's vector.
        heads: attention heads; divides hidden.
        feed_forward: width inside a layer's feed-forward part.
        vocabulary: tokens that have an embedding; the tokenizer finds as many in the text, or fewer.
        dropout: probability, for activations and attention weights.
        attention: implementation of attention in transformers.
        sequence_length: longest line, in tokens; the rest of a longer one is cut off.
        padding: pad a batch to its longest line, or every batch to the full sequence_length.
        shuffle_buffer: lines that are shuffled together, as by tf.data; 0 shuffles the whole text.
        length_window: global batches whose lines are sorted by length together; 1 does not sort.
        mask_fraction: part of a line's tokens to predict.
        max_masked: most tokens to predict in one line.
        mask_share: part of the tokens to predict that the model sees as [MASK].
        random_share: part of them that it sees as a random token; the rest it sees as they are.
        batch_size: lines in a global batch.
        epochs: passes over the training text.
        learning_rate: at the first step, falling linearly to 0 over all steps; by default 1e-3 from random weights
            and the published 1e-4 from pretrained ones.
        patience: epochs without a better validation loss before training stops; 0 never stops early.
        precision: of the forward pass.
        gradient_checkpointing: keep no activations inside layers, and compute them again: less memory, more time.
        accumulate: global batches per update.
        clip_norm: largest global norm of the gradients; by default they are not clipped.
        seed: of weights, order, masks and dropout.
        cache_dir: folder that keeps the trained tokenizer.
    """

    text: Path | None = None
    min_characters: int = MINIMUM_CHARACTERS
    pretrained: str | None = None
    layers: int = 2
    hidden: int = 128
    heads: int = 2
    feed_forward: int = 512
    vocabulary: int = 30522
    dropout: float = 0.1
    attention: Literal["sdpa", "eager"] = "sdpa"
    sequence_length: int = 512
    padding: Literal["longest", "full"] = "longest"
    shuffle_buffer: int = 0
    length_window: int = 64
    mask_fraction: float = 0.15
    max_masked: int = 96
    mask_share: float = 0.8
    random_share: float = 0.1
    batch_size: int = 128
    epochs: int = 5
    learning_rate: float | None = None
    patience: int = 2
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_checkpointing: bool = False
    accumulate: int = 1
    clip_norm: float | None = None
    seed: int = 0
    cache_dir: Path = Path("~/.cache/lockstep")

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "accumulate", "length_window"):
            at_least(name, getattr(self, name), 1)
        at_least("sequence_length", self.sequence_length, 3)  # [CLS], one token, [SEP]
        for name in ("patience", "min_characters", "shuffle_buffer"):
            at_least(name, getattr(self, name), 0)
        between("seed", self.seed, 0, 2**32 - 1)  # torch and the data's generators take no more than 64 bits
        one_of("padding", self.padding, ("longest", "full"))
        one_of("attention", self.attention, ("sdpa", "eager"))
        one_of("precision", self.precision, ("fp32", "bf16", "fp16"))
        for name in ("learning_rate", "clip_norm"):
            positive(name, getattr(self, name))
        # These hold the rest of the rules; making them here makes a bad value fail now rather than at its use.
        _ = self.shape, self.masking, self.tokenizer

    @property
    def first_rate(self) -> float:
        """The learning rate of the first step.

        From random weights the published 1e-4 learns only how frequent words are: after five epochs of the embedded
        text validation had loss 7.52 and accuracy 0.052, at 1e-3 5.98 and 0.079, at 3e-3 6.09 and 0.049 (9,472 tokens).
        """
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-3 if self.pretrained is None else 1e-4

    @property
    def shape(self) -> BertShape:
        """The size of a model of random weights."""
        return BertShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            feed_forward=self.feed_forward,
            vocabulary=self.vocabulary,
            positions=self.sequence_length,
            dropout=self.dropout,
        )

    @property
    def masking(self) -> MaskingRule:
        """How tokens are masked."""
        return MaskingRule(
            fraction=self.mask_fraction,
            max_masked=self.max_masked,
            mask_share=self.mask_share,
            random_share=self.random_share,
        )

    @property
    def tokenizer(self) -> WordPieceSettings:
        """What a tokenizer is trained with."""
        return WordPieceSettings(vocabulary=self.vocabulary)


def mlm(*, text: Path | None = None, pretrained: str | None = None) -> MlmConfig:
    """The recipe: bert_tiny at batch 128 for five epochs, with nothing left to fill in.

    Change a setting with ``dataclasses.replace``.

    Args:
        text: folder in the layout of wikitext; None is the embedded text.
        pretrained: folder or name of a BERT to begin with; None is random weights.

    Example:
        >>> mlm().batch_size, mlm().learning_rate, mlm(pretrained="bert-tiny").learning_rate
        (128, 0.001, 0.0001)
    """
    config = MlmConfig(text=text, pretrained=pretrained)
    return dataclasses.replace(config, learning_rate=config.first_rate)
