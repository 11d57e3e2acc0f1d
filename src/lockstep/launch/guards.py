"""What torch's launcher does to the process around it, undone: signal handlers, messages, ``__main__`` run again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOGGERS = (
    "torch.distributed.elastic",
    "torch.multiprocessing",
    "torchelastic-events-null",
    "torchelastic-events-dynamic_rendezvous",
)


@contextmanager
def main_is_not_run_again() -> Iterator[None]:
    """While processes are started: hides from multiprocessing which file ``__main__`` was.

    It would run that file again in every worker, to find functions there by name; ours come by value. So a script
    needs no ``if __name__ == "__main__"``, and nothing that it does at its top is done N times over.
    """
    main = sys.modules["__main__"]
    shown = ModuleType("__main__")
    shown.__spec__ = None
    sys.modules["__main__"] = shown
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def signals_put_back() -> Iterator[None]:
    """Puts the signal handlers back that were there before; torch sets its own and leaves them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in _HANDLED}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def hear_sigterm_once() -> None:
    """Has SIGTERM end the workers as torch's handler does, and is deaf to it from then on, while they save.

    Many senders send it twice: ``timeout`` does, to its child and to its child's group. To be used while
    ``signals_put_back``.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end_workers)


def _end_workers(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # with SIG_IGN Python complains of one that has come
    raise SignalException(f"process {os.getpid()} got SIGTERM", sigval=signal.SIGTERM)


@contextmanager
def no_empty_compiler_folder() -> Iterator[None]:
    """Removes the folder for compiled code that torch makes where it is only imported, if it is new and empty.

    The server of the workers imports torch's compiler, as torch's optimizers do at their first step.
    """
    before = _compiler_folders()
    try:
        yield
    finally:
        for folder in _compiler_folders() - before:
            with suppress(OSError):  # something is in it: code that was compiled, to be used again
                folder.rmdir()


def _compiler_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("torchinductor_*"))


@contextmanager
def torch_is_quiet() -> Iterator[None]:
    """Keeps what torch's launcher logs from the terminal: what matters of it we say ourselves."""
    handler = logging.NullHandler()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
