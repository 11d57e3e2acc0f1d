"""What a device holds: weights, gradients, optimizer state, activations. Formulas only; nothing is allocated.

Activations are those of Korthikanti et al. 2022 (arXiv 2205.05198), written for any width of the feed-forward part, any
number of key heads, any bytes a value and what the layer's program keeps: their s b h (10 + 24/t + 5 a s/(h t)) comes
out for Megatron-LM's GPT in 16 bits.
State is that of ZeRO (arXiv 1910.02054), stage 1 where the optimizer is sharded, stage 3 where the weights are.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.plan.layout import Layout
from lockstep.plan.moments import begins, ends, layer_activations, worker_parameters
from lockstep.plan.pipelines import PipelineWorker, pipeline_workers
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
