"""What is assumed of the software: number formats, what overlaps, and the one set of constants of all predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.plan.hardware import Format

PrecisionName = Literal["fp32", "bf16", "fp16", "mixed"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of everything that a device keeps for a parameter and for a value of the activations.

    Args:
        name: as in ``Model.compile(precision=...)``, or ``mixed`` for half-precision weights beside float32 ones.
        format: of matrix products.
        weight: bytes of a weight.
        gradient: bytes of a gradient.
        optimizer: bytes of Adam's two moments, and of a float32 copy of the weight where the weight is shorter.
        activation: bytes of a value that the forward pass keeps or sends.
        cast: bytes of the shorter copy of a weight that autocast keeps from forward to backward.
    """

    name: PrecisionName
    format: Format
    weight: int
    gradient: int
    optimizer: int
    activation: int
    cast: int = 0

    @property
    def residual(self) -> int:
        """Bytes of a value between layers: autocast leaves sums and norms in float32."""
        return 4 if self.cast else self.activation


PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32", format="fp32", weight=4, gradient=4, optimizer=8, activation=4),
        Precision(name="bf16", format="bf16", weight=4, gradient=4, optimizer=8, activation=2, cast=2),
        Precision(name="fp16", format="fp16", weight=4, gradient=4, optimizer=8, activation=2, cast=2),
        # ZeRO (arXiv 1910.02054), section 3.1: 2 + 2 + 12 bytes a parameter.
        Precision(name="mixed", format="fp16", weight=2, gradient=2, optimizer=12, activation=2),
    )
}


def precision_named(name: str) -> Precision:
    """The precision called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"the precision {name!r} is not known; choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What part of its published figures a device reaches. One set for all models, layouts and devices.

    They are what such devices are seen to reach by themselves, not fitted to the results that predictions are held
    against.

    Args:
        matmul: part of the peak rate that a matrix product reaches while it computes; moving its operands is counted
            beside it, so small and narrow products come out slower. Large half-precision products on an A100 run at
            250 of 312 TFLOP/s.
        memory: part of the memory bandwidth that passes over memory reach.
        passes: part of ``memory`` that a layer's norms, activations and dropout reach; a GPU is bound by memory, a
            CPU by their arithmetic and by dropout's random numbers, which --measure times.
        link: part of a link's bandwidth that collectives reach; eight A100 measure 232 of 300 GB/s (NVIDIA/nccl-tests,
            issue 175).
        launch_us: what an operation costs where it is too small to keep the device busy, in microseconds.
        start_us: what the start of a collective costs, in microseconds (NCCL, src/graph/tuning.cc, ring, simple).
        backward_passes: memory passes of the backward over those of the forward.
        unhidden: part of the gradients' exchange that no backward pass hides: the last bucket has nothing behind it.
        usable_memory: part of the memory that tensors can have; the rest is for the context, communication buffers
            and fragments.
    """

    matmul: float = 0.80
    memory: float = 0.80
    passes: float = 1.0
    link: float = 0.78
    launch_us: float = 6.0
    start_us: float = 8.4
    backward_passes: float = 1.5
    unhidden: float = 0.1
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
    """What the program that trains does and does not do; facts about it, not constants to be fitted.

    Args:
        precision: number formats.
        fused_attention: scores of attention never reach memory (``scaled_dot_product_attention``).
        overlap_data: gradients are exchanged while the last microbatch is still in its backward pass.
        overlap_tensor: the backward's exchanges between tensor ranks run beside the products of weight gradients.
        whole_sums: copies that share the optimizer's state sum whole gradients all the same, as Lockstep's do.
        split_sends: between stages each tensor rank sends its own part, gathered at the receiver inside the host.
        balanced_stages: stages have as equal work as whole layers allow, the head counted, in place of equally many
            layers.
        keeps_gathered: what a product takes is kept whole for its backward pass where it was gathered along the
            sequence, as DTensor does; Megatron-LM gathers it again.
        lasting_buffers: a stage has buffers for every microbatch all the time, as torch's have.
        turned_gradients: the gradient of the head is there twice while it is made, as with Lockstep's products on a
            CPU of AMD's with AVX-512.
        constants: what part of published figures is reached.
    """

    precision: Precision = field(default_factory=lambda: PRECISIONS["bf16"])
    fused_attention: bool = True
    overlap_data: bool = True
    overlap_tensor: bool = False
    whole_sums: bool = True
    split_sends: bool = False
    balanced_stages: bool = True
    keeps_gathered: bool = True
    lasting_buffers: bool = True
    turned_gradients: bool = False
    constants: Constants = field(default_factory=Constants)
