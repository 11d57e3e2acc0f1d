"""Says in which steps of a training its losses are checked, and in which rows are followed through modules. Pure.

Checks cost forward passes, so there are several at first and then ever fewer.
"""

from __future__ import annotations

FIRST_STEPS = 8
THROUGH_STEPS = 2
"""Modules are followed in so many steps: in the first, a layer of zeros may hide what comes before it."""
ALL_CHECKED_FROM = 512
"""From this step on modules are followed again. Between, only the loss: following a module costs about as much as a
step (four forward passes). All checks together take 1% of 2,000 tiny steps of a loop, and of 3,200 of ``fit``."""


def is_due(step: int, *, on_cpu: bool = True) -> bool:
    """Whether losses are checked in this step of a training, counted from 1.

    On a CPU in the first eight, of which some may lack a mask, a class or an event, and in the 16th, 32nd, 64th, ... On
    a GPU in the first alone: the host would have to wait for the results, and captured steps cannot.
    """
    return step == 1 or (on_cpu and step > 0 and (step <= FIRST_STEPS or step.bit_count() == 1))


def follows_modules(step: int) -> bool:
    """Whether rows are followed through modules in this step of a training, if its loss is checked."""
    return 0 < step <= THROUGH_STEPS or (step >= ALL_CHECKED_FROM and step.bit_count() == 1)
