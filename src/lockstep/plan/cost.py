"""The time of a step of a layout, and where it goes. Pure: numbers in, numbers out.

stage time t = layers x (forward + again + backward) + exchanges between tensor ranks + sends + accumulation
step = M x t of the slowest stage + what it waits at both ends of the pipeline + data exchange + update
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from lockstep.plan.hardware import DeviceKind, Network, group, ring_seconds, send_seconds
from lockstep.plan.layout import Layout, PipelineWorker, pipeline_workers
from lockstep.plan.memory import Memory, estimate_memory, worker_parameters
from lockstep.plan.shapes import ModelShape
from lockstep.plan.software import Software

# Operations that one layer issues in its forward pass; the backward issues twice as many.
_LAYER_OPERATIONS = 16
# Bytes that cross-entropy over logits moves for each of them, forward and backward: to float32, maximum, exponent, sum,
# division, gradient.
_LOSS_BYTES = 40


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one device for one microbatch.

    Args:
        forward: of the forward pass.
        backward: of the backward pass, without what it computes again.
        weights: of ``backward``, what only weight gradients take.
        scores: of ``forward``, what attention's scores take, which a selective recomputation repeats.
    """

    forward: float
    backward: float
    weights: float
    scores: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """The rates that are reached: FLOP/s, bytes a second of copies and of a layer's passes; bytes of a value."""

    rate: float
    bandwidth: float
    through: float
    value: int

    def product(self, m: float, n: float, k: float, count: float = 1) -> float:
        moved = self.value * (m * k + k * n + m * n)
        return count * (2 * m * n * k / self.rate + moved / self.bandwidth)

    def passes(self, values: float) -> float:
        return values / self.through


def _machine(device: DeviceKind, software: Software) -> _Machine:
    constants, precision = software.constants, software.precision
    return _Machine(
        rate=device.peak(precision.format) * constants.matmul,
        bandwidth=device.bandwidth * constants.memory,
        through=device.bandwidth * constants.memory * constants.passes,
        value=precision.activation,
    )


def layer_work(shape: ModelShape, layout: Layout, device: DeviceKind, software: Software) -> Work:
    """Of one transformer layer."""
    return _layer_work(shape, layout.rows, layout.tensor, layout.sequence_parallel, device, software)


@lru_cache(maxsize=4096)
def _layer_work(
    shape: ModelShape, rows: int, tensor: int, along_sequence: bool, device: DeviceKind, software: Software
) -> Work:
    machine, constants = _machine(device, software), software.constants
    h, tokens = shape.hidden, shape.sequence * rows
    inner = shape.feed_forward / tensor
    linear = (
        machine.product(tokens, (h + 2 * shape.kv_width) / tensor, h)
        + machine.product(tokens, h, h / tensor)
        + machine.product(tokens, inner * (2 if shape.gated else 1), h)
        + machine.product(tokens, h, inner)
    )
    passes = machine.passes(_layer_bytes(shape, tokens, tensor, along_sequence, software))
    scores, scores_backward = _attention(shape, rows, tensor, machine, software)
    idle = _LAYER_OPERATIONS * constants.launch_us * 1e-6
    return Work(
        forward=max(linear + scores + passes, idle),
        backward=max(2 * linear + scores_backward + constants.backward_passes * passes, 2 * idle),
        weights=linear,
        scores=scores,
    )


def _layer_bytes(shape: ModelShape, tokens: float, tensor: int, along_sequence: bool, software: Software) -> float:
    """Bytes of a forward pass outside of products and attention: norms, dropout with residuals, the activation.

    What is kept was written by an operation that read as much.
    """
    precision, kept = software.precision, shape.kept
    value = precision.activation
    norms = 2 * kept.norms * precision.residual
    dropouts = 2 * (3 * precision.residual + 1)
    casts = kept.projections * (precision.residual + value) if precision.cast else 0
    replicated = tokens * shape.hidden * (norms + dropouts + casts) / (tensor if along_sequence else 1)
    transposed = 2 * value * shape.hidden
    inner = 2 * (kept.inner - 1) * value * shape.feed_forward
    return replicated + tokens * (transposed + inner) / tensor


def _attention(shape: ModelShape, rows: int, tensor: int, machine: _Machine, software: Software) -> tuple[float, float]:
    """Seconds of the two products of attention and what lies between them: forward, backward."""
    s, width, count = shape.sequence, shape.head_width, rows * shape.heads / tensor
    if software.fused_attention:
        # Scores stay on the chip; the backward computes them once more (FlashAttention, arXiv 2205.14135).
        forward = count * 4 * s * s * width / machine.rate + machine.passes(count * 4 * s * width * machine.value)
        return forward, 2.5 * forward
    products = machine.product(s, s, width, count) + machine.product(s, width, s, count)
    between = machine.passes(count * s * s * (4 * machine.value + 1))
    return products + between, 2 * products + software.constants.backward_passes * between


@lru_cache(maxsize=4096)
def head_work(shape: ModelShape, rows: int, tensor: int, device: DeviceKind, software: Software) -> Work:
    """Of the product with the vocabulary and the loss."""
    machine = _machine(device, software)
    tokens = shape.sequence * rows * shape.predicted
    product = machine.product(tokens, shape.vocabulary / tensor, shape.hidden)
    loss = machine.passes(tokens * shape.vocabulary / tensor * _LOSS_BYTES) / 2
    return Work(forward=product + loss, backward=2 * product + loss, weights=product)


@lru_cache(maxsize=4096)
def embedding_work(shape: ModelShape, rows: int, device: DeviceKind, software: Software) -> Work:
    """Of looking words up, and of adding their gradients."""
    machine = _machine(device, software)
    passes = machine.passes(shape.sequence * rows * shape.hidden * 4 * machine.value)
    return Work(forward=passes, backward=2 * passes, weights=passes)


def update_seconds(parameters: float, layout: Layout, device: DeviceKind, software: Software) -> float:
    """Of an update: gradients read for their norm and scaled, state and weights read and written."""
    precision = software.precision
    owned = layout.data if layout.shard_optimizer or layout.shard_parameters else 1
    moved = 3 * precision.gradient + (precision.gradient + 2 * (precision.weight + precision.optimizer)) / owned
    return parameters * moved / (device.bandwidth * software.constants.memory)


def accumulate_seconds(parameters: float, layout: Layout, device: DeviceKind, software: Software) -> float:
    """Of adding a microbatch's gradients to those before: two read, one written; nothing for a single microbatch."""
    if layout.microbatches == 1:
        return 0.0
    return parameters * 3 * software.precision.gradient / (device.bandwidth * software.constants.memory)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of a worker for one microbatch.

    Args:
        forward: of the forward passes of all its parts.
        inputs: of what the backward passes take for the gradients of its inputs.
        weights: of what they take for those of its weights.
    """

    forward: float
    inputs: float
    weights: float

    @property
    def all(self) -> float:
        return self.forward + self.inputs + self.weights


def waiting(layout: Layout, others: Passes) -> float:
    """Seconds that the slowest worker waits in a step.

    Args:
        layout: of more than one stage.
        others: a worker's passes, on average over all but the slowest.
    """
    far = layout.pipeline - 1
    if layout.schedule == "zero_bubble_v":
        return _waiting_in_a_v(layout.pipeline, layout.microbatches, others)
    if layout.schedule == "zero_bubble":
        # ZB-H1 (Qi et al. 2023, arXiv 2401.10241): weights' gradients, which wait for nobody, fill it.
        return far * max(0.0, others.forward + others.inputs - others.weights) / layout.chunks
    # The way of a microbatch through all other workers, shorter by the parts that each has (Narayanan et al. 2021).
    return far * others.all / layout.chunks


def _waiting_in_a_v(workers: int, microbatches: int, others: Passes) -> float:
    """ZB-V (Qi et al. 2023, section 6; Qi et al. 2024, arXiv 2405.15362) where the update waits for all workers.

    Were all passes equally long, half a forward pass would be left of each other worker: the last one begins so much
    later. The order is fixed, so backward passes that take longer than forward ones are waited for.
    """
    forward, inputs, weights = others.forward, others.inputs, others.weights
    far, missing = workers - 1, max(0, 2 * workers - 1 - microbatches)
    return max(
        # the first gradient's way back, beside what gradients of weights there are to fill it with
        far * inputs - min(microbatches - workers, far) * weights,
        # the same through one part of each
        (far * inputs + missing * (inputs - weights)) / 2,
        # the way down, where forward passes are the longer ones
        (far * forward + (workers - 2) * max(0.0, max(forward, weights) - inputs)) / 2,
    )


# Part of a stage's computing that is its backward pass: two of three, or three of four with recomputation.
_BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a layout is expected to take. Seconds add up to ``step_s``.

    Args:
        layout: the layout.
        memory: on its fullest device.
        compute_s: products and passes over memory, of the slowest stage.
        bubble_s: waiting at both ends of the pipeline.
        tensor_s: exchanges between tensor ranks.
        pipeline_s: sends between stages.
        data_s: exchange of gradients, as far as no backward pass hides it.
        update_s: the optimizer.
        model_flops: operations of the step that the model itself asks for, over all devices.
        hardware_flops: with those of recomputation, as Narayanan et al. count.
    """

    layout: Layout
    memory: Memory
    compute_s: float
    bubble_s: float
    tensor_s: float
    pipeline_s: float
    data_s: float
    update_s: float
    model_flops: float
    hardware_flops: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.bubble_s + self.tensor_s + self.pipeline_s + self.data_s + self.update_s

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time that a stage waits: (S-1)/(M+S-1) for equal stages in 1F1B."""
        return self.bubble_s / (self.compute_s + self.bubble_s + self.tensor_s + self.pipeline_s)

    @property
    def hardware_tflops(self) -> float:
        """TFLOP/s of a device, recomputation counted."""
        return self.hardware_flops / self.step_s / self.layout.devices / 1e12

    @property
    def model_tflops(self) -> float:
        """TFLOP/s of a device that the model itself asks for."""
        return self.model_flops / self.step_s / self.layout.devices / 1e12


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Seconds of a worker for one microbatch: its passes, and what of them is computing and what exchanging."""

    passes: Passes
    compute: float
    tensor: float

    @property
    def busy(self) -> float:
        return self.compute + self.tensor


def predict(
    shape: ModelShape, layout: Layout, *, device: DeviceKind, network: Network, software: Software
) -> Prediction:
    """The predicted step of ``layout``, whether or not it fits in memory. Instant and pure."""
    workers = pipeline_workers(shape, layout, balanced=software.balanced_stages)
    stages = [_stage(shape, layout, worker, device, network, software) for worker in workers]
    slowest = max(stages, key=lambda stage: stage.busy)
    sends = _send_seconds(shape, layout, network, software)
    parameters = max(worker_parameters(shape, layout, worker) for worker in workers)
    batches = layout.microbatches
    flops = _flops(shape, layout)
    bubble = 0.0
    if layout.pipeline > 1:
        every = _stage(shape, layout, replace(workers[0], layers=shape.layers, head=True), device, network, software)
        bubble = _bubble_seconds(layout, every, slowest, sends)
    return Prediction(
        layout=layout,
        memory=estimate_memory(shape, layout, software),
        compute_s=batches * slowest.compute,
        tensor_s=batches * slowest.tensor,
        pipeline_s=batches * sends,
        bubble_s=bubble,
        data_s=_data_seconds(parameters, layout, network, software, slowest),
        update_s=update_seconds(parameters, layout, device, software),
        model_flops=flops[0],
        hardware_flops=flops[1],
    )


def _stage(
    shape: ModelShape,
    layout: Layout,
    worker: PipelineWorker,
    device: DeviceKind,
    network: Network,
    software: Software,
) -> _Stage:
    """A worker's layers and ends, and what it adds to gradients of earlier microbatches."""
    layer = layer_work(shape, layout, device, software)
    exchange = _exchange_seconds(shape, layout, network, software)
    full = layout.recompute == "full"
    again = {"none": 0.0, "selective": layer.scores, "full": layer.forward}[layout.recompute]
    hidden = layer.weights if software.overlap_tensor else 0.0
    forward, forward_sent = layer.forward, 2 * exchange
    inputs, inputs_sent = layer.backward - layer.weights + again, 2 * exchange * full + max(0.0, 2 * exchange - hidden)
    ends = _ends(shape, layout, worker, device, software)
    adding = accumulate_seconds(worker_parameters(shape, layout, worker), layout, device, software)
    sent = exchange if worker.words else 0.0, exchange if worker.head else 0.0
    return _Stage(
        passes=Passes(
            forward=worker.layers * (forward + forward_sent) + ends.forward + sent[0],
            inputs=worker.layers * (inputs + inputs_sent) + ends.backward - ends.weights + sent[1],
            weights=worker.layers * layer.weights + ends.weights + adding,
        ),
        compute=worker.layers * (forward + inputs + layer.weights) + ends.forward + ends.backward + adding,
        tensor=worker.layers * (forward_sent + inputs_sent) + sum(sent),
    )


def _ends(shape: ModelShape, layout: Layout, worker: PipelineWorker, device: DeviceKind, software: Software) -> Work:
    """Of the embeddings and the head, as far as a worker has them."""
    made = [embedding_work(shape, layout.rows, device, software)] if worker.words else []
    made += [head_work(shape, layout.rows, layout.tensor, device, software)] if worker.head else []
    return Work(
        forward=sum(work.forward for work in made),
        backward=sum(work.backward for work in made),
        weights=sum(work.weights for work in made),
    )


def _exchange_seconds(shape: ModelShape, layout: Layout, network: Network, software: Software) -> float:
    """One all-reduce of a microbatch's activations between tensor ranks; as long where it is a gather and a scatter."""
    bytes = shape.sequence * layout.rows * shape.hidden * software.precision.activation
    ranks = group(layout.tensor, 1, network.per_host)
    constants = software.constants
    return 2 * ring_seconds(bytes, ranks, network, constants.link, constants.start_us * 1e-6)


def _send_seconds(shape: ModelShape, layout: Layout, network: Network, software: Software) -> float:
    """What a stage waits for its neighbours, for each microbatch: activations one way, gradients the other."""
    if layout.pipeline == 1:
        return 0.0
    share, tensor = software.constants.link, layout.tensor
    same_host = layout.devices <= network.per_host
    bytes = shape.sequence * layout.rows * shape.hidden * software.precision.activation
    split = software.split_sends or layout.sequence_parallel
    once = send_seconds(bytes / (tensor if split else 1), same_host, network, share)
    if split and not layout.sequence_parallel:
        once += ring_seconds(bytes, group(tensor, 1, network.per_host), network, share, 0.0)
    return 2 * layout.chunks * once


def _bubble_seconds(layout: Layout, every: _Stage, slowest: _Stage, sends: float) -> float:
    """What the slowest worker waits, and the sends on the way of one microbatch."""
    others = layout.pipeline - 1
    mean = Passes(
        forward=(every.passes.forward - slowest.passes.forward) / others,
        inputs=(every.passes.inputs - slowest.passes.inputs) / others,
        weights=(every.passes.weights - slowest.passes.weights) / others,
    )
    return waiting(layout, mean) + others * sends / layout.chunks


def _data_seconds(parameters: float, layout: Layout, network: Network, software: Software, stage: _Stage) -> float:
    """The exchange of gradients between copies, less what the last microbatch's backward pass hides.

    With a sharded optimizer the weights are gathered after the update, when nothing is left to hide behind; and where
    gradients are then scattered only, that is as much as an all-reduce. Sharded weights every microbatch gathers twice,
    but with zero-bubble a step gathers them once.
    """
    precision, constants = software.precision, software.constants
    copies = group(layout.data, layout.tensor, network.per_host)
    start = constants.start_us * 1e-6
    scatter = ring_seconds(parameters * precision.gradient, copies, network, constants.link, start)
    gather = ring_seconds(parameters * precision.weight, copies, network, constants.link, start)
    early, late = 2 * scatter, 0.0
    if layout.shard_optimizer:
        early, late = (2 if software.whole_sums else 1) * scatter, gather
    hidden = _BACKWARD * stage.compute
    if layout.shard_parameters and layout.divides_backward:
        early = scatter + gather
    elif layout.shard_parameters:
        early = layout.microbatches * (scatter + 2 * gather)
        hidden = layout.microbatches * stage.compute
    if not software.overlap_data:
        return early + late
    return max(early - hidden, constants.unhidden * early) + late


def _flops(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Operations of the model, and those with recomputation; 72 and 96 B s l h^2 (1 + ...) for a GPT."""
    tokens = layout.batch * shape.sequence
    matrices = shape.hidden * (2 * shape.hidden + 2 * shape.kv_width)
    matrices += (3 if shape.gated else 2) * shape.hidden * shape.feed_forward
    scores = 4 * shape.sequence * shape.hidden
    layers = tokens * shape.layers * (2 * matrices + scores)
    head = tokens * shape.predicted * 2 * shape.hidden * shape.vocabulary
    again = {"none": 0.0, "selective": tokens * shape.layers * scores, "full": layers}[layout.recompute]
    model = 3 * (layers + head)
    return model, model + again
