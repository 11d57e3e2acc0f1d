"""A call that may hang, made so that its caller does not hang with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_LOOK_EVERY_S = 0.25


def call_watched(call: Callable[[], T], check: Callable[[], None], name: str = "lockstep-call") -> T:
    """What ``call`` returns or raises, or what ``check`` raises while waiting for it: then the call is left to itself.

    Args:
        call: runs in a thread of its own, which ends with the interpreter if it never returns.
        check: called four times a second.
        name: the thread's name.
    """
    done: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(call, done), name=name, daemon=True).start()
    while True:
        try:
            return done.result(_LOOK_EVERY_S)
        except TimeoutError:
            if done.done():  # just now; or it is the call's own error
                return done.result()
            check()


def _fulfil(call: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(call())
    except BaseException as raised:  # noqa: BLE001 - not swallowed: whoever waits for the call raises it
        done.set_exception(raised)
