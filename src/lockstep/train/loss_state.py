"""What a loss function keeps from call to call: told in the first step, for every replica calls it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lockstep.mirroring.module import MirroredModule
from lockstep.strategies.first_run import captured_by, state_of
from lockstep.train.loss_parts import name_of


@contextmanager
def telling_of_state(loss: Any, replicas: int) -> Iterator[None]:
    """Around a step, outside replicas: warns of numbers and containers of the loss that the step has changed.

    Args:
        loss: that was given to ``compile``.
        replicas: how many call it.
    """
    if replicas == 1 or isinstance(loss, MirroredModule):
        yield
        return
    before = {name: (value, state_of(value)) for name, value in _kept_by(loss)}
    yield
    now = dict(_kept_by(loss))
    changed = [name for name, (_, state) in before.items() if name in now and state_of(now[name]) != state]
    if changed:
        warnings.warn(
            f"the loss {name_of(loss)} changes {', '.join(map(repr, changed))}, which every one of {replicas} replicas "
            "does, and more often than there are steps; what its value depends on is changed by a callback, in "
            "on_train_batch_begin",
            stacklevel=3,
        )


def _kept_by(loss: Any) -> Iterator[tuple[str, Any]]:
    """By name, what the function has captured, or what is kept in a module or a part of it."""
    yield from captured_by(loss)
    if isinstance(loss, nn.Module):
        for path, part in loss.named_modules():
            kept = {**vars(part), **part._buffers}
            for name, value in kept.items():
                if type(value) in (int, float) or (name in part._buffers and value is not None):
                    yield f"{path}.{name}" if path else name, value if type(value) in (int, float) else id(value)
