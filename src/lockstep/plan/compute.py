"""How long a device takes for a layer, for the embedding and for the head: matrix products and passes over memory.

A product of m x k and k x n takes 2mnk operations at a part of the peak rate, and beside that the time in which its
operands and result pass through memory; so its efficiency falls by itself where it is narrow. All else in a layer is
bound by memory: bytes over bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lockstep.plan.devices import DeviceKind
from lockstep.plan.layout import Layout
from lockstep.plan.settings import Software
from lockstep.plan.shape import ModelShape

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
