"""``lockstep plan``: which layout trains a model fastest on given devices. Pure functions on numbers; no device needed.

model -> ModelShape --.
devices, links -------+-- search: layouts -- memory (do they fit?) -- predict (how long is a step?) -- Plan
"""

from lockstep.plan.devices import DEVICE_KINDS, DeviceKind, device_kind
from lockstep.plan.known import KNOWN_SHAPES
from lockstep.plan.layout import Layout
from lockstep.plan.links import LINKS, Link, Network, parse_link
from lockstep.plan.memory import Memory, estimate_memory
from lockstep.plan.plan import plan
from lockstep.plan.predict import Prediction, predict
from lockstep.plan.read import shape_of
from lockstep.plan.search import LOCKSTEP, Choices, Plan, Refusal, Setting, search
from lockstep.plan.settings import Constants, Precision, Software
from lockstep.plan.shape import Kept, ModelShape

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
