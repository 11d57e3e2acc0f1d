"""What a device holds: weights, gradients, optimizer state, activations. Formulas only; nothing is allocated.

Activations are those of Korthikanti et al. 2022 (arXiv 2205.05198), written for any width of the feed-forward part, any
number of key heads, any bytes a value and what the layer's program keeps: their s b h (10 + 24/t + 5 a s/(h t)) comes
out for Megatron-LM's GPT in 16 bits.
State is that of ZeRO (arXiv 1910.02054), stage 1 where the optimizer is sharded, stage 3 where the weights are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.plan.layout import Layout
from lockstep.plan.settings import Software
from lockstep.plan.shape import ModelShape

# Of Adam's, which computes with the square root of a moment and its quotient.
_TEMPORARIES = 2


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device.

    Args:
        weights: of the parameters, and of what autocast casts them to.
        gradients: of their gradients.
        optimizer: of the optimizer's state, with the float32 weights where the others are shorter.
        activations: kept from forward to backward, at the worst moment of a step.
        beside: what exists at that moment too: gradients of earlier microbatches, and weights that are borrowed.
        exchange: what there is beside the gradients when the last of them travel: their copies, or borrowed weights.
        update: what the optimizer computes in between.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    beside: float = 0.0
    exchange: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """At the worst moment: where a microbatch's backward pass begins, where it ends, or where weights change."""
        begins = self.activations + self.beside
        return self.weights + self.optimizer + max(begins, self.gradients + max(self.exchange, self.update))


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes that one layer keeps of one microbatch on one device.

    Args:
        replicated: what every tensor rank keeps, or its part along the sequence.
        split: what tensor ranks share.
        scores: of attention's scores, softmax and dropout; nothing where attention is fused.
        input: of the layer's input alone.
    """

    replicated: float
    split: float
    scores: float
    input: float

    @property
    def all(self) -> float:
        return self.replicated + self.split + self.scores


def layer_activations(shape: ModelShape, layout: Layout, software: Software) -> LayerActivations:
    """What a layer keeps of a microbatch where nothing is computed again (Korthikanti et al., equations 1, 2 and 4)."""
    precision, kept = software.precision, shape.kept
    value = precision.activation
    tokens = shape.sequence * layout.rows
    along = layout.tensor if layout.sequence_parallel else 1
    # Without autocast the products that take a norm's output share it: one for attention, one for feed-forward.
    inputs = kept.projections if precision.cast else 2
    width = kept.norms * precision.residual + inputs * value + kept.masks
    replicated = tokens * shape.hidden * width / along
    inner = 2 * shape.hidden + 2 * shape.kv_width + kept.inner * shape.feed_forward
    split = tokens * value * inner / layout.tensor
    # Softmax and dropout give a value each, and a mask of a byte.
    scores = 0.0 if software.fused_attention else shape.heads * shape.sequence * tokens * (2 * value + 1)
    start = tokens * shape.hidden * precision.residual / along
    return LayerActivations(replicated=replicated, split=split, scores=scores / layout.tensor, input=start)


def in_flight(layout: Layout) -> float:
    """Microbatches whose activations the first stage holds at once; a fraction where its parts hold unequally many."""
    stages, batches = layout.pipeline, layout.microbatches
    if layout.schedule == "gpipe":
        return batches
    if layout.chunks > 1:
        # Korthikanti et al., section 4.2.3: L (1 + (p - 1)/(p m)) layers in place of L.
        return min(batches, stages + (stages - 1) / layout.chunks)
    return min(batches, stages)


def stage_parameters(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Parameters on a device of the first stage and of the last; of the only one, twice the same."""
    layers = shape.layers / layout.pipeline * shape.layer_parameters / layout.tensor
    words = shape.vocabulary * shape.hidden / layout.tensor
    first = layers + words + shape.embedding_rows * shape.hidden
    norm = shape.head_parameters - (0 if shape.tied else shape.vocabulary * shape.hidden)
    if layout.pipeline == 1:
        only = first + norm + (0 if shape.tied else words)
        return only, only
    return first, layers + words + norm


def estimate_memory(shape: ModelShape, layout: Layout, software: Software) -> Memory:
    """What the fullest device holds, of the first stage or the last. Instant and pure.

    The first stage keeps most microbatches in flight; the last holds the logits, in the activations' format, and in
    float32 their logarithms and the gradients of both.
    """
    layer = layer_activations(shape, layout, software)
    if layout.recompute == "full":
        kept, working = layer.input, layer.all
    else:
        kept = layer.all if layout.recompute == "none" else layer.replicated + layer.split
        working = 0.0 if layout.recompute == "none" else layer.scores
    layers = shape.layers / layout.pipeline
    tokens = shape.sequence * layout.rows * shape.predicted
    logits = tokens * shape.vocabulary / layout.tensor * (software.precision.activation + 12)
    first, last = (
        _with_state(shape, parameters, activations, layout, software)
        for parameters, activations in zip(
            stage_parameters(shape, layout),
            (kept * layers * in_flight(layout) + working, kept * layers + working + logits),
            strict=True,
        )
    )
    if layout.pipeline == 1:
        only = stage_parameters(shape, layout)[0]
        return _with_state(shape, only, kept * layers + working + logits, layout, software)
    return max(first, last, key=lambda memory: memory.total)


def _with_state(shape: ModelShape, parameters: float, activations: float, layout: Layout, software: Software) -> Memory:
    precision, data = software.precision, layout.data
    weights, gradients = parameters * (precision.weight + precision.cast), parameters * precision.gradient
    optimizer = parameters * precision.optimizer
    if layout.shard_parameters:
        return _sharded(shape, weights / data, gradients / data, optimizer / data, activations, layout, software)
    # Gradients travel in copies.
    exchange = gradients if data > 1 else 0.0
    share = parameters / (data if layout.shard_optimizer else 1)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer / (data if layout.shard_optimizer else 1),
        activations=activations,
        # With the largest gradient of this microbatch, before it is added.
        beside=gradients + precision.gradient * _largest(shape, layout) if layout.microbatches > 1 else 0.0,
        exchange=exchange,
        update=_TEMPORARIES * precision.gradient * min(share, _largest(shape, layout)),
    )


def _sharded(
    shape: ModelShape,
    weights: float,
    gradients: float,
    optimizer: float,
    activations: float,
    layout: Layout,
    software: Software,
) -> Memory:
    """Where weights are shared: a layer's are borrowed while it computes, and those outside the layers all the time.

    In a pipeline the latter are borrowed one after another too; but zero-bubble keeps a stage's weights, and its whole
    gradients, from its first microbatch to its last.
    """
    precision = software.precision
    layer, of_weights = shape.layer_parameters / layout.tensor, precision.weight + precision.cast
    outside = stage_parameters(replace(shape, layers=layout.pipeline), layout)[0] - layer
    at_once, at_the_end = outside + layer, outside
    if layout.pipeline > 1:
        at_once = at_the_end = max(outside, layer)
    # They come in one tensor, and are copied out of it; of their gradients there is one more, to be scattered.
    borrowed = 2 * at_once * of_weights + (gradients if layout.microbatches > 1 else 0.0)
    given_back = at_the_end * (of_weights + 2 * precision.gradient)
    if layout.pipeline > 1 and layout.schedule == "zero_bubble":
        borrowed = layout.data * (weights + gradients)
        given_back = borrowed + at_once * precision.gradient
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        beside=borrowed,
        exchange=given_back,
        update=_TEMPORARIES * precision.gradient * _largest(shape, layout) / layout.data,
    )


def _largest(shape: ModelShape, layout: Layout) -> float:
    """Parameters in the largest tensor of a device."""
    return max(shape.vocabulary, shape.feed_forward) * shape.hidden / layout.tensor
