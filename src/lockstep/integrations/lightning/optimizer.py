"""The optimizers that Lightning gets in place of those of ``configure_optimizers``: a step is one of all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.strategies.base import Strategy


class LightningStep(MirroredOptimizer):
    """A mirrored optimizer for Lightning, which calls ``step(closure)`` outside replicas; the step is that of all."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        super().step()
        self.plain._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        return loss

    # A scheduler warns unless the step of its optimizer has this, which it sets on the plain one (torch 2.13).
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def mirror_optimizer(strategy: Strategy, optimizer: Optimizer) -> LightningStep:
    """Mirrors an optimizer of Lightning's. Its class has the name of the plain one's, which callbacks log."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"configure_optimizers returned a {type(optimizer).__name__}, whose update is no step of a "
            "torch.optim.Optimizer; return an optimizer of torch"
        )
    mirrored: Any = strategy.mirror(optimizer)
    object.__setattr__(mirrored, "__class__", type(type(optimizer).__name__, (LightningStep,), {}))
    result: LightningStep = mirrored
    return result
