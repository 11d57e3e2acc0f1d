"""``lockstep plan``: which layout trains a model fastest on given devices. Pure functions; no device is needed.

shapes    a model as numbers              software  what is assumed of the training program
hardware  devices, links, collectives     layout    degrees, schedule, what each pipeline worker gets
memory, cost                              what a layout needs, and how long its step takes
search    all layouts, ranked: begin reading at ``plan``
measure   this machine's figures instead of published ones; the only module that computes with tensors
"""

from lockstep.plan.cost import Prediction, predict
from lockstep.plan.hardware import DEVICE_KINDS, LINKS, DeviceKind, Link, Network, device_kind, parse_link
from lockstep.plan.layout import Layout
from lockstep.plan.memory import Memory, estimate_memory
from lockstep.plan.search import LOCKSTEP, Choices, Infeasible, Plan, Setting, plan, search
from lockstep.plan.shapes import KNOWN_SHAPES, ModelShape, SavedActivations, shape_of
from lockstep.plan.software import Constants, Precision, Software

__all__ = [
    "DEVICE_KINDS",
    "KNOWN_SHAPES",
    "LINKS",
    "LOCKSTEP",
    "Choices",
    "Constants",
    "DeviceKind",
    "Infeasible",
    "Layout",
    "Link",
    "Memory",
    "ModelShape",
    "Network",
    "Plan",
    "Precision",
    "Prediction",
    "SavedActivations",
    "Setting",
    "Software",
    "device_kind",
    "estimate_memory",
    "parse_link",
    "plan",
    "predict",
    "search",
    "shape_of",
]
