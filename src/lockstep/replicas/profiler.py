"""Lets ``torch.profiler`` see the replicas: torch keeps for each thread whether it is profiled, and for what.

torch hands this on to threads of its own (``at::ThreadLocalState``) and has no Python for it. The four functions of its
library that are called here are those by which it does so. With a torch that lacks them a run that is profiled
warns.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_SYMBOLS = {
    "current": ("libc10.so", "_ZN3c1020ThreadLocalDebugInfo7currentEv"),
    "set_current": (
        "libc10.so",
        "_ZN3c1020ThreadLocalDebugInfo22_forceCurrentDebugInfoESt10shared_ptrIS0_E",
    ),
    "callbacks": ("libtorch_cpu.so", "_ZN2at24get_record_function_tls_Ev"),
    "set_callbacks": ("libtorch_cpu.so", "_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE"),
}
_SET_NAME = 15  # PR_SET_NAME in <linux/prctl.h>


_is_profiled = torch._C._autograd._profiler_enabled


class _SharedPtr(ctypes.Structure):
    """A ``std::shared_ptr``; the library's functions take it over, and leave an empty one."""

    _fields_ = (("pointer", ctypes.c_void_p), ("counts", ctypes.c_void_p))


class _NoCallbacks(ctypes.Structure):
    """An ``at::RecordFunctionTLS`` as threads begin with it: an empty ``std::vector``, and recording allowed."""

    _fields_ = (("vector", ctypes.c_void_p * 3), ("enabled", ctypes.c_bool))


class Profile:
    """The profile of the thread that made this, for one other thread that works for it while it waits."""

    def __init__(self, library: dict[str, Any]) -> None:
        self._library = library
        self._callbacks = library["callbacks"]()
        self._held = _SharedPtr()
        library["current"](ctypes.byref(self._held))

    @classmethod
    def of_caller(cls) -> Profile | None:
        """The calling thread's; None where it is not profiled, or where torch cannot hand it on, which is warned of."""
        if not _is_profiled():
            return None
        library = _library()
        if library is None:
            warnings.warn(
                f"torch.profiler sees nothing of the replicas with torch {torch.__version__}; profile with "
                "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)",
                stacklevel=2,
            )
            return None
        return cls(library)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """In the other thread: what the block does is in the profile, on that thread's own track."""
        if _is_profiled():  # by a profiler of the replica's own, or one of all threads
            yield
            return
        before = _SharedPtr()
        self._library["current"](ctypes.byref(before))
        self._library["set_current"](ctypes.byref(self._held))
        self._library["set_callbacks"](self._callbacks)
        try:
            yield
        finally:
            self._library["set_callbacks"](ctypes.byref(_NoCallbacks(enabled=True)))
            self._library["set_current"](ctypes.byref(before))


def name_track(name: str) -> None:
    """Names the calling thread as profilers and debuggers show it; its first 15 letters, as Linux has it."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode("ascii"), 0, 0, 0)


@functools.cache
def _library() -> dict[str, Any] | None:
    """Torch's functions for the state of the calling thread; None where it has others."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        found = {name: getattr(ctypes.CDLL(str(folder / file)), symbol) for name, (file, symbol) in _SYMBOLS.items()}
    except (OSError, AttributeError):
        return None
    pointer = ctypes.POINTER(_SharedPtr)
    found["current"].argtypes, found["current"].restype = [pointer], None
    found["set_current"].argtypes, found["set_current"].restype = [pointer], None
    found["callbacks"].argtypes, found["callbacks"].restype = [], ctypes.c_void_p
    found["set_callbacks"].argtypes, found["set_callbacks"].restype = [ctypes.c_void_p], None
    return found
