"""The ambient strategy: ``with strategy.scope()`` sets it, ``get_strategy`` finds it. There is no other such state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from lockstep.errors import UsageError
from lockstep.replicas.context import get_replica_context

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy

_ambient: ContextVar[Strategy | None] = ContextVar("lockstep_strategy", default=None)


def has_strategy() -> bool:
    """Whether this code runs inside a strategy's scope or replica."""
    return _ambient.get() is not None


def in_cross_replica_context() -> bool:
    """Whether this code runs once for all replicas: in a scope and outside a replica, or in a ``merge_call``."""
    return has_strategy() and get_replica_context() is None


def current_strategy() -> Strategy | None:
    """The strategy whose scope or replica this is; None outside."""
    return _ambient.get()


@contextmanager
def entered(strategy: Strategy) -> Iterator[Strategy]:
    """Makes ``strategy`` the ambient one. Entering it again inside itself is fine.

    Raises:
        UsageError: another strategy's scope is open.
    """
    outer = _ambient.get()
    if outer is not None and outer is not strategy:
        raise UsageError(
            f"{strategy!r} cannot be used inside the scope of {outer!r}; leave that scope first, or use one strategy"
        )
    token = _ambient.set(strategy)
    try:
        yield strategy
    finally:
        _ambient.reset(token)
