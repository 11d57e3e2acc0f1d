"""Shorter tracebacks, where Python or IPython prints one that has frames of this package, and after Ctrl-C.

An error that this package raises on purpose and nobody catches is printed with the frames of the user's program alone,
and any other with those that one device would show: the user's, and torch's below them. The exception keeps its frames:
a debugger, pytest and ``logging.exception`` have all of them. With ``LOCKSTEP_TRACEBACK=full`` all are printed.

IPython leaves out a frame whose locals hold ``__tracebackhide__``, unless it is the last, and says how many it left
out. So a traceback that ends in functions of this package which torch has called in place of its own ends with torch's
call, and that of an error that this package raises on purpose with the user's.
``get_ipython().InteractiveTB.skip_hidden = False`` shows all frames. A KeyboardInterrupt keeps the user's frames alone,
since where this package was waiting says nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, format_exception
from types import FrameType, TracebackType
from typing import Any

_HIDDEN = ("lockstep", "lockstep_tools", "torch.nn.modules.module", "threading", "contextlib")
"""Packages and modules: ours, the wrappers that call a module's ``forward``, and what calls threads and contexts."""

LOCKSTEP_FOLDERS = tuple(f"{Path(__file__).parents[1] / name}/" for name in ("lockstep", "lockstep_tools"))
"""Where the files of the engine and of its tools are; a file of any other folder is the user's or a library's."""

_BETWEEN = (threading.__file__, contextlib.__file__)  # call the user's functions for this package
_CALLS_FORWARD = "/torch/nn/modules/module.py"
_CALLS_MODE = "/torch/overrides.py"  # between a function of torch and the replica's function mode, which calls it anew

FULL_VARIABLE = "LOCKSTEP_TRACEBACK"
"""The environment variable with which tracebacks have all frames, if it is "full"."""


def shows_all_frames() -> bool:
    """Whether the user has asked for all frames."""
    return os.environ.get(FULL_VARIABLE) == "full"


class OwnFramesHidden:
    """A block of a function that users call: frames of an exception that leaves it are marked, or left out."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        ipython = sys.modules.get("IPython")
        shell = ipython and ipython.get_ipython()
        if error is None or shows_all_frames():
            return
        if shell is not None:
            hide_own_frames(error)
            shown = _without_hidden_end(error.__traceback__)
            if shell.InteractiveTB.skip_hidden and _ends_in_torch(shown):
                error.__traceback__ = shown
        elif isinstance(error, KeyboardInterrupt):
            error.__traceback__ = _without_own_frames(error.__traceback__)


def rendered_by_ipython(error: BaseException, base: type[BaseException]) -> list[str]:
    """The lines that IPython shows of an error which this package raised on purpose, of class ``base``."""
    formatter: Any = sys.modules["IPython"].get_ipython().InteractiveTB
    if not shows_all_frames():
        hide_own_frames(error)
    if shows_all_frames() or not formatter.skip_hidden:
        lines: list[str] = formatter.structured_traceback(type(error), error, error.__traceback__)
        return lines
    cause = error.__cause__
    shown = _cause_for_user(cause, base)
    if shown is not cause:
        error.__cause__ = shown  # IPython follows the attribute; this hides the context too, as any cause does
    try:
        lines = formatter.structured_traceback(type(error), error, _without_hidden_end(error.__traceback__))
    finally:
        if shown is not cause:
            error.__cause__ = cause
    return lines


def _cause_for_user(cause: BaseException | None, base: type[BaseException]) -> BaseException | None:
    """The first cause that is not of class ``base`` or has a frame of the user's."""
    while isinstance(cause, base) and _without_hidden_end(cause.__traceback__) is None:
        cause = cause.__cause__
    return cause


def shorten_uncaught(base: type[BaseException], note_of: Callable[[BaseException], str | None]) -> None:
    """From now on Python prints uncaught exceptions as ``format_for_user`` does, with a note if ``note_of`` has one.

    Those without frames of this package are printed as before. A ``sys.excepthook`` that another package has set is
    called with the shorter traceback.
    """
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if note := note_of(error):
            error.add_note(note)
        if sys.stderr is None or shows_all_frames():
            previous(kind, error, traceback)
        elif not isinstance(error, base):
            with _as_on_one_device(error, base):
                previous(kind, error, frames_of_one_device(traceback))
        elif previous is sys.__excepthook__:
            sys.stderr.write(format_for_user(error, traceback, base))
        else:
            previous(kind, error, _without_own_frames(traceback) or traceback)

    sys.excepthook = excepthook


def exit_with_code_of(code_of: Callable[[BaseException], int]) -> None:
    """From now on an uncaught exception ends the process with the code that ``code_of`` has for it. Idempotent.

    It is printed as before. To be called once the exception is foreseen: ``torch.distributed.init_process_group`` puts
    a hook of its own in place, which prints nothing if the one before it raises (torch 2.13).
    """
    if isinstance(sys.excepthook, _ExitCodeHook):
        return
    sys.excepthook = _ExitCodeHook(sys.excepthook, code_of)


class _ExitCodeHook:
    """Calls another hook, and ends the process. Python exits as SystemExit says if it leaves ``sys.excepthook``."""

    def __init__(self, previous: Callable[..., object], code_of: Callable[[BaseException], int]) -> None:
        self._previous, self._code_of = previous, code_of

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._previous(kind, error, traceback)
        if (code := self._code_of(error)) != 1:
            raise SystemExit(code)


def format_for_user(error: BaseException, traceback: TracebackType | None, base: type[BaseException]) -> str:
    """The text of an uncaught exception as Python prints it, without frames of this package.

    One of class ``base`` and its causes keep the user's frames alone. A cause without any is shown by its message, and
    one of class ``base`` not at all: the message of the error that it led to has what it says.
    """
    if shows_all_frames():
        return "".join(format_exception(type(error), error, traceback))
    if not isinstance(error, base):
        with _as_on_one_device(error, base):
            return "".join(format_exception(type(error), error, frames_of_one_device(traceback)))
    whole = TracebackException(type(error), error, traceback)
    if frames := _user_frames(whole.stack, ends_with_user=True):
        whole.stack = frames
    _shorten_causes(whole, error, base)
    return "".join(whole.format())


@contextlib.contextmanager
def _as_on_one_device(error: BaseException, base: type[BaseException]) -> Iterator[None]:
    """A block in which an exception, and those that led to it, have the traceback that one device would show.

    One of class ``base`` has the user's frames alone.
    """
    whole = [(link, link.__traceback__) for link in _chain(error)]
    for link, traceback in whole:
        users = _without_own_frames(traceback) if isinstance(link, base) else None
        link.__traceback__ = users or frames_of_one_device(traceback)
    try:
        yield
    finally:
        for link, traceback in whole:
            link.__traceback__ = traceback


def frames_of_one_device(traceback: TracebackType | None) -> TracebackType | None:
    """A copy of the traceback without frames of this package and what calls for it; unchanged if it has none.

    A last frame of this package stays, unless torch has called it in place of its own function. All frames stay where
    the user has asked for them.
    """
    entries = _entries(traceback)
    shown: list[TracebackType] = []
    for entry in entries:
        if not _is_own(entry):
            shown.append(entry)
        elif shown and _file(shown[-1]).endswith(_CALLS_MODE):
            del shown[-2:]  # the function of torch that asked the mode has a second frame below, from the mode's call
    if len(shown) == len(entries) or shows_all_frames():
        return traceback
    calls = [entry for entry in shown[:-1] if not _is_between(_file(entry))]
    last = [] if _stands_for_torch(entries) else entries[-1:]
    return _chained([*calls, *shown[-1:], *(last if _is_own(entries[-1]) else [])])


def _stands_for_torch(entries: list[TracebackType]) -> bool:
    """Whether a traceback's frames of this package at its end begin with the function mode that torch asks."""
    first = len(entries)
    while first and _is_own(entries[first - 1]):
        first -= 1
    return first < len(entries) and entries[first].tb_frame.f_code.co_name == "__torch_function__"


def _shorten_causes(shown: TracebackException, error: BaseException, base: type[BaseException]) -> None:
    for name in ("__cause__", "__context__"):
        cause, actual = getattr(shown, name), getattr(error, name)
        if cause is None:  # an exception that stands twice in the chain is shown once
            continue
        _shorten_causes(cause, actual, base)
        is_own = isinstance(actual, base)
        cause.stack = _user_frames(cause.stack, ends_with_user=is_own) or None
        if is_own and cause.stack is None:
            setattr(shown, name, cause.__cause__)


def _user_frames(stack: StackSummary, *, ends_with_user: bool) -> StackSummary:
    """The frames that are not hidden; ``ends_with_user`` leaves out torch's at the end too."""
    frames = [frame for frame in stack if not _is_hidden_file(frame)]
    while ends_with_user and frames and "/torch/" in frames[-1].filename:
        frames.pop()
    return StackSummary.from_list(frames)


def _is_hidden_file(frame: FrameSummary) -> bool:
    return frame.filename.startswith(LOCKSTEP_FOLDERS) or _is_between(frame.filename)


def _is_between(name: str) -> bool:
    return name.endswith(_CALLS_FORWARD) or name in _BETWEEN


def _is_own(entry: TracebackType) -> bool:
    return _file(entry).startswith(LOCKSTEP_FOLDERS)


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _without_hidden_end(traceback: TracebackType | None) -> TracebackType | None:
    """A copy of the traceback up to the last frame that is not hidden."""
    entries = _entries(traceback)
    while entries and _is_hidden(entries[-1].tb_frame):
        entries.pop()
    return _chained(entries)


def _ends_in_torch(traceback: TracebackType | None) -> bool:
    entries = _entries(traceback)
    return bool(entries) and _module(entries[-1].tb_frame).startswith("torch.")


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """A copy of the traceback without the frames that are hidden."""
    return _chained([entry for entry in _entries(traceback) if not _is_hidden(entry.tb_frame)])


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _chained(entries: list[TracebackType]) -> TracebackType | None:
    """A traceback of copies of these entries."""
    first = None
    for entry in reversed(entries):
        first = TracebackType(first, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return first


def hide_own_frames(error: BaseException) -> None:
    """Marks the frames of this package in the tracebacks of an error and of those that led to it.

    After Ctrl-C all frames below the caller's are marked: where the program was waiting says nothing.
    """
    for link in _chain(error):
        _hide(link.__traceback__, all_frames=isinstance(link, KeyboardInterrupt))


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those that led to it."""
    chain: dict[int, BaseException] = {}
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in chain:
            chain[id(link)] = link
            pending += [link.__cause__, link.__context__]
    return list(chain.values())


def _hide(traceback: TracebackType | None, *, all_frames: bool) -> None:
    while traceback is not None:
        if all_frames or _is_hidden(traceback.tb_frame):
            traceback.tb_frame.f_locals["__tracebackhide__"] = True
        traceback = traceback.tb_next


def _is_hidden(frame: FrameType) -> bool:
    module = _module(frame)
    return any(module == name or module.startswith(f"{name}.") for name in _HIDDEN)


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name
