"""What is assumed of the training program: number formats, what overlaps, and one set of efficiencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.plan.hardware import Format

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


PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32", format="fp32", weight=4, gradient=4, optimizer=8, activation=4),
        Precision(name="bf16", format="bf16", weight=4, gradient=4, optimizer=8, activation=2, cast=2),
        Precision(name="fp16", format="fp16", weight=4, gradient=4, optimizer=8, activation=2, cast=2),
        # ZeRO (arXiv 1910.02054), section 3.1: 2 + 2 + 12 bytes per parameter.
        Precision(name="mixed", format="fp16", weight=2, gradient=2, optimizer=12, activation=2),
    )
}


def precision_named(name: str) -> Precision:
    """The precision called ``name``; raises ConfigError if it is unknown."""
    if name not in PRECISIONS:
        raise ConfigError(f"the precision {name!r} is not known; choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The fraction of its published figures that a device reaches. One set for all models, layouts and devices.

    They are measured on such devices, not fitted to the results that predictions are compared with.
    """

    # fraction of the peak rate during a matrix product. Moving the operands is counted separately, so small and narrow
    # products come out slower. Large half-precision products reach 250 of 312 TFLOP/s on an A100.
    matmul: float = 0.80
    memory: float = 0.80  # fraction of the memory bandwidth that operations bound by memory reach
    # fraction of ``memory`` that a layer's norms, activations and dropout reach. A GPU is bound by memory, a CPU by
    # their arithmetic and by dropout's random numbers, which --measure times.
    passes: float = 1.0
    # fraction of a link's bandwidth that collectives reach: 232 of 300 GB/s on eight A100 (NVIDIA/nccl-tests, issue
    # 175)
    link: float = 0.78
    launch_us: float = 6.0  # time of an operation that is too small to keep the device busy, in microseconds
    start_us: float = 8.4  # start-up time of a collective in microseconds (NCCL, src/graph/tuning.cc, ring, simple)
    backward_passes: float = 1.5  # memory traffic of the backward pass relative to the forward pass
    # fraction of the gradient exchange that no backward pass overlaps: nothing follows the last bucket
    unhidden: float = 0.1
    # fraction of the memory that tensors can use. The rest holds the context, communication buffers and fragments.
    usable_memory: float = 0.92

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in ("matmul", "memory", "passes", "link", "usable_memory") and not 0 < value <= 1:
                raise ConfigError(f"{entry.name}={value} was given, expected a share above 0 and at most 1")
            if value < 0:
                raise ConfigError(f"{entry.name}={value} was given, expected at least 0")


@dataclass(frozen=True, kw_only=True)
class Software:
    """How the training program works. The defaults describe Lockstep."""

    precision: Precision = field(default_factory=lambda: PRECISIONS["bf16"])  # number formats
    fused_attention: bool = True  # attention scores stay on the chip (``scaled_dot_product_attention``)
    overlap_data: bool = True  # the gradient exchange overlaps with the last microbatch's backward pass
    # exchanges between tensor ranks in the backward pass overlap with the weight gradients
    overlap_tensor: bool = False
    # with a sharded optimizer, gradients are still all-reduced instead of reduce-scattered
    zero1_allreduce: bool = True
    # each tensor rank sends its part to the next stage, where the parts are gathered inside the host
    split_sends: bool = False
    # stages are as equal in cost as whole layers allow, the head included, instead of having equally many layers
    balanced_stages: bool = True
    # with sequence parallelism, the gathered input of a product is saved for its backward pass, as DTensor does;
    # Megatron-LM gathers it again
    saves_gathered_inputs: bool = True
    static_buffers: bool = True  # each stage has permanent receive buffers for every microbatch, as torch's stages have
    # the head's gradient exists twice while it is computed, as in Lockstep's matrix products on AMD CPUs with AVX-512
    transposed_head_gradient: bool = False
    constants: Constants = field(default_factory=Constants)  # fractions of published figures that are reached
