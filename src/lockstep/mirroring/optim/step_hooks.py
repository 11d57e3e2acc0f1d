"""What a program has put around an optimizer's step: hooks, and functions in place of its methods.

    optimizer.register_step_pre_hook(hook)      optimizer.step = wrapped      torch's hooks of all optimizers
                  `-----------> one call of optimizer.step() an update, in one thread <-----------'

A mirrored optimizer updates slices of the weights in its replicas' threads only where nothing of this is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from lockstep._torch_compat import optimizer_post_hooks, optimizer_pre_hooks
from lockstep.mirroring.optim.misuse import refuse_plain_step


def replaced_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The function that a program has set as ``optimizer.step``; None for the method of its class.

    Torch's schedulers set a function too, which only notes that a step was taken.
    """
    step = vars(optimizer).get("step")
    while step is not None and _is_schedulers(step):
        method = step.__wrapped__
        step = None if method is getattr(type(optimizer), "step", None) else method
    return step


def _is_schedulers(step: Any) -> bool:
    # By its globals: functools.wraps copies the mark "_wrapped_by_lr_sched" to a function that wraps it once more.
    return getattr(step, "__globals__", None) is vars(lr_scheduler) and hasattr(step, "__wrapped__")


def around_step(optimizer: Optimizer) -> list[Any]:
    """The hooks of the optimizer's step, those of all optimizers, and what stands in place of it; often nothing."""
    own = vars(optimizer)  # an optimizer around another one may have no hooks: it need not call Optimizer.__init__
    found = [*own.get("_optimizer_step_pre_hooks", {}).values(), *own.get("_optimizer_step_post_hooks", {}).values()]
    found += [hook for hook in optimizer_pre_hooks.values() if hook is not refuse_plain_step]
    found += optimizer_post_hooks.values()
    if "step" in own and (step := replaced_step(optimizer)) is not None:
        found.append(step)
    return found


class StepHookWarnings:
    """Warns, once for each, of what is around the step of an optimizer and is not what it is on one device.

    ``holds`` says what the optimizer holds of the model's weights; empty for all of them.
    """

    def __init__(self, optimizer: Optimizer, holds: str) -> None:
        self._optimizer, self._holds = optimizer, holds
        self._warned: set[int] = set()

    def look(self, around: list[Any]) -> None:
        """Warns of hooks that see a part of the model, given what is around the step."""
        if around and self._holds and (fresh := [each for each in around if id(each) not in self._warned]):
            self._warned.update(map(id, fresh))
            warnings.warn(
                f"{', '.join(map(_name, fresh))} is called around {type(self._optimizer).__name__}.step, and sees "
                f"{self._holds}; what it does to each number by itself is as on one device, and norms or sums over the "
                "model are not: use clip_norm=, the optimizer's settings or a callback for these",
                stacklevel=2,
            )
        if "zero_grad" in vars(self._optimizer) and 0 not in self._warned:
            self._warned.add(0)
            warnings.warn(
                f"{type(self._optimizer).__name__}.zero_grad was replaced on the object, and a mirrored optimizer "
                "clears the gradients of all replicas without calling it; use a post hook of the step",
                stacklevel=2,
            )


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
