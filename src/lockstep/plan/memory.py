"""What a device holds: weights, gradients, optimizer state, activations. Formulas only; nothing is allocated.

Activations are those of Korthikanti et al. 2022 (arXiv 2205.05198), written for any width of the feed-forward part, any
number of key heads, any bytes a value and what the layer's program keeps: their s b h (10 + 24/t + 5 a s/(h t)) comes
out for Megatron-LM's GPT in 16 bits.
State is that of ZeRO (arXiv 1910.02054), stage 1 where the optimizer is sharded, stage 3 where the weights are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lockstep.plan.layout import Layout, PipelineWorker, pipeline_workers
from lockstep.plan.shapes import ModelShape
from lockstep.plan.software import Software

# Bytes that a score has beside its own: the loss is computed in float32, its logarithm and both their gradients; where
# tensor ranks divide the words, its probability and its gradient.
_LOSS, _DIVIDED_LOSS = 12, 8
_KEPT_LOSS = 4


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes that one layer keeps of one microbatch on one device.

    Args:
        replicated: what every tensor rank keeps, or its part along the sequence.
        split: what tensor ranks share.
        scores: of attention's scores, softmax and dropout; nothing where attention is fused.
        input: of the layer's input alone.
        results: of the gradients of its products' results, which wait where weights have their gradients later.
    """

    replicated: float
    split: float
    scores: float
    input: float
    results: float

    @property
    def all(self) -> float:
        return self.replicated + self.split + self.scores


def layer_activations(shape: ModelShape, layout: Layout, software: Software) -> LayerActivations:
    """What a layer keeps of a microbatch where nothing is computed again (Korthikanti et al., equations 1, 2 and 4)."""
    along = layout.tensor if layout.sequence_parallel else 1
    return _layer_activations(shape, layout.rows, layout.tensor, along, software)


@lru_cache(maxsize=4096)
def _layer_activations(shape: ModelShape, rows: int, tensor: int, along: int, software: Software) -> LayerActivations:
    precision, kept = software.precision, shape.kept
    value = precision.activation
    tokens = shape.sequence * rows
    # Without autocast the products that take a norm's output share it: one for attention, one for feed-forward.
    inputs = (kept.projections if precision.cast else 2) * value
    norms = kept.norms * precision.residual + kept.masks
    whole = inputs if software.keeps_gathered else inputs / along
    inner = 2 * shape.hidden + 2 * shape.kv_width + kept.inner * shape.feed_forward
    # Softmax and dropout give a value each, and a mask of a byte.
    scores = 0.0 if software.fused_attention else shape.heads * shape.sequence * tokens * (2 * value + 1)
    divided = shape.hidden + 2 * shape.kv_width + (2 if shape.gated else 1) * shape.feed_forward
    return LayerActivations(
        replicated=tokens * shape.hidden * (norms / along + whole),
        split=tokens * value * inner / tensor,
        scores=scores / tensor,
        input=tokens * shape.hidden * precision.residual / along,
        results=tokens * (value * divided / tensor + 4 * precision.residual * shape.hidden / along),
    )


def begins(
    shape: ModelShape,
    layout: Layout,
    software: Software,
    worker: PipelineWorker,
    layer: LayerActivations,
    gradients: float,
) -> tuple[float, float]:
    """Activations, and what is there beside them, at the worse of the moments where a backward pass begins.

    Args:
        shape: the model.
        layout: how it is divided.
        software: what its program does.
        worker: which worker of the pipeline.
        layer: what one of its layers keeps.
        gradients: bytes of its gradients, or its share of them.
    """
    held, working, results = _held(shape, layout, software, worker, layer)
    earlier = gradients if layout.microbatches > 1 else 0.0
    passing, at_the_head = _borrowed(shape, layout, software, worker)
    if layout.shard_parameters and layout.divides_backward:
        earlier = 0.0  # they are among what is borrowed
    elif not layout.shard_parameters and earlier:
        passing = software.precision.gradient * shape.feed_forward * shape.hidden / layout.tensor  # the largest is made
    moments = [(held + working + results, earlier + passing)]
    if worker.head:
        moments += _at_the_head(shape, layout, software, worker, held + working, (earlier, at_the_head))
    return max(moments, key=sum)


def ends(
    shape: ModelShape,
    layout: Layout,
    software: Software,
    worker: PipelineWorker,
    layer: LayerActivations,
    gradients: float,
) -> float:
    """Bytes of activations and gradients where a microbatch's backward pass comes to the embeddings.

    Tensor ranks make the gradient of all words, and cut their own out of it.
    """
    if not worker.words:
        return 0.0
    kept = _kept(layer, layout)[0]
    own = software.precision.gradient * shape.vocabulary * shape.hidden / layout.tensor
    # Beside the gradient that is there already: of earlier microbatches, or of the head that shares the weight.
    another = own if layout.microbatches > 1 or (worker.head and shape.tied) else 0.0
    whole = own * layout.tensor if layout.tensor > 1 else 0.0
    borrowed = 0.0
    if layout.shard_parameters and layout.divides_backward:
        gradients, borrowed = 0.0, _borrowed(shape, layout, software, worker)[0]
    elif layout.shard_parameters:
        borrowed = own / software.precision.gradient * _of_weights(software) + own  # and their gradient in one tensor
    return kept * (worker.held - worker.first) + gradients + another + whole + borrowed


def _borrowed(shape: ModelShape, layout: Layout, software: Software, worker: PipelineWorker) -> tuple[float, float]:
    """Of shared weights, those that a worker has whole while it passes through its layers, and at the head.

    They come in one tensor, and are copied out of it. In a pipeline a part is borrowed at a time, but where backward
    passes are divided all weights and gradients are whole from the first microbatch to the last.
    """
    if not layout.shard_parameters:
        return 0.0, 0.0
    if layout.divides_backward:
        whole = worker_parameters(shape, layout, worker) * (_of_weights(software) + software.precision.gradient)
        return whole, whole
    layer = shape.layer_parameters / layout.tensor * _of_weights(software)
    words = shape.vocabulary * shape.hidden / layout.tensor * _of_weights(software)
    if layout.pipeline > 1:
        return 2 * layer, words
    return words + 2 * layer, words + layer  # the last layer is fetched ahead


def worker_parameters(shape: ModelShape, layout: Layout, worker: PipelineWorker) -> float:
    """Parameters of a worker's layers and ends on one tensor rank; a tied weight that is there at both ends once."""
    words = shape.vocabulary * shape.hidden / layout.tensor
    total = worker.layers * shape.layer_parameters / layout.tensor
    if worker.words:
        total += words + shape.embedding_rows * shape.hidden
    if worker.head:
        norm = shape.head_parameters - (0 if shape.tied else shape.vocabulary * shape.hidden)
        total += norm + (0 if shape.tied and worker.words else words)
    return total


def _of_weights(software: Software) -> int:
    """Bytes of a weight, and of its cast copy."""
    return software.precision.weight + software.precision.cast


def _held(
    shape: ModelShape, layout: Layout, software: Software, worker: PipelineWorker, layer: LayerActivations
) -> tuple[float, float, float]:
    """Activations of all microbatches under way; what is at work besides; gradients that a divided pass has made."""
    kept, working = _kept(layer, layout)
    results = layer.results * worker.layers / worker.parts
    waiting = results * worker.pending
    if worker.head:
        waiting += _scores(shape, layout) * software.precision.activation * worker.pending
    return kept * worker.held + waiting, working, results if layout.divides_backward else 0.0


def _kept(layer: LayerActivations, layout: Layout) -> tuple[float, float]:
    """Of one layer and microbatch: what is kept, and what exists for a moment where it is computed again."""
    if layout.recompute == "full":
        return layer.input, layer.all
    if layout.recompute == "selective":
        return layer.replicated + layer.split, layer.scores
    return layer.all, 0.0


def _at_the_head(
    shape: ModelShape,
    layout: Layout,
    software: Software,
    worker: PipelineWorker,
    held: float,
    beside: tuple[float, float],
) -> list[tuple[float, float]]:
    """Where the loss has its gradient, and where the head's own is made.

    ``beside`` are the gradients of earlier microbatches, and the weights that are borrowed at the head.
    """
    precision, scores = software.precision, _scores(shape, layout)
    value = precision.activation
    losses = held + scores * worker.losses * (value + _KEPT_LOSS)
    own = shape.vocabulary * shape.hidden / layout.tensor
    made = precision.gradient * own * (2 if software.turned_gradients and layout.tensor == 1 else 1)
    always = beside[1] if layout.divides_backward else 0.0
    kept = _KEPT_LOSS if layout.divides_backward else 0
    return [
        (losses + scores * (value + (_DIVIDED_LOSS if layout.tensor > 1 else _LOSS)), beside[0] + always),
        (losses + scores * (2 * value + kept), sum(beside) + made),
    ]


def _scores(shape: ModelShape, layout: Layout) -> float:
    """How many scores of words a device has of one microbatch."""
    return shape.sequence * layout.rows * shape.predicted * shape.vocabulary / layout.tensor


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
        beside: what exists at that moment too: gradients of earlier microbatches, one that is being made, and weights
            that are borrowed.
        ending: what there is where a microbatch's backward pass comes to the embeddings: activations of the others,
            gradients, and those of the words as they are made.
        exchange: what there is beside the gradients when the last of them travel: their copies, or borrowed weights.
        update: what the optimizer computes in between.
        buffers: where hidden states and their gradients arrive from other stages, for every microbatch.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    beside: float = 0.0
    ending: float = 0.0
    exchange: float = 0.0
    update: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """At the worst moment: a microbatch's backward pass begins, or ends, or weights change."""
        changing = self.gradients + max(self.exchange, self.update)
        return self.weights + self.optimizer + self.buffers + max(self.activations + self.beside, self.ending, changing)


def estimate_memory(shape: ModelShape, layout: Layout, software: Software) -> Memory:
    """What the fullest device holds. Instant and pure."""
    workers = pipeline_workers(shape, layout, balanced=software.balanced_stages)
    if len(workers) == 1:
        return worker_memory(shape, layout, software, workers[0])
    found = (worker_memory(shape, layout, software, worker) for worker in workers)
    return max(found, key=lambda memory: memory.total)


def worker_memory(shape: ModelShape, layout: Layout, software: Software, worker: PipelineWorker) -> Memory:
    """What one worker of a pipeline holds, or the only one."""
    precision, data = software.precision, layout.data
    parameters = worker_parameters(shape, layout, worker)
    share = data if layout.shard_parameters else 1
    gradients = parameters * precision.gradient / share
    layer = layer_activations(shape, layout, software)
    activations, beside = begins(shape, layout, software, worker, layer, gradients)
    return Memory(
        weights=parameters * (precision.weight + precision.cast) / share,
        gradients=gradients,
        optimizer=parameters * precision.optimizer / (data if layout.shard_optimizer else share),
        activations=activations,
        beside=beside,
        ending=ends(shape, layout, software, worker, layer, gradients),
        exchange=_exchange(shape, layout, software, worker, gradients),
        update=_update(shape, layout, software, worker, parameters),
        buffers=_buffers(shape, layout, software, worker),
    )


def _exchange(shape: ModelShape, layout: Layout, software: Software, worker: PipelineWorker, gradients: float) -> float:
    """Gradients travel in copies; shared ones of what is in no layer whole, and once more to be scattered."""
    if layout.data == 1:
        return 0.0
    if not layout.shard_parameters:
        return gradients
    precision = software.precision
    of_weights = precision.weight + precision.cast
    parameters, layer = worker_parameters(shape, layout, worker), shape.layer_parameters / layout.tensor
    outside = parameters - worker.layers * layer
    if layout.divides_backward:
        return parameters * (of_weights + precision.gradient) + max(outside, layer) * precision.gradient
    at_the_end = outside if layout.pipeline == 1 else max(outside, layer)
    return at_the_end * (of_weights + 2 * precision.gradient)


def _update(shape: ModelShape, layout: Layout, software: Software, worker: PipelineWorker, parameters: float) -> float:
    widest = max(shape.vocabulary if worker.words or worker.head else 0, shape.feed_forward)
    largest = widest * shape.hidden / layout.tensor
    if layout.shard_parameters:
        largest /= layout.data
    share = parameters / (layout.data if layout.shard_optimizer else 1)
    return _TEMPORARIES * software.precision.gradient * min(share, largest)


def _buffers(shape: ModelShape, layout: Layout, software: Software, worker: PipelineWorker) -> float:
    """One for each part's input and one for its output's gradient, of every microbatch, all the time."""
    if layout.pipeline == 1 or not software.lasting_buffers:
        return 0.0
    times = 2 * worker.parts - worker.words - worker.head
    return times * layout.microbatches * shape.sequence * layout.rows * shape.hidden * software.precision.residual
