"""``lockstep plan``: which layout trains a model fastest on given devices. Pure functions on numbers; no device needed.

model -> ModelShape --.
devices, links -------+-- search: layouts -- memory (do they fit?) -- predict (how long is a step?) -- Plan
"""

from lockstep.plan.cost import Prediction, predict
from lockstep.plan.hardware import DEVICE_KINDS, LINKS, DeviceKind, Link, Network, device_kind, parse_link
from lockstep.plan.layout import Layout
from lockstep.plan.memory import Memory, estimate_memory
from lockstep.plan.search import LOCKSTEP, Choices, Plan, Refusal, Setting, plan, search
from lockstep.plan.shapes import KNOWN_SHAPES, Kept, ModelShape, shape_of
from lockstep.plan.software import Constants, Precision, Software

__all__ = [
    "DEVICE_KINDS",
    "KNOWN_SHAPES",
    "LINKS",
    "LOCKSTEP",
    "Choices",
    "Constants",
    "DeviceKind",
    "Kept",
    "Layout",
    "Link",
    "Memory",
    "ModelShape",
    "Network",
    "Plan",
    "Precision",
    "Prediction",
    "Refusal",
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
