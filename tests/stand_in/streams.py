"""Streams and events with vector clocks: what has certainly happened before what, whatever a device would do.

A stream counts what is queued on it. It knows of every other stream how far that had come at the last event that it
waits for, directly or through others: what is behind that may still be running.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch.utils._python_dispatch import TorchDispatchMode

Clock = Counter[str]
"""Of each stream, by name, up to which of its works everything is done."""


@dataclass(eq=False)
class Stream:
    """A queue of work.

    Args:
        name: the logical device's, or what it is for.
        clock: what runs before the next work that is queued.
    """

    name: str
    clock: Clock = field(default_factory=Counter)

    @property
    def now(self) -> int:
        """The number of the last work."""
        return self.clock[self.name]

    def advance(self) -> int:
        """Queues a work; gives its number."""
        self.clock[self.name] += 1
        return self.now

    def learn(self, clock: Clock) -> None:
        """What is queued next runs behind all that ``clock`` knows."""
        self.clock |= clock

    def knows(self, name: str, number: int) -> bool:
        """Whether what is queued next runs behind that work of that stream."""
        return self.clock[name] >= number


@dataclass(eq=False)
class Event:
    """A place in a stream.

    Args:
        name: the stream's, and the number of its last work.
        clock: the stream's when it was recorded.
        passed: whether the device has come there.
    """

    name: str
    clock: Clock
    passed: bool


class BesideCompiledCode(TorchDispatchMode):
    """A mode under which compiled code runs. It is off while torch compiles."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
