"""What a program has put around an optimizer's step: hooks, and functions in place of its methods.

    optimizer.register_step_pre_hook(hook)      optimizer.step = wrapped      torch's hooks of all optimizers
                  `-----------> one call of optimizer.step() an update, in one thread <-----------'

A mirrored optimizer updates slices of the weights in its replicas' threads only where nothing of this is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

from torch import nn
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


def around_step(optimizer: Optimizer) -> Sequence[Any]:
    """The hooks of the optimizer's step, those of all optimizers, and what stands in place of it; often nothing."""
    attributes, kind = vars(optimizer), cast("Any", type(optimizer))  # mypy takes no class of optimizers for hashable
    # An optimizer around another one may have no hooks: it need not call Optimizer.__init__.
    hooks, after = attributes.get("_optimizer_step_pre_hooks"), attributes.get("_optimizer_step_post_hooks")
    of_all = optimizer_post_hooks or any(hook is not refuse_plain_step for hook in optimizer_pre_hooks.values())
    if not hooks and not after and not of_all and "step" not in attributes and _is_original(kind, kind.step):
        return ()  # at every update, several times
    callables = [*(hooks or {}).values(), *(after or {}).values(), *optimizer_post_hooks.values()]
    callables += [hook for hook in optimizer_pre_hooks.values() if hook is not refuse_plain_step]
    callables += [step for step in [replaced_step(optimizer)] if step is not None]
    return callables if _is_original(kind, kind.step) else [*callables, kind.step]


@lru_cache(maxsize=256)
def _is_original(kind: Any, step: Any) -> bool:
    """Whether the step of an optimizer's class is not one that a program has set on a class of torch's."""
    while step is not None and kind.__module__.startswith("torch.optim."):
        if not _is_in_torch(step):
            return False
        step = getattr(step, "__wrapped__", None)  # torch wraps the step of each class for its hooks
    return True


def _is_in_torch(function: Any) -> bool:
    return bool(getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."))


class StepHookWarnings:
    """Warns, once for each, of what is around the step of an optimizer and is not what it is on one device.

    ``holds`` says what the optimizer holds of the model's weights; empty for all of them.
    """

    def __init__(self, optimizer: Optimizer, holds: str) -> None:
        self._optimizer, self._holds = optimizer, holds
        self._warned: set[int] = set()

    def look(self, around: Sequence[Any]) -> None:
        """Warns of hooks that see a part of the model, given what is around the step."""
        if around and self._holds and (fresh := [hook for hook in around if id(hook) not in self._warned]):
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

    def look_at_partial(self, around: Sequence[Any], partial: Sequence[nn.Parameter]) -> None:
        """Warns once of gradients that are not those of one device, given what is around the step and may read them."""
        if 1 not in self._warned:
            self._warned.add(1)
            warnings.warn(
                f"{', '.join(map(_name, around))} is called around {type(self._optimizer).__name__}.step, while "
                f"{len(partial)} tensors of weights that the optimizer does not hold have gradients, the first of "
                f"shape {tuple(partial[0].shape)}; these are neither summed over the replicas nor divided, and what "
                "reads them gets other numbers than on one device: give the optimizer all weights that need a "
                "gradient, and requires_grad_(False) to the others",
                stacklevel=2,
            )


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
