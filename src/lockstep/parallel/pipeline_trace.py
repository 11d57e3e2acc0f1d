"""A pipeline's step as a timetable: which worker does what from when to when. Pure, on numbers.

orders: what each worker does, one after another -> timetable: each action as soon as its worker is free, and what
it needs is there

2 workers, 2 microbatches      worker 0   F0 F1    .. B0 B0 .. B1 B1
                               worker 1   .. F0 B0 B0 F1 B1 B1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lockstep.errors import ConfigError

ActionKind = Literal["forward", "backward", "inputs", "weights"]
"""A backward pass is whole, or in two: the gradients of the stage's inputs, and of its weights."""
COSTS: Mapping[ActionKind, float] = MappingProxyType({"forward": 1.0, "backward": 2.0, "inputs": 1.0, "weights": 1.0})
"""Of the layers of one worker. A backward pass is two products for each one of a forward pass."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """What a worker does with one microbatch in one stage."""

    kind: ActionKind
    stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    """An action in time, in any unit."""

    action: Action
    begin: float
    end: float


Orders = Sequence[Sequence[Action]]
"""Per worker of a pipeline, what it does in a step."""
Cost = Callable[[Action], float]
"""How long an action takes."""


@dataclass(frozen=True, kw_only=True)
class PipelineTrace:
    """A step, or what was measured of one.

    Args:
        workers: per worker of the pipeline its actions, in order.
    """

    workers: tuple[tuple[Slot, ...], ...]

    @property
    def begin(self) -> float:
        """Of the first action of all."""
        return min(slot.begin for slots in self.workers for slot in slots)

    @property
    def length(self) -> float:
        """From the first action of all to the end of the last."""
        return max(slot.end for slots in self.workers for slot in slots) - self.begin

    @property
    def bubble(self) -> float:
        """The part of that time in which a worker does nothing, on average over the workers."""
        busy = sum(slot.end - slot.begin for slots in self.workers for slot in slots)
        return 1 - busy / (len(self.workers) * self.length)


def textbook_bubble(workers: int, microbatches: int) -> float:
    """The idle part of GPipe's and 1F1B's step: (S-1)/(M+S-1).

    Example:
        >>> round(textbook_bubble(4, 8), 3)
        0.273
    """
    return (workers - 1) / (microbatches + workers - 1)


def usual_cost(orders: Orders) -> Cost:
    """``COSTS``, divided among the stages of a worker, which are equal parts of its layers."""
    each = max(len({action.stage for action in order}) for order in orders)
    return lambda action: COSTS[action.kind] / each


def simulate(orders: Orders, cost: Cost | None = None) -> PipelineTrace:
    """When everything is done, if nothing takes time but the actions.

    Args:
        orders: what each worker does.
        cost: of each action; None is ``usual_cost``.

    Raises:
        ConfigError: orders in which workers wait for each other in a circle.

    Example:
        >>> forward, backward = (Action(kind=kind, stage=0, microbatch=0) for kind in ("forward", "backward"))
        >>> timetable([[forward, backward]]).length
        3.0
    """
    takes = usual_cost(orders) if cost is None else cost
    last = max(action.stage for order in orders for action in order)
    ends: dict[Action, float] = {}
    slots: list[list[Slot]] = [[] for _ in orders]
    before = -1
    while before < len(ends):
        before = len(ends)
        for order, done in zip(orders, slots, strict=True):
            _go_on(order, done, ends, takes, last)
    stuck = [order[len(done)] for order, done in zip(orders, slots, strict=True) if len(done) < len(order)]
    if stuck:
        raise ConfigError(f"the workers of this schedule wait for each other in a circle, one before {stuck[0]}")
    return PipelineTrace(workers=tuple(tuple(each) for each in slots))


def _go_on(order: Sequence[Action], done: list[Slot], ends: dict[Action, float], takes: Cost, last: int) -> None:
    """One worker, until it waits for something that is not done yet."""
    for action in order[len(done) :]:
        needs = [[need for need in either if need in ends] for either in _needs(action, last)]
        if not all(needs):
            return
        ready = max([0.0, *(ends[need] for either in needs for need in either)])
        begin = max(ready, done[-1].end) if done else ready
        ends[action] = begin + takes(action)
        done.append(Slot(action=action, begin=begin, end=ends[action]))


def _needs(action: Action, last: int) -> list[list[Action]]:
    """What must be done before, each time one of several."""

    def of(stage: int, *kinds: ActionKind) -> list[Action]:
        return [Action(kind=kind, stage=stage, microbatch=action.microbatch) for kind in kinds]

    if action.kind == "forward":
        return [of(action.stage - 1, "forward")] if action.stage else []
    if action.kind == "weights":
        return [of(action.stage, "inputs")]
    own = of(action.stage, "forward")
    return [own] if action.stage == last else [own, of(action.stage + 1, "backward", "inputs")]
