"""``lockstep plan``: which layout trains a model fastest on given devices. Pure functions; no device is needed.

shapes       the sizes of a model, from a name, a folder or a config; counting counts its modules, in model_shape
assumptions  what is assumed of the training program: number formats, what overlaps, efficiencies
hardware     devices, links, collectives
division     degrees, schedule, what each pipeline worker gets
memory, cost what a layout needs, and how long its step takes
search       all layouts, ranked: begin reading at ``plan``
"""

from lockstep_tools.plan.search import Choices, Plan, plan

__all__ = ["Choices", "Plan", "plan"]
