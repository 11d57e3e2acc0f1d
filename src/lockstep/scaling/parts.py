"""Where the time of one step went, from the moments that its clocks saw. Pure arithmetic; the parts add up to the step.

asked --input--> given --start--> [ replica: began --forward--> --backward--> --update--> settled ] --> ended
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lockstep.mirroring.update_times import UpdateTimes

PARTS = ("input", "forward", "backward", "exchange", "update", "waiting", "other")
"""The parts of a step, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class ReplicaMarks:
    """Moments of one replica's step, in seconds of ``time.perf_counter()``.

    Args:
        began_s: the step function was entered.
        forward_s: the loss of the shard was there.
        backward_s: its gradients were.
        settled_s: the update was done and the gradients cleared.
    """

    began_s: float
    forward_s: float
    backward_s: float
    settled_s: float


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Milliseconds of one step; all but the step and the input are means over the replicas.

    Args:
        step: from the end of the step before to the end of this one.
        input: until the next global batch was there, divided and on its devices.
        forward: the module and its loss.
        backward: the gradients.
        exchange: summing gradients over the replicas.
        update: dividing, updating, clearing the gradients.
        waiting: for other replicas: for a turn where they share cores, for the slowest at the update, for its end.
            What the slowest itself spends on a meeting is not waiting.
        other: what is left: starting the replicas, their meetings, and collecting what they return.
    """

    step: float
    input: float
    forward: float
    backward: float
    exchange: float
    update: float
    waiting: float
    other: float


def step_times(
    *,
    asked_s: float,
    given_s: float,
    ended_s: float,
    replicas: Sequence[ReplicaMarks],
    updates: Sequence[UpdateTimes | None],
) -> StepTimes:
    """The times of a step.

    Args:
        asked_s: the end of the step before, when the next batch was asked for.
        given_s: the batch was there.
        ended_s: all replicas had returned.
        replicas: one item per replica.
        updates: likewise; None for an update that was skipped.
    """
    done = [times for times in updates if times is not None]
    spent = {
        "input": given_s - asked_s,
        "forward": fmean(marks.forward_s - marks.began_s for marks in replicas),
        "backward": fmean(marks.backward_s - marks.forward_s for marks in replicas),
        "exchange": fmean(times.exchange_s if times else 0.0 for times in updates),
        "update": fmean(map(_update_s, replicas, updates)),
        "waiting": _longer_than_the_shortest([marks.began_s for marks in replicas])
        + _longer_than_the_shortest([times.opened_s - times.arrived_s for times in done])
        + _longer_than_the_shortest([times.closed_s - times.updated_s for times in done]),
    }
    step_s = ended_s - asked_s
    spent["other"] = step_s - sum(spent.values())
    return StepTimes(step=1000 * step_s, **{part: 1000 * seconds for part, seconds in spent.items()})


def mean_times(steps: Sequence[StepTimes]) -> StepTimes:
    """The mean of each part; they add up to the mean step."""
    return StepTimes(**{name: fmean(getattr(step, name) for step in steps) for name in ("step", *PARTS)})


def _longer_than_the_shortest(seconds: Sequence[float]) -> float:
    """The mean of what each spends beyond the one that spends least, which waits for nobody."""
    return fmean(seconds) - min(seconds) if seconds else 0.0


def _update_s(marks: ReplicaMarks, times: UpdateTimes | None) -> float:
    """With what comes after: clearing the gradients, and on a GPU that was waited for, the rest of its work."""
    return 0.0 if times is None else times.update_s + (marks.settled_s - times.closed_s)
