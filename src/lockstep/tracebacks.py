"""Shorter tracebacks in IPython and notebooks, and after Ctrl-C: the frames of this package are left out.

IPython leaves out a frame whose locals hold ``__tracebackhide__``, unless it is the last, and says how many it left
out. So a traceback that ends in functions of this package which torch has called in place of its own ends with torch's
call, and that of an error that this package raises on purpose with the user's.
``get_ipython().InteractiveTB.skip_hidden = False`` shows all frames. Elsewhere the tracebacks of errors stay as they
are; that of a KeyboardInterrupt keeps the user's frames alone, since where this package was waiting says nothing.
"""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Any

_HIDDEN = (__name__.partition(".")[0], "torch.nn.modules.module", "threading")
"""Packages and modules: ours, the wrappers that call a module's ``forward``, and the waiting for replicas."""


class OwnFramesHidden:
    """A block of a function that users call: frames of an exception that leaves it are marked, or left out."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        ipython = sys.modules.get("IPython")
        shell = ipython and ipython.get_ipython()
        if error is not None and shell is not None:
            hide_own_frames(error)
            shown = _without_hidden_end(error.__traceback__)
            if shell.InteractiveTB.skip_hidden and _ends_in_torch(shown):
                error.__traceback__ = shown
        elif isinstance(error, KeyboardInterrupt):
            error.__traceback__ = _without_own_frames(error.__traceback__)


def rendered_by_ipython(error: BaseException) -> list[str]:
    """The lines that IPython shows of an error which this package raised on purpose."""
    hide_own_frames(error)
    formatter: Any = sys.modules["IPython"].get_ipython().InteractiveTB
    shown = _without_hidden_end(error.__traceback__) if formatter.skip_hidden else error.__traceback__
    lines: list[str] = formatter.structured_traceback(type(error), error, shown)
    return lines


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
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            pending += [each.__cause__, each.__context__]
            _hide(each.__traceback__, all_frames=isinstance(each, KeyboardInterrupt))


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
