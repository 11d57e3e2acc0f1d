"""The size of a transformer as numbers: its parameters, whatever the device. Nothing here computes a time."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the program of a layer keeps for its backward pass, counted in values as wide as a token or its inner part.

    The defaults are those of fused programs (Megatron-LM's, by Korthikanti et al. 2022). Where a norm or an activation
    is written as several operations, each keeps its own values.

    Args:
        norms: values as wide as a token that norms keep, in the format of the residual stream.
        projections: products that take a norm's output; under autocast each keeps a copy of its own.
        inner: values as wide as the feed-forward part.
        masks: bytes of dropout masks for each value of a token.
    """

    norms: int = 2
    projections: int = 2
    inner: int = 2
    masks: int = 2


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A stack of equal transformer layers between an embedding and a head that is as wide as the vocabulary.

    GPT-2, BERT and Llama are such stacks; what differs between them are the fields after ``sequence``.

    Args:
        name: what it is called in tables and messages.
        layers: transformer layers.
        hidden: width of a token's vector.
        heads: attention heads; divides ``hidden``.
        feed_forward: width inside a layer's feed-forward part; 4 times ``hidden`` by default.
        vocabulary: tokens that have an embedding.
        sequence: tokens in a line.
        kv_heads: heads of keys and values, where they are fewer (grouped queries); ``heads`` by default.
        gated: the feed-forward part has three matrices (SwiGLU) in place of two.
        biases: matrices have a bias and norms a shift, as in GPT-2 and BERT; Llama has neither.
        tied: the head multiplies with the word embeddings in place of a matrix of its own.
        embedding_rows: rows of learned embeddings beside the words', of positions and segments; ``sequence`` by
            default, 0 for rotary positions.
        predicted: share of the tokens that the head is asked about; 1 but for masked language models.
        kept: what a layer keeps for its backward pass.

    Example:
        >>> ModelShape(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024).parameters
        124439808
    """

    name: str = "model"
    layers: int
    hidden: int
    heads: int
    feed_forward: int = 0
    vocabulary: int
    sequence: int
    kv_heads: int = 0
    gated: bool = False
    biases: bool = True
    tied: bool = True
    embedding_rows: int = -1
    predicted: float = 1.0
    kept: Kept = field(default_factory=Kept)

    def __post_init__(self) -> None:
        # A size that follows from others is written in once, so that two equal models compare equal.
        for name, value in (
            ("feed_forward", 4 * self.hidden),
            ("kv_heads", self.heads),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.embedding_rows < 0:
            object.__setattr__(self, "embedding_rows", self.sequence)
        for name in ("layers", "hidden", "heads", "feed_forward", "vocabulary", "sequence", "kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} was given, expected at least 1; see ModelShape")
        self._check_heads()
        if not 0 < self.predicted <= 1:
            raise ConfigError(f"predicted={self.predicted} was given, expected a share above 0 and at most 1")

    def _check_heads(self) -> None:
        for name, whole, part in (("heads", "hidden", self.heads), ("kv_heads", "heads", self.kv_heads)):
            size = getattr(self, whole)
            if size % part:
                raise ConfigError(f"{name}={part} does not divide {whole}={size}; choose {one_of(divisors(size))}")

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_width

    @cached_property
    def layer_parameters(self) -> int:
        """Of one layer: two norms, four matrices of attention, two or three of the feed-forward part, their biases."""
        h, f = self.hidden, self.feed_forward
        attention = 2 * h * h + 2 * h * self.kv_width
        matrices = attention + (3 if self.gated else 2) * h * f
        ups = 2 if self.gated else 1
        shifts = h + 2 * self.kv_width + h + ups * f + h + 2 * h if self.biases else 0
        return matrices + shifts + 2 * h

    @property
    def embedding_parameters(self) -> int:
        """Of the embeddings before the first layer."""
        return (self.vocabulary + self.embedding_rows) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the last norm and the head's own matrix; a tied head has none."""
        norm = (2 if self.biases else 1) * self.hidden
        return norm + (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def parameters(self) -> int:
        """Of the whole model, each tied one counted once."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    def with_sequence(self, sequence: int) -> ModelShape:
        """The same model on lines of another length; learned positions grow with it where they were as many."""
        rows = sequence if self.embedding_rows == self.sequence else self.embedding_rows
        return replace(self, sequence=sequence, embedding_rows=rows)


# What transformers' modules keep, counted in them: a test counts again.
BERT_KEPT = Kept(projections=4)
# GPT-2's own approximation of GELU is eight operations.
GPT2_KEPT = Kept(inner=5)
LLAMA_KEPT = Kept(norms=4, projections=5, inner=4, masks=0)


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def one_of(choices: list[int], most: int = 12) -> str:
    """``1, 2, 4 or 8``; the middle of a long list is left out."""
    if len(choices) > most:
        return f"{', '.join(map(str, choices[: most - 1]))} ... or {choices[-1]}"
    if len(choices) == 1:
        return str(choices[0])
    return f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"


def size_fields() -> tuple[str, ...]:
    """The names of the fields that are whole numbers or switches, for messages."""
    return tuple(entry.name for entry in fields(ModelShape) if entry.name not in ("name", "predicted", "kept"))
