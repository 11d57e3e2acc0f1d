"""Predicts the time of a step of a layout, and where it goes.

    stage time t = layers x (forward + recomputation + backward) + tensor-parallel exchanges + sends + accumulation
    step         = microbatches x t of the slowest worker + pipeline bubble + gradient exchange + update

A product of m x k and k x n takes 2mnk operations at a fraction of the peak rate, plus the time to move its operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from lockstep_tools.plan.assumptions import Software
from lockstep_tools.plan.division import Division, PipelineWorker, pipeline_workers
from lockstep_tools.plan.hardware import DeviceKind, Network, ring_seconds, send_seconds
from lockstep_tools.plan.memory import Memory, estimate_memory, worker_parameters
from lockstep_tools.plan.model_shape import ModelShape

# Operations that the forward pass of a layer launches; the backward pass launches twice as many.
_LAYER_OPERATIONS = 16
# Bytes that cross-entropy moves per logit, forward and backward: cast to float32, maximum, exponent, sum, division,
# gradient.
_LOSS_BYTES = 40
# The backward pass's part of a stage's computation: two of three.
_BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted step of a layout. The seconds add up to ``step_s``."""

    division: Division
    memory: Memory  # memory of its fullest device
    compute_s: float  # computation of the slowest worker
    bubble_s: float  # time that it waits in the pipeline
    tensor_s: float  # exchanges between tensor ranks
    pipeline_s: float  # sends between stages
    data_s: float  # the part of the gradient exchange that does not overlap with a backward pass
    update_s: float  # the optimizer
    model_flops: float  # operations of the step that the model itself needs, over all devices

    @property
    def step_s(self) -> float:
        return self.compute_s + self.bubble_s + self.tensor_s + self.pipeline_s + self.data_s + self.update_s

    @property
    def bubble(self) -> float:
        """Fraction of the pipeline's time that a worker waits: (S-1)/(M+S-1) for equal stages in 1F1B."""
        return self.bubble_s / (self.compute_s + self.bubble_s + self.tensor_s + self.pipeline_s)

    @property
    def model_tflops(self) -> float:
        """TFLOP/s per device that the model itself needs."""
        return self.model_flops / self.step_s / self.division.devices / 1e12


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one device for one microbatch."""

    forward: float = 0.0  # the forward pass
    backward: float = 0.0  # the backward pass without recomputation
    weights: float = 0.0  # the part of ``backward`` that computes weight gradients


class _Rates:
    """What a device reaches: FLOP/s, and bytes per second."""

    def __init__(self, device: DeviceKind, software: Software) -> None:
        constants, precision = software.constants, software.precision
        self.flops = device.peak(precision.format) * device.matmul
        self.attention = device.peak(precision.format) * device.attention
        self.bandwidth = device.bandwidth * constants.memory
        self.value = precision.activation

    def product(self, m: float, n: float, k: float, count: float = 1) -> float:
        """Seconds of ``count`` products of m x k and k x n."""
        moved = self.value * (m * k + k * n + m * n)
        return count * (2 * m * n * k / self.flops + moved / self.bandwidth)


def layer_work(shape: ModelShape, division: Division, device: DeviceKind, software: Software) -> Work:
    """The work of one transformer layer."""
    return _layer_work(shape, division.microbatch_size, division.tensor, division.sequence_parallel, device, software)


@lru_cache(maxsize=4096)
def _layer_work(
    shape: ModelShape, sequences: int, tensor: int, sequence_parallel: bool, device: DeviceKind, software: Software
) -> Work:
    rates, constants = _Rates(device, software), software.constants
    h, width, tokens = shape.hidden, shape.query_width, shape.sequence * sequences
    linear = rates.product(tokens, (width + 2 * shape.kv_width) / tensor, h) + rates.product(tokens, h, width / tensor)
    if shape.dense_feed_forward:
        linear += _feed_forward(shape, rates, tokens, shape.dense_feed_forward / tensor)
    if shape.experts:
        # Tokens are spread evenly. The router is small beside its experts.
        tokens_each = tokens * shape.active_experts / shape.experts
        linear += shape.experts * _feed_forward(shape, rates, tokens_each, shape.feed_forward / tensor)
        linear += rates.product(tokens, shape.experts, h)
    # What the modules compute beyond the sizes, or less.
    linear += 2 * tokens * (shape.layer_matrices - shape.sized_matrices) / tensor / rates.flops
    elementwise = _elementwise_bytes(shape, tokens, tensor, sequence_parallel, software) / rates.bandwidth
    scores, scores_backward = _attention(shape, sequences, tensor, rates, software)
    launch = _LAYER_OPERATIONS * constants.launch_us * 1e-6
    return Work(
        forward=max(linear + scores + elementwise, launch),
        backward=max(2 * linear + scores_backward + constants.backward_passes * elementwise, 2 * launch),
        weights=linear,
    )


def _feed_forward(shape: ModelShape, rates: _Rates, tokens: float, inner: float) -> float:
    """Seconds of the products of one feed-forward layer of size ``inner``."""
    return rates.product(tokens, inner * (2 if shape.gated else 1), shape.hidden) + rates.product(
        tokens, shape.hidden, inner
    )


def _elementwise_bytes(
    shape: ModelShape, tokens: float, tensor: int, sequence_parallel: bool, software: Software
) -> float:
    """Bytes that norms, dropout with residuals, and the activation move in a forward pass.

    Whatever is saved was written by an operation that read as much.
    """
    precision, saved = software.precision, shape.saved
    value = precision.activation
    norms = 2 * saved.norms * precision.residual
    dropouts = 2 * (3 * precision.residual + 1)
    casts = saved.projections * (precision.residual + value) if precision.cast else 0
    replicated = tokens * shape.hidden * (norms + dropouts + casts) / (tensor if sequence_parallel else 1)
    transposed = 2 * value * shape.hidden
    inner = 2 * (saved.inner - 1) * value * shape.active_feed_forward
    # A token's copies for its experts, and their results.
    inner += 2 * 2 * value * shape.active_experts * shape.hidden
    return replicated + tokens * (transposed + inner) / tensor


def _attention(
    shape: ModelShape, sequences: int, tensor: int, rates: _Rates, software: Software
) -> tuple[float, float]:
    """Seconds of attention's two products and what lies between them: forward, backward."""
    s, width, count = shape.sequence, shape.head_size, sequences * shape.heads / tensor
    if software.fused_attention:
        # Scores stay on the chip; the backward pass recomputes them (FlashAttention, arXiv 2205.14135).
        operations = sequences * s * _computed_keys(shape) * shape.pair_flops / tensor
        forward = operations / rates.attention + count * 4 * s * width * rates.value / rates.bandwidth
        return forward, 2.5 * forward
    products = rates.product(s, s, width, count) + rates.product(s, width, s, count)
    between = count * s * s * (4 * rates.value + 1) / rates.bandwidth
    return products + between, 2 * products + software.constants.backward_passes * between


def _computed_keys(shape: ModelShape) -> float:
    """Keys that a fused kernel computes for a query, on average.

    It leaves out later tokens. Windows that are shorter than the sequence are masks, behind which all is computed, as
    in torch's ``scaled_dot_product_attention``.
    """
    s = shape.sequence
    masked = shape.windowed if 0 < shape.window < s else 0.0
    return masked * s + (1 - masked) * ((s + 1) / 2 if shape.causal else s)


@lru_cache(maxsize=4096)
def _head_work(shape: ModelShape, sequences: int, tensor: int, device: DeviceKind, software: Software) -> Work:
    """The product with the vocabulary and the loss."""
    rates = _Rates(device, software)
    tokens = shape.sequence * sequences * shape.predicted
    product = rates.product(tokens, shape.vocabulary / tensor, shape.hidden)
    loss = tokens * shape.vocabulary / tensor * _LOSS_BYTES / rates.bandwidth / 2
    return Work(forward=product + loss, backward=2 * product + loss, weights=product)


@lru_cache(maxsize=4096)
def _embedding_work(shape: ModelShape, sequences: int, device: DeviceKind, software: Software) -> Work:
    """The look-up, and adding its gradients."""
    rates = _Rates(device, software)
    lookup = shape.sequence * sequences * shape.hidden * 4 * rates.value / rates.bandwidth
    return Work(forward=lookup, backward=2 * lookup, weights=lookup)


def accumulate_seconds(parameters: float, division: Division, device: DeviceKind, software: Software) -> float:
    """Adding a microbatch's gradients to the earlier ones: two reads and one write; 0 for a single microbatch."""
    if division.microbatches == 1:
        return 0.0
    parameters /= division.data if division.shard_parameters else 1
    return parameters * 3 * software.precision.gradient / (device.bandwidth * software.constants.memory)


def _update_seconds(parameters: float, division: Division, device: DeviceKind, software: Software) -> float:
    """An update: gradients are read for their norm and scaled; state and weights are read and written."""
    precision = software.precision
    parameters /= division.data if division.shard_parameters else 1
    shards = division.data if division.shard_optimizer else 1
    moved = 3 * precision.gradient + (precision.gradient + 2 * (precision.weight + precision.optimizer)) / shards
    return parameters * moved / (device.bandwidth * software.constants.memory)


# The pipeline.


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of a worker for one microbatch, over all its stages."""

    forward: float  # forward passes
    inputs: float  # the part of the backward passes that computes input gradients
    weights: float  # the part that computes weight gradients
    tensor: float = 0.0  # the part of all passes that exchanges between tensor ranks

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def bubble_seconds(division: Division, mean: Passes) -> float:
    """Seconds that the slowest worker waits in a step; ``others``: the passes of a worker, averaged over all others."""
    forward, inputs, weights = mean.forward, mean.inputs, mean.weights
    workers, rest = division.pipeline, division.pipeline - 1
    if division.schedule == "zero_bubble":
        # ZB-H1 (Qi et al. 2023, arXiv 2401.10241): weight gradients, which nobody waits for, fill the bubble.
        return rest * max(0.0, forward + inputs - weights) / division.stages_per_worker
    if division.schedule != "zero_bubble_v":
        # A microbatch's way through all other workers, divided by their stages (Narayanan et al. 2021).
        return rest * (forward + inputs + weights) / division.stages_per_worker
    # ZB-V (Qi et al. 2023, section 6; Qi et al. 2024, arXiv 2405.15362) where the update waits for all workers. If all
    # passes took the same time, half a forward pass would remain for each other worker, by which the last one begins
    # later. The order is fixed, so backward passes that take longer than forward passes are waited for.
    missing = max(0, 2 * workers - 1 - division.microbatches)
    return max(
        # the first gradient's way back, less the weight gradients that can fill it
        rest * inputs - min(division.microbatches - workers, rest) * weights,
        # the same through one stage of each worker
        (rest * inputs + missing * (inputs - weights)) / 2,
        # the way forward, if forward passes take longer
        (rest * forward + (workers - 2) * max(0.0, max(forward, weights) - inputs)) / 2,
    )


def predict(
    shape: ModelShape, division: Division, *, device: DeviceKind, network: Network, software: Software
) -> Prediction:
    """Predicts the step of ``division``, whether or not it fits in memory."""
    cost, microbatches = _StepCost(shape, division, device, network, software), division.microbatches
    workers = pipeline_workers(shape, division)
    slowest = max(map(cost.passes, workers), key=lambda passes: passes.total)
    compute = microbatches * (slowest.total - slowest.tensor)
    sends = cost.sends()
    parameters = max(worker_parameters(shape, division, worker) for worker in workers)
    return Prediction(
        division=division,
        memory=estimate_memory(shape, division, software),
        compute_s=compute,
        tensor_s=microbatches * slowest.tensor,
        pipeline_s=microbatches * sends,
        bubble_s=cost.bubble(workers[0], slowest, sends) if division.pipeline > 1 else 0.0,
        data_s=cost.gradient_exchange(parameters, compute / microbatches),
        update_s=_update_seconds(parameters, division, device, software),
        model_flops=cost.flops(),
    )


class _StepCost:
    """The terms of a step, in seconds."""

    def __init__(
        self, shape: ModelShape, division: Division, device: DeviceKind, network: Network, software: Software
    ) -> None:
        self.shape, self.division, self.device, self.network, self.software = shape, division, device, network, software
        self.hidden_bytes = shape.sequence * division.microbatch_size * shape.hidden * software.precision.activation

    def ring(self, bytes: float, size: int, stride: int) -> float:
        """A reduce-scatter or an all-gather."""
        constants = self.software.constants
        return ring_seconds(bytes, size, stride, self.network, constants.link, constants.start_us * 1e-6)

    def passes(self, worker: PipelineWorker) -> Passes:
        """A worker's layers, its embedding and head, and adding its gradients to those of earlier microbatches."""
        shape, division, device, software = self.shape, self.division, self.device, self.software
        layer = layer_work(shape, division, device, software)
        full = division.activation_checkpointing == "full"
        # One all-reduce of a microbatch's activations between tensor ranks, or a gather and a scatter.
        exchange = 2 * self.ring(self.hidden_bytes, division.tensor, 1)
        embedding, head = Work(), Work()
        if worker.embedding:
            embedding = _embedding_work(shape, division.microbatch_size, device, software)
        if worker.head:
            head = _head_work(shape, division.microbatch_size, division.tensor, device, software)
        n, weights = worker.layers, embedding.weights + head.weights
        inputs = layer.backward - layer.weights + layer.forward * full + 2 * exchange * (1 + full)
        return Passes(
            forward=n * (layer.forward + 2 * exchange) + embedding.forward + head.forward + exchange * worker.embedding,
            inputs=n * inputs + embedding.backward + head.backward - weights + exchange * worker.head,
            weights=n * layer.weights
            + weights
            + accumulate_seconds(worker_parameters(shape, division, worker), division, device, software),
            tensor=exchange * (n * (4 + 2 * full) + worker.embedding + worker.head),
        )

    def sends(self) -> float:
        """Sends to and from the next stages per microbatch: activations forward, gradients back."""
        division, network = self.division, self.network
        if division.pipeline == 1:
            return 0.0
        split = self.software.split_sends or division.sequence_parallel
        bytes = self.hidden_bytes / (division.tensor if split else 1)
        link = self.software.constants.link
        once = send_seconds(bytes, division.devices <= network.per_host, network, link)
        if split and not division.sequence_parallel:
            once += ring_seconds(self.hidden_bytes, division.tensor, 1, network, link, 0.0)
        return 2 * division.stages_per_worker * once

    def bubble(self, first: PipelineWorker, slowest: Passes, sends: float) -> float:
        """What the slowest worker waits, and the sends on the way of one microbatch."""
        other_workers = self.division.pipeline - 1
        everything = self.passes(replace(first, layers=self.shape.layers, head=True))
        mean = Passes(
            forward=(everything.forward - slowest.forward) / other_workers,
            inputs=(everything.inputs - slowest.inputs) / other_workers,
            weights=(everything.weights - slowest.weights) / other_workers,
        )
        return bubble_seconds(self.division, mean) + other_workers * sends / self.division.stages_per_worker

    def gradient_exchange(self, parameters: float, compute: float) -> float:
        """The exchange between copies, less what overlaps with the last microbatch's backward pass.

        With a sharded optimizer, weights are gathered after the update, with nothing to overlap. Sharded weights are
        gathered twice per microbatch and copied out of what was gathered; gradients are copied in to be scattered.
        """
        division, precision = self.division, self.software.precision
        scatter = self.ring(parameters * precision.gradient, division.data, division.tensor)
        gather = self.ring(parameters * precision.weight, division.data, division.tensor)
        # Gradients are all-reduced for a sharded optimizer too.
        during, after, overlapped = 2 * scatter, gather if division.shard_optimizer else 0.0, _BACKWARD * compute
        if division.shard_parameters:
            during = division.microbatches * (scatter + 2 * gather)
            copied = (
                division.microbatches * parameters * (2 * 2 * precision.weight + precision.weight + precision.gradient)
            )
            after = copied / (self.device.bandwidth * self.software.constants.memory)
            overlapped = division.microbatches * compute
        if not self.software.overlap_data:
            return during + after
        return max(during - overlapped, self.software.constants.unhidden * during) + after

    def flops(self) -> float:
        """Operations of the model without recomputation: 72 B s l h^2 (1 + ...) for a GPT."""
        shape = self.shape
        layers = shape.layers * (2 * shape.layer_matrices + shape.attended * shape.pair_flops)
        head = shape.predicted * 2 * shape.hidden * shape.vocabulary
        return 3 * self.division.batch * shape.sequence * (layers + head)
