"""A plain optimizer's step inside a replica is refused where its parameters are mirrored.

It would go unnoticed: every replica would step the same weights with the gradients of its own shard. torch calls
global hooks before every optimizer's step; this one asks whether the optimizer should have been mirrored.
"""

from __future__ import annotations

import functools
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
