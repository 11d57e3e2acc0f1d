"""The workloads in Keras layers, shared by the programs on TensorFlow and on JAX: the same work as the torch modules.

Whoever imports this has chosen Keras's backend before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

_PIXELS, _CLASSES = 96, 2
_CLASSIFIER_DROPOUT = 0.8  # transformers' default for MobileNetV2
_TOKENS, _MASKED, _VOCABULARY, _POSITIONS, _KINDS = 128, 19, 30522, 512, 2
_LAYERS, _HIDDEN, _HEADS, _FEED_FORWARD, _DROPOUT, _EPSILON = 2, 128, 2, 512, 0.1, 1e-12
_INITIAL = keras.initializers.RandomNormal(stddev=0.02)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A workload in Keras."""

    model: keras.Model  # from inputs to logits
    batches: list[tuple[Any, np.ndarray]]  # the different global batches as ``(x, y)``, as ``model`` takes them

    @property
    def trained(self) -> int:
        return sum(int(np.prod(variable.shape)) for variable in self.model.trainable_variables)


def make_work(workload: str, batches: list[dict[str, np.ndarray]]) -> Work:
    """The model of a workload, of random weights, and its batches."""
    if workload == "mobilenetv2":
        return Work(model=_mobilenet(), batches=[(_laid_out(batch["x"]), batch["y"]) for batch in batches])
    return Work(model=_bert(), batches=[_masked(batch) for batch in batches])


def _mobilenet() -> keras.Model:
    shape = (_PIXELS, _PIXELS, 3)
    body = keras.applications.MobileNetV2(input_shape=shape, include_top=False, weights=None, pooling="avg")
    features = layers.Dropout(_CLASSIFIER_DROPOUT)(body.output)
    return keras.Model(body.input, layers.Dense(_CLASSES)(features))


def _laid_out(images: np.ndarray) -> np.ndarray:
    """Images [rows, 3, pixels, pixels] as [rows, pixels, pixels, 3]."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1))


def _masked(batch: dict[str, np.ndarray]) -> tuple[Any, np.ndarray]:
    """All tokens are real ones, so no mask is needed: transformers finds that out and drops it as well."""
    x = {name: batch[name].astype("int32") for name in ("input_ids", "masked_positions")}
    return x, batch["y"].astype("int32")


@keras.saving.register_keras_serializable()
class _Embeddings(layers.Layer):
    """Words, places and kinds added up, normalised; its word vectors are the output's weights too."""

    def build(self, shape: Any) -> None:
        self.words = self.add_weight(name="words", shape=(_VOCABULARY, _HIDDEN), initializer=_INITIAL)
        self.places = self.add_weight(name="places", shape=(_POSITIONS, _HIDDEN), initializer=_INITIAL)
        self.kinds = self.add_weight(name="kinds", shape=(_KINDS, _HIDDEN), initializer=_INITIAL)
        self.bias = self.add_weight(name="bias", shape=(_VOCABULARY,), initializer="zeros")

    def call(self, tokens: Any) -> Any:
        return ops.take(self.words, tokens, axis=0) + self.places[:_TOKENS] + self.kinds[0]

    def logits(self, hidden: Any) -> Any:
        return ops.matmul(hidden, ops.transpose(self.words)) + self.bias


class _Vocabulary(layers.Layer):
    """[rows, slots, hidden] -> logits over the vocabulary, by the tied word vectors."""

    def __init__(self, embeddings: _Embeddings) -> None:
        super().__init__()
        self._embeddings = embeddings

    def call(self, hidden: Any) -> Any:
        return self._embeddings.logits(hidden)


class _Pick(layers.Layer):
    """The masked positions of each row."""

    def call(self, hidden: Any, positions: Any) -> Any:
        return ops.take_along_axis(hidden, positions[..., None], axis=1)


def _dense(width: int, activation: Any = None) -> layers.Dense:
    return layers.Dense(width, activation=activation, kernel_initializer=_INITIAL)


def _normalised(hidden: Any) -> Any:
    return layers.LayerNormalization(epsilon=_EPSILON)(hidden)


def _encoder_layer(hidden: Any) -> Any:
    attention = layers.MultiHeadAttention(
        num_heads=_HEADS, key_dim=_HIDDEN // _HEADS, dropout=_DROPOUT, kernel_initializer=_INITIAL
    )
    hidden = _normalised(hidden + layers.Dropout(_DROPOUT)(attention(hidden, hidden)))
    wide = _dense(_FEED_FORWARD, _gelu)(hidden)
    return _normalised(hidden + layers.Dropout(_DROPOUT)(_dense(_HIDDEN)(wide)))


def _gelu(values: Any) -> Any:
    return keras.activations.gelu(values, approximate=False)


def _bert() -> keras.Model:
    tokens = keras.Input((_TOKENS,), dtype="int32", name="input_ids")
    positions = keras.Input((_MASKED,), dtype="int32", name="masked_positions")
    embeddings = _Embeddings()
    hidden = layers.Dropout(_DROPOUT)(_normalised(embeddings(tokens)))
    for _ in range(_LAYERS):
        hidden = _encoder_layer(hidden)
    picked = _normalised(_dense(_HIDDEN, _gelu)(_Pick()(hidden, positions)))
    return keras.Model({"input_ids": tokens, "masked_positions": positions}, _Vocabulary(embeddings)(picked))
