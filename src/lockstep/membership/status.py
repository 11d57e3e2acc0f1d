"""The beat of a worker: what each one writes into the store again and again while it lives. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Status:
    """A worker's last word.

    Args:
        beat: grows with each; a beat that stays the same is silence.
        doing: what the worker was doing.
        ended: it has left the job in good order, or has said why it ends.
        warned: it has read that the chief or the job ends, so that the store may go.
    """

    beat: int
    doing: str = ""
    ended: bool = False
    warned: bool = False

    def to_text(self) -> str:
        """As it is kept in the store."""
        return json.dumps(asdict(self))


def read_status(text: str) -> Status:
    """A status as it was kept in the store; an empty or unreadable one is a worker that has not spoken yet."""
    try:
        return Status(**json.loads(text))
    except (ValueError, TypeError):
        return Status(beat=-1)
