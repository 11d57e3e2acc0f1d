"""What all workers do at once, each of which may fail: then all of them raise, and none goes on alone."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.collectives.communicator import Workers
from lockstep.errors import CheckpointError


def fault_of(act: Callable[[], None]) -> str:
    """Acts, and says what went wrong; an empty text where nothing did."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  all workers raise it, as soon as they know of it
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return ""


def check_faults(workers: Workers, name: str, fault: str) -> None:
    """Raises on all workers what went wrong on any. Every worker must call it.

    Args:
        workers: this worker's view of all.
        name: what this call is for.
        fault: what went wrong here; empty where nothing did.

    Raises:
        CheckpointError: the first worker's fault.
    """
    faults = [told.decode() for told in workers.exchange_bytes(name, fault.encode())]
    for number, theirs in enumerate(faults):
        if theirs:
            raise CheckpointError(theirs if workers.alone else f"{workers.names[number]}: {theirs}")


def on_everyone(workers: Workers, name: str, act: Callable[[], None]) -> None:
    """Lets every worker act. Every worker must call it.

    Raises:
        CheckpointError: one of them failed.
    """
    check_faults(workers, name, fault_of(act))
