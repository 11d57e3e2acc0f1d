"""A transformer as numbers: its sizes, what was counted of its modules, and the tensors that its layers save."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from lockstep.checks import check_divides, check_least
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
    """What autograd saves of a layer, in units of a token's hidden vector or of its feed-forward vector.

    The defaults are those of fused programs (Megatron-LM's, by Korthikanti et al. 2022). A norm or an activation that
    is written as several operations saves more.
    """

    norms: int = 2  # hidden vectors that norms save, in the format of the residual stream
    projections: int = 2  # products that take a norm's output; under autocast each saves its own cast copy
    inner: int = 2  # feed-forward vectors
    masks: int = 2  # bytes of dropout masks per value of a hidden vector


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What the modules of a model really have, where that is more than its sizes say; means over its layers."""

    layer_parameters: float  # parameters of a layer
    layer_matrices: float  # weights that multiply a token in a layer
    pair_flops: float  # operations of a layer's attention per query and key, in a forward pass
    other_parameters: int  # parameters outside the layers, the embeddings and the output layer
    idle_parameters: float  # parameters of a layer that a token does not meet: of the experts that it does not take


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A stack of transformer layers between an embedding and a head over the vocabulary.

    GPT-2, BERT and Llama are such stacks; the fields after ``sequence`` tell them apart. Layers that differ, as in
    mixtures of experts with some layers without, count as equal layers of their mean size.

    Example:
        >>> ModelShape(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024).parameters
        124439808
    """

    name: str = "model"  # in tables and messages
    layers: int
    hidden: int
    heads: int  # of attention
    feed_forward: int = 0  # size of the feed-forward layer, or of an expert; ``4 * hidden`` by default
    vocabulary: int
    sequence: int  # tokens per sequence
    kv_heads: int = 0  # key and value heads (grouped queries); ``heads`` by default
    head_size: int = 0  # width of a head; ``hidden / heads`` by default
    gated: bool = False  # the feed-forward part has three matrices (SwiGLU) instead of two
    biases: bool = True  # matrices have a bias and norms a shift, as in GPT-2 and BERT but not in Llama
    tied: bool = True  # the head uses the embedding's weight
    # rows of learned position and segment embeddings; ``sequence`` by default, 0 with rotary positions
    embedding_rows: int = -1
    experts: int = 0  # feed-forward layers of which each token takes some (a mixture of experts); 0 for one, for all
    active_experts: int = 0  # experts that a token takes; all by default
    shared_feed_forward: int = 0  # size of a feed-forward layer beside the experts, which every token takes
    causal: bool = True  # tokens attend to earlier ones alone, as in language models but not in BERT
    window: int = 0  # tokens that a token attends to at most (sliding window); 0 for all
    windowed: float = 1.0  # fraction of the layers that have the window
    predicted: float = 1.0  # fraction of the tokens that the head predicts; below 1 in masked language models
    tensor_plan: bool = True  # whether ``ls.ParallelStrategy`` knows how tensor ranks divide it
    pipeline_plan: bool = True  # the same for stages
    saved: SavedActivations = field(default_factory=SavedActivations)
    counted: Counted | None = None  # by default all follows from the sizes

    def __post_init__(self) -> None:
        check_least(self, 1, "layers", "hidden", "heads", "vocabulary", "sequence")
        check_least(self, 0, "feed_forward", "kv_heads", "head_size", "experts", "active_experts")
        check_least(self, 0, "shared_feed_forward", "window")
        # Defaults that follow from other sizes are filled in, so that equal models compare equal.
        object.__setattr__(self, "feed_forward", self.feed_forward or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "active_experts", self.active_experts or self.experts)
        if self.embedding_rows < 0:
            object.__setattr__(self, "embedding_rows", self.sequence)
        if not self.head_size:
            check_divides("heads", self.heads, ("hidden", self.hidden))
            object.__setattr__(self, "head_size", self.hidden // self.heads)
        check_divides("kv_heads", self.kv_heads, ("heads", self.heads))
        if self.active_experts > self.experts:
            raise ConfigError(
                f"active_experts={self.active_experts} is more than experts={self.experts}; choose at most that many"
            )

    @property
    def query_width(self) -> int:
        """Size of the queries of a token."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Size of the keys, and of the values, of a token."""
        return self.kv_heads * self.head_size

    @property
    def dense_feed_forward(self) -> int:
        """Size of the feed-forward layer that every token takes."""
        return self.shared_feed_forward if self.experts else self.feed_forward

    @property
    def active_feed_forward(self) -> int:
        """Size of all feed-forward layers that a token takes."""
        return self.dense_feed_forward + self.active_experts * self.feed_forward

    @property
    def sized_matrices(self) -> int:
        """Weights that multiply a token in a layer, by the sizes: four matrices of attention, the feed-forward part."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + self._feed_forward(self.active_feed_forward) + self.hidden * self.experts

    @property
    def layer_matrices(self) -> float:
        """Weights that multiply a token in a layer: of the experts, those that are active."""
        return self.sized_matrices if self.counted is None else self.counted.layer_matrices

    @cached_property
    def layer_parameters(self) -> float:
        """Parameters of one layer: the matrices with all experts, two norms, and the biases."""
        if self.counted is not None:
            return self.counted.layer_parameters
        h, ups, inner = self.hidden, 2 if self.gated else 1, self.dense_feed_forward + self.experts * self.feed_forward
        biases = self.query_width + 2 * self.kv_width + h + ups * inner + h * max(1, self.experts) + 2 * h
        return self.sized_matrices + self.idle_parameters + (biases if self.biases else 0) + 2 * h

    @property
    def idle_parameters(self) -> float:
        """Parameters of the experts of a layer that a token does not take."""
        if self.counted is not None:
            return self.counted.idle_parameters
        return self._feed_forward((self.experts - self.active_experts) * self.feed_forward)

    @property
    def other_parameters(self) -> int:
        """Parameters outside the layers, the embeddings and the output layer: the final norm."""
        return (2 if self.biases else 1) * self.hidden if self.counted is None else self.counted.other_parameters

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; tied ones count once."""
        rows = self.vocabulary * (1 if self.tied else 2) + self.embedding_rows
        return round(self.layers * self.layer_parameters) + rows * self.hidden + self.other_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: all, apart from experts that it does not take."""
        return round(self.parameters - self.layers * self.idle_parameters)

    @property
    def largest_matrix(self) -> int:
        """Parameters of the largest tensor of a layer; the experts of a layer are one."""
        return self.hidden * self.feed_forward * max(1, self.experts * (2 if self.gated else 1))

    @property
    def pair_flops(self) -> float:
        """Operations of a layer's attention per query and key in a forward pass: two products."""
        return 4 * self.query_width if self.counted is None else self.counted.pair_flops

    @property
    def attended(self) -> float:
        """Tokens that a token attends to, averaged over layers; masks of earlier tokens do not count, windows do."""
        window = min(self.window or self.sequence, self.sequence)
        return self.windowed * window + (1 - self.windowed) * self.sequence

    def _feed_forward(self, size: int) -> int:
        return (3 if self.gated else 2) * self.hidden * size

    def with_sequence(self, sequence: int) -> ModelShape:
        """The same model with another sequence length; learned positions grow with it if there was one per token."""
        rows = sequence if self.embedding_rows == self.sequence else self.embedding_rows
        return replace(self, sequence=sequence, embedding_rows=rows)


# What transformers' modules save; a test counts it.
BERT_SAVED = SavedActivations(projections=4)
GPT2_SAVED = SavedActivations(inner=5)  # GPT-2's own approximation of GELU is eight operations
LLAMA_SAVED = SavedActivations(norms=4, projections=5, inner=4, masks=0)
