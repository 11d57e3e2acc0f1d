"""What lies in a job's store, where, and how it is read without waiting.

lockstep/job                         whose store this is: read before anything else is written
lockstep/refused                     the last process of another job that came here by mistake
lockstep/JOB/ATTEMPT/run             how often worker 0 has opened the job; each run has a place of its own:
lockstep/JOB/ATTEMPT/RUN/seat/0 ..   who came, one card each; the first process of a number has its seat
lockstep/JOB/ATTEMPT/RUN/beat/0 ..   each worker's status, again and again
lockstep/JOB/ATTEMPT/RUN/complete    all cards, once every seat is taken and all agree
lockstep/JOB/ATTEMPT/RUN/ending      why the run ended before its time; the first cause stays
"""

from __future__ import annotations

from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from lockstep.cluster.spec import ClusterSpec
from lockstep.membership.ending import Ending, read_ending

OWNER_KEY = "lockstep/job"
REFUSED_KEY = "lockstep/refused"


@dataclass(frozen=True)
class Place:
    """Where one run of a job lies in the store.

    Args:
        prefix: before all its keys.
    """

    prefix: str

    @property
    def complete(self) -> str:
        """The key of all cards."""
        return f"{self.prefix}/complete"

    @property
    def ending(self) -> str:
        """The key of the cause of its end."""
        return f"{self.prefix}/ending"

    def seat(self, index: int) -> str:
        """The key of a worker's card."""
        return f"{self.prefix}/seat/{index}"

    def beat(self, index: int) -> str:
        """The key of a worker's status."""
        return f"{self.prefix}/beat/{index}"

    def end(self, store: Store, ending: Ending) -> Ending:
        """Writes why the run ends, unless somebody has already; the cause that stands there then."""
        return read_ending(store.compare_set(self.ending, "", ending.to_text()).decode())


def run_key(spec: ClusterSpec) -> str:
    """The key of how often this attempt of the job has been opened."""
    return f"lockstep/{spec.job_id}/{spec.attempt}/run"


def place_of(spec: ClusterSpec, run: str) -> Place:
    """Where a run of this attempt of the job lies."""
    return Place(f"lockstep/{spec.job_id}/{spec.attempt}/{run}")


def read(store: Store, key: str) -> str:
    """What stands at ``key``, or an empty text; never waits for it to be written, as ``get`` does."""
    return store.compare_set(key, "", "").decode()
