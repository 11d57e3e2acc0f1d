"""Suite ``peers``: the suite ``cpu`` beside Accelerate, Lightning Fabric, TensorFlow and JAX as well."""

from __future__ import annotations

from argparse import ArgumentParser

from benchmarks.suites import cpu
from benchmarks.suites.cpu import PACE, measure

__all__ = ["PACE", "flags", "measure"]


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    cpu.flags(parser)
    parser.set_defaults(peers="also")
