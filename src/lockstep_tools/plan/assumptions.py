"""What is assumed of the training program: number formats, what overlaps, and one set of efficiencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lockstep_tools.plan.hardware import Format

PrecisionName = Literal["fp32", "bf16", "fp16", "mixed"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per parameter and per activation value."""

    # as in ``Model.compile(precision=...)``, or ``mixed`` for half-precision weights with float32 copies
    name: PrecisionName
    format: Format  # number format of matrix products
    weight: int  # bytes of a weight
    gradient: int  # bytes of a gradient
    optimizer: int  # bytes of Adam's two moments, and of the float32 copy of a half-precision weight
    activation: int  # bytes of a value that the forward pass saves or sends
    cast: int = 0  # bytes of the half-precision copy of a weight that autocast keeps from forward to backward

    @property
    def residual(self) -> int:
        """Bytes of a value of the residual stream: autocast leaves sums and norms in float32."""
        return 4 if self.cast else self.activation


PRECISIONS: Mapping[PrecisionName, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32", format="fp32", weight=4, gradient=4, optimizer=8, activation=4),
        Precision(name="bf16", format="bf16", weight=4, gradient=4, optimizer=8, activation=2, cast=2),
        Precision(name="fp16", format="fp16", weight=4, gradient=4, optimizer=8, activation=2, cast=2),
        # ZeRO (arXiv 1910.02054), section 3.1: 2 + 2 + 12 bytes per parameter.
        Precision(name="mixed", format="fp16", weight=2, gradient=2, optimizer=12, activation=2),
    )
}


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The fraction of its published figures that a device reaches. One set for all models, layouts and devices.

    They are measured on such devices, not fitted to the results that predictions are compared with.
    """

    memory: float = 0.80  # of the memory bandwidth
    link: float = 0.78  # of a link, in collectives: 232 of 300 GB/s on eight A100 (NVIDIA/nccl-tests, issue 175)
    launch_us: float = 6.0  # time of an operation that is too small to keep the device busy, in microseconds
    start_us: float = 8.4  # start-up time of a collective in microseconds (NCCL, src/graph/tuning.cc, ring, simple)
    backward_passes: float = 1.5  # memory traffic of the backward pass relative to the forward pass
    unhidden: float = 0.1  # of the gradient exchange; no backward pass overlaps the last bucket
    # of the memory, for tensors. The rest holds the context, communication buffers and fragments.
    usable_memory: float = 0.92


@dataclass(frozen=True, kw_only=True)
class Software:
    """How the training program works. The defaults describe Lockstep."""

    precision: Precision = field(default_factory=lambda: PRECISIONS["bf16"])
    fused_attention: bool = True  # attention scores stay on the chip (``scaled_dot_product_attention``)
    overlap_data: bool = True  # the gradient exchange overlaps with the last microbatch's backward pass
    # each tensor rank sends its part to the next stage, where the parts are gathered inside the host
    split_sends: bool = False
    # the head's gradient exists twice while it is computed, as in Lockstep's matrix products on AMD CPUs with AVX-512
    transposed_head_gradient: bool = False
    static_buffers: bool = True  # each stage has permanent receive buffers for every microbatch, as torch's stages have
    constants: Constants = field(default_factory=Constants)
