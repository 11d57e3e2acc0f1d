"""Refuses what would count several times in a step: a plain optimizer's step, and settings of parameter groups.

All local replicas share one optimizer, so a scheduler that is stepped in each of them would count once for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.errors import UsageError
from lockstep.replicas.context import get_replica_context

IN_LOCKSTEP = "_lockstep_part"
"""The mark of an optimizer that a mirrored one steps itself, a slice of the user's."""


def refuse_plain_step(optimizer: Optimizer, *_: Any) -> None:
    """The hook.

    Raises:
        UsageError: a replica, one of several, steps an optimizer over mirrored parameters that is not mirrored.
    """
    context = get_replica_context()
    if context is None or context.num_replicas_in_sync == 1 or IN_LOCKSTEP in optimizer.__dict__:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stepped & context.strategy.mirrored_parameters():
        raise UsageError(
            f"{type(optimizer).__name__}.step was called in one replica on parameters that all replicas share; "
            "mirror the optimizer, optimizer = strategy.mirror(optimizer), and step that one"
        )


@functools.cache
def watch_plain_steps() -> None:
    """Registers the hook, process-wide and once."""
    register_optimizer_step_pre_hook(refuse_plain_step)


_PLAIN = (int, float, str, bool, tuple, type(None))


def plain_settings(optimizer: Optimizer) -> list[str]:
    """What is alike in equal optimizers: a line for the kind, and one per group of parameters."""
    groups = [
        ", ".join(f"{name}={value}" for name, value in sorted(group.items()) if isinstance(value, _PLAIN))
        + f", {len(group['params'])} parameters"
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]


def guard_groups(optimizer: Optimizer) -> None:
    """Refuses from now on what sets a hyperparameter in a replica, one of several of this process. Idempotent."""
    groups = optimizer.param_groups
    for at, group in enumerate(groups):
        if type(group) is dict:
            groups[at] = _Group(group)


def _outside(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def change(self: _Group, *args: Any, **kwargs: Any) -> Any:
        context = get_replica_context()
        if context is not None and len(context.strategy.devices) > 1:
            what = f"{args[0]!r}" if args and isinstance(args[0], str) else "settings"
            raise UsageError(
                f"the step sets {what} of the optimizer in each of {len(context.strategy.devices)} replicas, which "
                "share it, so a scheduler would count several times; call scheduler.step(), or set the value, after "
                "strategy.run"
            )
        return plain(self, *args, **kwargs)

    return change


class _Group(dict[str, Any]):
    """One group; copied and pickled as the plain dict that it stands for."""

    __setitem__ = _outside("__setitem__")
    __delitem__ = _outside("__delitem__")
    __ior__ = _outside("__ior__")
    update = _outside("update")
    setdefault = _outside("setdefault")
    pop = _outside("pop")
    popitem = _outside("popitem")
    clear = _outside("clear")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())
