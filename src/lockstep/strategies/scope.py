"""The ambient strategy: ``with strategy.scope()`` sets it, ``get_strategy`` returns it. Nothing else is ambient."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from lockstep.errors import UsageError
from lockstep.replicas.context import get_replica_context

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy

_open: ContextVar[tuple[Strategy, ...]] = ContextVar("lockstep_scopes", default=())
"""The open scopes, the innermost last: all of one strategy. A value, so that no scope object has a state of its own."""


def has_strategy() -> bool:
    """Whether this code runs inside a strategy's scope or replica."""
    return bool(_open.get())


def in_cross_replica_context() -> bool:
    """Whether this code runs once for all replicas: in a scope and outside a replica, or in a ``merge_call``."""
    return has_strategy() and get_replica_context() is None


def current_strategy() -> Strategy | None:
    """The strategy whose scope or replica this is; None outside."""
    scopes = _open.get()
    return scopes[-1] if scopes else None


class Scope(ContextDecorator):
    """What ``strategy.scope()`` returns: makes the strategy the ambient one, as often as wanted, also inside itself."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __enter__(self) -> Strategy:
        """Raises a UsageError if another strategy's scope is open, or if this is inside a replica."""
        if get_replica_context() is not None:
            raise UsageError(
                "a scope is for all replicas together and was entered inside one; enter it outside strategy.run"
            )
        outer = current_strategy()
        if outer is not None and outer is not self._strategy:
            raise UsageError(
                f"{self._strategy!r} cannot be used inside the scope of {outer!r}; leave that scope first, or use one "
                "strategy"
            )
        _open.set((*_open.get(), self._strategy))
        return self._strategy

    def __exit__(self, *_: object) -> None:
        _open.set(_open.get()[:-1])

    def __repr__(self) -> str:
        return f"<scope of {self._strategy!r}>"
