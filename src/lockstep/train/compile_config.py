"""What ``Model.compile`` was given, checked: one frozen object that the steps read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from lockstep.errors import ConfigError
from lockstep.train.metrics import check_metrics
from lockstep.train.precision import PrecisionName

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """The settings of training.

    Args:
        loss: ``loss(outputs, targets)``, returning per-example values, a pair (total, count), or a scalar mean.
        metrics: name to torchmetrics Metric.
        precision: "fp32", "bf16" or "fp16".
        accumulate: global batches per update.
        clip_norm: the largest global norm of the gradients, or None.
        graphs: whether a GPU may record whole steps and replay them.

    Raises:
        ConfigError: a value that cannot be used.
    """

    loss: Loss
    metrics: Mapping[str, Any] = field(default_factory=dict)
    precision: PrecisionName = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    graphs: bool = True

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise ConfigError(
                f"loss is a {type(self.loss).__name__}; give a function loss(outputs, targets), such as "
                "torch.nn.CrossEntropyLoss(), which of several outputs adds up the losses"
            )
        if isinstance(self.loss, type):
            name = self.loss.__name__
            raise ConfigError(f"loss is the class {name}; give an instance, {name}(), or a function")
        if self.precision not in get_args(PrecisionName):
            raise ConfigError(f"precision={self.precision!r} is unknown; choose 'fp32', 'bf16' or 'fp16'")
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ConfigError(f"accumulate={self.accumulate!r}; give the number of global batches per update")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm={self.clip_norm!r}; give a positive norm, or None for no clipping")
        if type(self.graphs) is not bool:
            raise ConfigError(f"graphs={self.graphs!r}; give True to let a GPU record whole steps, or False")
        object.__setattr__(self, "metrics", check_metrics(self.metrics))
