"""``lockstep plan``: which layout trains a model fastest on given devices. Pure functions; no device is needed.

shapes    a model as numbers              software  what is assumed of the training program
hardware  devices, links, collectives     division  degrees, schedule, what each pipeline worker gets
memory, cost                              what a layout needs, and how long its step takes
search    all layouts, ranked: begin reading at ``plan``
"""

from lockstep_tools.plan.search import Choices, Plan, plan

__all__ = ["Choices", "Plan", "plan"]
