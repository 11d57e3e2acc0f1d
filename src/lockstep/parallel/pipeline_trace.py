"""Pipeline traces: which worker does what from when to when, measured or simulated. Pure, on numbers.

2 workers, 2 microbatches      worker 0   F0 F1    .. B0 B0 .. B1 B1
                               worker 1   .. F0 B0 B0 F1 B1 B1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import ConfigError

ActionKind = Literal["forward", "backward", "inputs", "weights"]
"""A backward pass is whole, or split: the gradients of the stage's inputs, and of its weights."""
COSTS: Mapping[ActionKind, float] = {"forward": 1.0, "backward": 2.0, "inputs": 1.0, "weights": 1.0}
"""Costs of the layers of one worker. A backward pass has two products for each one of a forward pass."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """The computation of one microbatch in one stage."""

    kind: ActionKind
    stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    """An action with its times, in any unit."""

    action: Action
    begin: float
    end: float


Orders = Sequence[Sequence[Action]]  # per worker of a pipeline, its actions in a step
Cost = Callable[[Action], float]  # how long an action takes


@dataclass(frozen=True, kw_only=True)
class PipelineTrace:
    """A step of a pipeline: per worker its actions, in order."""

    workers: tuple[tuple[Slot, ...], ...]

    @property
    def begin(self) -> float:
        return min(slot.begin for slots in self.workers for slot in slots)

    @property
    def length(self) -> float:
        """The time from the first action of all to the end of the last."""
        return max(slot.end for slots in self.workers for slot in slots) - self.begin

    @property
    def bubble(self) -> float:
        """The share of that time in which a worker is idle, on average over the workers."""
        busy = sum(slot.end - slot.begin for slots in self.workers for slot in slots)
        return 1 - busy / (len(self.workers) * self.length)


def textbook_bubble(workers: int, microbatches: int) -> float:
    """The idle share of GPipe's and 1F1B's step: (S-1)/(M+S-1)."""
    return (workers - 1) / (microbatches + workers - 1)


def simulate(orders: Orders, cost: Cost | None = None) -> PipelineTrace:
    """The trace of a step in which only actions take time.

    ``cost`` is that of each action; None is ``COSTS``, divided among the stages of a worker. Raises ConfigError if
    workers wait for each other in a circle.
    """
    # A worker's layers are divided among its stages, and so is the cost.
    stages_per_worker = max(len({action.stage for action in order}) for order in orders)
    takes = cost or (lambda action: COSTS[action.kind] / stages_per_worker)
    last = max(action.stage for order in orders for action in order)
    ends: dict[Action, float] = {}
    slots: list[list[Slot]] = [[] for _ in orders]
    before = -1
    # Workers wait for each other, so each advances as far as it can until none does; if actions are left then, they
    # wait in a circle.
    while before < len(ends):
        before = len(ends)
        for order, worker_slots in zip(orders, slots, strict=True):
            _advance(order, worker_slots, ends, takes, last)
    stuck = [
        order[len(worker_slots)]
        for order, worker_slots in zip(orders, slots, strict=True)
        if len(worker_slots) < len(order)
    ]
    if stuck:
        raise ConfigError(f"the workers of this schedule wait for each other in a circle, one before {stuck[0]}")
    return PipelineTrace(workers=tuple(tuple(worker_slots) for worker_slots in slots))


def _advance(order: Sequence[Action], slots: list[Slot], ends: dict[Action, float], takes: Cost, last: int) -> None:
    """Runs one worker until it waits for an action that has not ended."""
    for action in order[len(slots) :]:
        needs = [[need for need in either if need in ends] for either in _needs(action, last)]
        if not all(needs):
            return
        ready = max([0.0, *(ends[need] for either in needs for need in either)])
        begin = max(ready, slots[-1].end) if slots else ready
        ends[action] = begin + takes(action)
        slots.append(Slot(action=action, begin=begin, end=ends[action]))


def _needs(action: Action, last: int) -> list[list[Action]]:
    """The actions that must end before, each time one of several."""

    def of(stage: int, *kinds: ActionKind) -> list[Action]:
        return [Action(kind=kind, stage=stage, microbatch=action.microbatch) for kind in kinds]

    if action.kind == "forward":
        return [of(action.stage - 1, "forward")] if action.stage else []
    if action.kind == "weights":
        return [of(action.stage, "inputs")]
    forward = of(action.stage, "forward")
    return [forward] if action.stage == last else [forward, of(action.stage + 1, "backward", "inputs")]
