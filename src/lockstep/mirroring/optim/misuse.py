"""Refuses what a mirrored step cannot do: the step of a plain optimizer, and changes of its settings.

All local replicas share one optimizer, so a scheduler that is stepped in each of them would count once for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.errors import UsageError
from lockstep.replicas.context import get_replica_context

IN_LOCKSTEP = "_lockstep_part"
"""An attribute of the slices of the user's optimizer, which a mirrored one steps."""
_PLAIN = (int, float, str, bool, tuple, type(None))


# A ContextVar, since the hook below sees the steps of all threads.
_refused_ids: ContextVar[frozenset[int]] = ContextVar("lockstep_refused_weights", default=frozenset())


@contextmanager
def refusing_steps_over(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """A block of an update in which no optimizer may step these: weights of the model that it does not update.

    Their gradients are those of the rows of each replica, neither summed nor divided by the count.
    """
    token = _refused_ids.set(frozenset(map(id, weights)))
    try:
        yield
    finally:
        _refused_ids.reset(token)


def refuse_plain_step(optimizer: Optimizer, *_: Any) -> None:
    """Raises UsageError for a step over mirrored parameters by an optimizer that is not mirrored.

    In one of several replicas, or around the step of a mirrored optimizer that does not hold them.
    """
    # A hook of the mirrored optimizer's step may step another optimizer: docs/concepts/hooks.md.
    if (refused := _refused_ids.get()) and any(
        id(weight) in refused for group in optimizer.param_groups for weight in group["params"]
    ):
        raise UsageError(
            f"{type(optimizer).__name__}.step was called around the step of another optimizer, over weights that only "
            "it holds, whose gradients are neither summed over the replicas nor divided; give compile one optimizer "
            "over all weights, with a group of parameters for each part, or mirror both in a loop of your own: "
            "strategy.mirror(optimizer) and step them one after the other"
        )
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
    """Has every step of a torch optimizer checked, process-wide; registered once."""
    # Of all optimizers: the plain one of a step may be made at any time, also in the step, and by any library.
    register_optimizer_step_pre_hook(refuse_plain_step)


def plain_settings(optimizer: Optimizer) -> list[str]:
    """What equal optimizers have in common: a line for the kind, and one for each group of parameters."""
    groups = [
        ", ".join(f"{name}={value}" for name, value in sorted(group.items()) if isinstance(value, _PLAIN))
        + f", {len(group['params'])} parameters"
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]


def guard_groups(optimizer: Optimizer) -> None:
    """Refuses from now on that one of several replicas of this process sets a hyperparameter. Idempotent."""
    groups = optimizer.param_groups
    for at, group in enumerate(groups):
        # In place of torch's plain dicts, since torch has no hook on a setting; load_state_dict makes plain ones again.
        if type(group) is dict:
            groups[at] = _Group(group)


def _checked(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def change(self: _Group, *args: Any, **kwargs: Any) -> Any:
        context = get_replica_context()
        if context is not None and len(context.strategy.devices) > 1:
            what = f"{args[0]!r}" if args and isinstance(args[0], str) else "settings"
            raise UsageError(
                f"the step sets {what} of the optimizer in each of {len(context.strategy.devices)} replicas, so a "
                "scheduler would count several times; call scheduler.step(), or set the value, after strategy.run"
            )
        return plain(self, *args, **kwargs)

    return change


class _Group(dict[str, Any]):
    """A group of parameters; copied and pickled as a plain dict."""

    __setitem__ = _checked("__setitem__")
    __ior__ = _checked("__ior__")
    update = _checked("update")

    # A checkpoint must not name this class: torch.load(weights_only=True) and programs without lockstep read it.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())
