"""The side effects of torch's launcher on the process around it, and what undoes them.

It sets signal handlers, logs warnings, runs ``__main__`` again in every worker, and leaves an empty folder.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOGGERS = (
    "torch.distributed.elastic",
    "torch.multiprocessing",
    "torchelastic-events-null",
    "torchelastic-events-dynamic_rendezvous",
)


@contextmanager
def hide_main() -> Iterator[None]:
    """Hides the file of ``__main__`` from multiprocessing while processes are started.

    It would run that file again in every worker to find functions there by name, but ours are pickled by value. So a
    script needs no ``if __name__ == "__main__"``, and nothing at its top runs N times.
    """
    main = sys.modules["__main__"]
    hidden = ModuleType("__main__")
    hidden.__spec__ = None
    sys.modules["__main__"] = hidden
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def restore_signal_handlers() -> Iterator[list[signal.Signals]]:
    """Puts back the signal handlers that were there before; torch sets its own and leaves them.

    Yields the signals that were ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    # torch 2.13 (``PContext.start``) handles SIGTERM, SIGINT, SIGHUP and SIGQUIT from the first start on, and never
    # puts back what was there.
    before = {number: signal.getsignal(number) for number in _HANDLED_SIGNALS}
    try:
        yield [number for number, handler in before.items() if handler == signal.SIG_IGN]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def handle_sigterm_once(ignored: Iterable[signal.Signals]) -> None:
    """Has the first SIGTERM end the workers as torch's handler does, and ignores later ones while the workers save.

    Many senders send it twice: ``timeout`` sends it to its child and to its child's process group. What
    ``restore_signal_handlers`` found ignored is ignored again: ``nohup`` ignores SIGHUP, and torch handles it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end_workers)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def _end_workers(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # with SIG_IGN Python complains of one that has come
    raise SignalException(f"process {os.getpid()} got SIGTERM", sigval=signal.SIGTERM)


@contextmanager
def remove_empty_compiler_folder() -> Iterator[None]:
    """Removes the folder for compiled code that importing torch's compiler makes, if it is new and empty.

    The fork server of the workers imports the compiler because torch's optimizers import it at their first step.
    """
    before = _compiler_folders()
    try:
        yield
    finally:
        for folder in _compiler_folders() - before:
            with suppress(OSError):  # it has compiled code in it, to be used again
                folder.rmdir()


def _compiler_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("torchinductor_*"))


@contextmanager
def silence_torch_launcher() -> Iterator[None]:
    """Keeps what torch's launcher logs from the terminal: our own messages say what matters of it."""
    handler = logging.NullHandler()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        # A handler alone is not enough: torch's loggers would pass their records on to the root logger of the program.
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
