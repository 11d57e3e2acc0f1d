"""What a device holds: weights, gradients, optimizer state, activations. Formulas only; nothing is allocated.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198), extended to any feed-forward layer, key heads, number
format, and what the layer's program saves. State follows ZeRO (arXiv 1910.02054). Memory can peak where a microbatch's
backward pass begins or ends, where gradients travel, and where weights change. What is counted was found in lists of
the tensors that exist at the peak of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lockstep_tools.plan.assumptions import Software
from lockstep_tools.plan.division import Division, PipelineWorker, pipeline_workers
from lockstep_tools.plan.model_shape import ModelShape

# Bytes per logit beside its own. The loss is computed in float32: the log-probability and the gradients of both; where
# tensor ranks divide the vocabulary, the probability and its gradient.
_LOSS_BYTES, _PARALLEL_LOSS_BYTES = 12, 8
_SAVED_LOSS_BYTES = 4
# Adam computes with the square root of a moment and its quotient.
_ADAM_TEMPORARIES = 2


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device."""

    weights: float  # the parameters, and autocast's copies of them
    gradients: float  # their gradients
    optimizer: float  # the optimizer state, including float32 weights where the weights are shorter
    activations: float  # activations at the worst moment where a backward pass begins
    # what else exists at that moment: gradients of earlier microbatches, the one that is being computed, and unsharded
    # weights
    beside_activations: float = 0.0
    # activations, gradients and unsharded weights where a backward pass reaches the embedding
    backward_end: float = 0.0
    # what exists beside the gradients when the last of them are exchanged: copies, or unsharded weights
    exchange: float = 0.0
    update: float = 0.0  # temporaries of the optimizer
    buffers: float = 0.0  # receive buffers for hidden states and their gradients, for every microbatch

    @property
    def total(self) -> float:
        backward = max(self.activations + self.beside_activations, self.backward_end)
        update = self.gradients + max(self.exchange, self.update)
        return self.weights + self.optimizer + self.buffers + max(backward, update)


def estimate_memory(shape: ModelShape, division: Division, software: Software) -> Memory:
    """The memory of the fullest device."""
    workers = pipeline_workers(shape, division)
    return max(
        (WorkerMemory(shape, division, software, worker).estimate() for worker in workers),
        key=lambda memory: memory.total,
    )


def worker_parameters(shape: ModelShape, division: Division, worker: PipelineWorker) -> float:
    """Parameters of a worker on one tensor rank; a tied weight counts once."""
    vocabulary = shape.vocabulary * shape.hidden / division.tensor
    total = worker.layers * shape.layer_parameters / division.tensor
    if worker.embedding:
        total += vocabulary + shape.embedding_rows * shape.hidden
    if worker.head:
        total += shape.other_parameters + (0 if shape.tied and worker.embedding else vocabulary)
    return total


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes of one layer for one microbatch on one device."""

    saved: float  # what it saves without activation checkpointing
    input: float  # the layer's input
    results: float  # gradients of the products' results, which exist until the weight gradients are computed


def layer_activations(shape: ModelShape, division: Division, software: Software) -> LayerActivations:
    """What a layer saves (Korthikanti et al., equations 1, 2 and 4)."""
    sequence_ranks = division.tensor if division.sequence_parallel else 1
    return _layer_activations(shape, division.microbatch_size, division.tensor, sequence_ranks, software)


@lru_cache(maxsize=4096)
def _layer_activations(
    shape: ModelShape, sequences: int, tensor: int, sequence_ranks: int, software: Software
) -> LayerActivations:
    precision, saved = software.precision, shape.saved
    value = precision.activation
    tokens = shape.sequence * sequences
    # Without autocast the products that take a norm's output share it: one for attention, one for feed-forward. With
    # sequence parallelism, the input is gathered for its product and saved so, as DTensor does.
    inputs = (saved.projections if precision.cast else 2) * value
    norms = (saved.norms * precision.residual + saved.masks) / sequence_ranks
    inner = 2 * shape.query_width + 2 * shape.kv_width + saved.inner * shape.active_feed_forward
    inner += 2 * shape.active_experts * shape.hidden  # a token's copies for its experts, and their results
    # Softmax and dropout save a value each, and a mask of one byte.
    scores = 0.0 if software.fused_attention else shape.heads * shape.sequence * tokens * (2 * value + 1)
    divided = shape.query_width + 2 * shape.kv_width + (2 if shape.gated else 1) * shape.active_feed_forward
    return LayerActivations(
        saved=tokens * shape.hidden * (norms + inputs) + (tokens * value * inner + scores) / tensor,
        input=tokens * shape.hidden * precision.residual / sequence_ranks,
        results=tokens * (value * divided / tensor + 4 * precision.residual * shape.hidden / sequence_ranks),
    )


class WorkerMemory:
    """The terms of one pipeline worker's memory, in bytes."""

    def __init__(self, shape: ModelShape, division: Division, software: Software, worker: PipelineWorker) -> None:
        self.shape, self.division, self.software, self.worker = shape, division, software, worker
        precision = software.precision
        self.value, self.gradient = precision.activation, precision.gradient
        self.weight = precision.weight + precision.cast
        self.parameters = worker_parameters(shape, division, worker)
        self.owned = self.parameters / (division.data if division.shard_parameters else 1)
        self.gradients = self.owned * self.gradient
        self.layer = layer_activations(shape, division, software)
        self.layer_parameters = shape.layer_parameters / division.tensor
        self.vocabulary_parameters = shape.vocabulary * shape.hidden / division.tensor
        self.logits = shape.sequence * division.microbatch_size * shape.predicted * shape.vocabulary / division.tensor
        full = division.activation_checkpointing == "full"
        # What a layer saves, and what exists for a moment where it is recomputed.
        self.saved, self.recomputed = (self.layer.input, self.layer.saved) if full else (self.layer.saved, 0.0)

    def estimate(self) -> Memory:
        shards = self.division.data if self.division.shard_optimizer or self.division.shard_parameters else 1
        activations, beside = self.backward_begin()
        return Memory(
            weights=self.owned * self.weight,
            gradients=self.gradients,
            optimizer=self.parameters * self.software.precision.optimizer / shards,
            activations=activations,
            beside_activations=beside,
            backward_end=self.backward_end(),
            exchange=self.exchange(),
            update=self.update(),
            buffers=self.buffers(),
        )

    def backward_begin(self) -> tuple[float, float]:
        """Activations, and what exists beside them, at the worst moment where a backward pass begins."""
        division, worker = self.division, self.worker
        results = self.layer.results * worker.layers / worker.stages
        live = self.saved * worker.live_layers + results * worker.pending + self.recomputed
        if worker.head:
            live += self.logits * self.value * worker.pending
        earlier = self.gradients if division.microbatches > 1 else 0.0
        passing, at_head = self.unsharded()
        if not division.shard_parameters and earlier:  # the gradient that is being computed, at most the largest
            passing = self.gradient * self.shape.largest_matrix / division.tensor
        moments = [(live + (results if division.splits_backward else 0.0), earlier + passing)]
        if worker.head:
            losses = live + self.logits * worker.live_losses * (self.value + _SAVED_LOSS_BYTES)
            loss = _PARALLEL_LOSS_BYTES if division.tensor > 1 else _LOSS_BYTES
            saved_loss = _SAVED_LOSS_BYTES if division.splits_backward else 0
            transposed = self.software.transposed_head_gradient and division.tensor == 1
            head_gradient = self.gradient * self.vocabulary_parameters * (2 if transposed else 1)
            moments += [
                (losses + self.logits * (self.value + loss), earlier + (at_head if division.splits_backward else 0.0)),
                (losses + self.logits * (2 * self.value + saved_loss), earlier + at_head + head_gradient),
            ]
        return max(moments, key=sum)

    def backward_end(self) -> float:
        """Activations, gradients and unsharded weights where a backward pass reaches the embedding.

        Each tensor rank computes the gradient of the whole vocabulary, then keeps its own part.
        """
        division, worker = self.division, self.worker
        if not worker.embedding:
            return 0.0
        gradient = self.gradient * self.vocabulary_parameters
        # Added to a gradient that exists: of earlier microbatches, or of the head that shares the weight.
        second = gradient if division.microbatches > 1 or (worker.head and self.shape.tied) else 0.0
        whole = gradient * division.tensor if division.tensor > 1 else 0.0
        # Unsharded words, and their gradient in one tensor.
        unsharded = self.vocabulary_parameters * self.weight + gradient if division.shard_parameters else 0.0
        activations = self.saved * (worker.live_layers - worker.finished_layers)
        return activations + self.gradients + second + whole + unsharded

    def unsharded(self) -> tuple[float, float]:
        """Bytes of sharded weights that are gathered: during a backward pass through the layers, and at the head.

        A layer is gathered in one tensor and copied out of it. The next layer is prefetched, and the embedding stays
        gathered.
        """
        if not self.division.shard_parameters:
            return 0.0, 0.0
        layer, vocabulary = self.layer_parameters * self.weight, self.vocabulary_parameters * self.weight
        return vocabulary + 2 * layer, vocabulary + layer

    def exchange(self) -> float:
        """Copies of the gradients; with sharded parameters, what is whole outside the layers, with two gradients."""
        if self.division.data == 1:
            return 0.0
        if not self.division.shard_parameters:
            return self.gradients
        outside = self.parameters - self.worker.layers * self.layer_parameters
        return outside * (self.weight + 2 * self.gradient)

    def update(self) -> float:
        """Temporaries of Adam for the largest parameter."""
        words = self.shape.vocabulary * self.shape.hidden if self.worker.embedding or self.worker.head else 0
        largest = max(words, self.shape.largest_matrix) / self.division.tensor
        if self.division.shard_parameters:
            largest /= self.division.data
        owned = self.parameters / (self.division.data if self.division.shard_optimizer else 1)
        return _ADAM_TEMPORARIES * self.gradient * min(owned, largest)

    def buffers(self) -> float:
        """One for each stage's input and one for its output's gradient, of every microbatch."""
        division, worker = self.division, self.worker
        if division.pipeline == 1 or not self.software.static_buffers:
            return 0.0
        per_microbatch = 2 * worker.stages - worker.embedding - worker.head
        values = division.microbatches * self.shape.sequence * division.microbatch_size * self.shape.hidden
        return per_microbatch * values * self.software.precision.residual
