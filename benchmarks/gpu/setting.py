"""How a contender's process is set up: the device, the precision, how many steps, and the switches that all have."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.gpu.work import GpuPrecision
from lockstep.errors import ConfigError

DeviceType = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many steps a trial has.

        warm_up steps | lap_steps | lap_steps | ...     the stopwatch stops, and the device is waited for, at each |

    Args:
        warm_up: not timed: compilation, graph capture, the choice of kernels.
        lap_steps: of a timed lap.
        laps: timed.
    """

    warm_up: int
    lap_steps: int
    laps: int

    def __post_init__(self) -> None:
        for name in ("warm_up", "lap_steps", "laps"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} was given, expected at least 1; raise it")

    @property
    def steps(self) -> int:
        """All of them."""
        return self.warm_up + self.laps * self.lap_steps

    def ends_lap(self, step: int) -> bool:
        """Whether the stopwatch stops after so many steps."""
        return step >= self.warm_up and (step - self.warm_up) % self.lap_steps == 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a contender's process is told beside its trial.

    Args:
        device: "cuda" is GPU 0; "cpu" tries the programs where there is none.
        precision: of forward pass and loss; weights and optimizer are float32 in both.
        pace: how many steps.
    """

    device: DeviceType
    precision: GpuPrecision
    pace: Pace

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward pass and loss."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)


def begin_process(setting: Setting) -> torch.device:
    """Seeds torch, allows TF32 and lets cuDNN look for its fastest algorithms: for every contender alike."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return setting.torch_device
