"""Whose store this is, and which run of the job is to be joined: settled before a worker writes anything else there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep.membership.board import OWNER_KEY, REFUSED_KEY, place_of, read, run_key
from lockstep.membership.card import read_card, this_process
from lockstep.membership.deadline import Deadline
from lockstep.membership.line import Line, StoreBrokenError
from lockstep.membership.peers import Peers
from lockstep.membership.status import Status, read_status

NOT_OPENED = "its store is there, but worker 0 has not opened the job yet"
SILENT_S = 3.0
"""After how long without a sign of life a process counts as gone, as far as its place is concerned."""

_TURN_S = 0.2
_LONGEST_NOTE = 300


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The newest run: its name, worker 0's status and card, and why it ended; all empty before the first one."""

    name: str
    status: Status
    card: str
    ending: str


def claim_store(store: Store, spec: ClusterSpec) -> None:
    """Makes sure that the store is this job's. A process of another job leaves no more than a note that it was here.

    Raises:
        ClusterError: it is another job's.
        StoreBrokenError: it is nobody's yet.
    """
    mine = json.dumps({"job_id": spec.job_id, "workers": spec.workers})
    found = store.compare_set(OWNER_KEY, "", mine if spec.index == 0 else "").decode()
    if not found:
        raise StoreBrokenError(NOT_OPENED)
    owner = json.loads(found)
    if owner["job_id"] != spec.job_id:
        own = _describe(spec.job_id, spec.workers)
        store.set(REFUSED_KEY, f"{this_process()}, of {own}")
        raise ClusterError(
            f"{spec.name(spec.index)} is of {own}, but the store at {spec.workers[0]} is that of {_describe(**owner)}. "
            "Give all workers of a job the same cluster and job id, and every job a port of its own"
        )


def open_run(line: Line, spec: ClusterSpec, deadline: Deadline, silent_s: float) -> str:
    """Opens a run, for worker 0: the first, or the next one where a launcher's store has seen one come to its end.

    A worker 0 of an earlier run that was killed has not said that it ended; ``silent_s`` seconds without a sign of
    life are enough.

    Raises:
        ClusterError: another process is worker 0 of a run that goes on.
    """
    peers, pause = Peers(1, -1, time.monotonic()), threading.Event()
    while True:
        run = line.call(lambda store: _newest_run(store, spec), deadline.left_s)
        peers.hear([run.status], time.monotonic())
        is_over = not run.name or run.ending or run.status.ended
        if is_over or peers.silence(0, time.monotonic())[0] > silent_s:
            return line.call(_following(run.name, spec), deadline.left_s)
        if peers.signs_of_life(0) > 1:
            raise there_already(spec, run.card)
        deadline.wait_for("an earlier run of this job to end", "end its processes")
        pause.wait(_TURN_S)


def there_already(spec: ClusterSpec, card: str) -> ClusterError:
    """The error for a process whose place another one has, which left ``card`` there."""
    return ClusterError(
        f"{spec.name(spec.index)} is there already: {read_card(card).process}; this is {this_process()}. "
        "Give every process an index of its own, or end that one first"
    )


def _newest_run(store: Store, spec: ClusterSpec) -> _Run:
    name = read(store, run_key(spec))
    place = place_of(spec, name or "0")
    return _Run(
        name=name,
        status=read_status(read(store, place.beat(0))),
        card=read(store, place.seat(0)),
        ending=read(store, place.ending),
    )


def _following(run: str, spec: ClusterSpec) -> Callable[[Store], str]:
    following = str(int(run or "0") + 1)
    return lambda store: store.compare_set(run_key(spec), run, following).decode()


def _describe(job_id: str, workers: Sequence[str]) -> str:
    return f"job {job_id!r} with the workers {', '.join(workers)}"[:_LONGEST_NOTE]
