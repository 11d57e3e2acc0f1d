"""What lies in a job's part of the store: where, and how it is read without waiting."""

from __future__ import annotations

from torch._C._distributed_c10d import Store

from lockstep.cluster.ending import Ending, read_ending

ENDING_KEY = "ending"
COMPLETE_KEY = "complete"


def seat_key(index: int) -> str:
    """Where the entry of a worker's process stands."""
    return f"seat/{index}"


def beat_key(index: int) -> str:
    """Where a worker's status stands."""
    return f"beat/{index}"


def read(store: Store, key: str) -> str:
    """What stands at ``key``, or an empty text; never waits for it to be written, as ``get`` does."""
    return store.compare_set(key, "", "").decode()


def end_job(store: Store, ending: Ending) -> Ending:
    """Writes why the job ends, unless somebody has already; the cause that stands there then."""
    return read_ending(store.compare_set(ENDING_KEY, "", ending.to_text()).decode())
