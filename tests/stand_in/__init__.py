"""Devices of kind "GPU" that compute on the CPU: the engine takes a GPU's path, and what it asked is written down.

    with stand_in_gpus((2048, 2048)) as (devices, driver):
        strategy = ls.MirroredStrategy(devices, seed=0)

Every tensor operation is followed: on which stream it was queued, what it reads and writes, where its memory comes
from. So a missing event is an error although the CPU computes at once; see ``tracking``.
"""

from __future__ import annotations

from tests.stand_in.devices import stand_in_gpus
from tests.stand_in.driver import Logged, StandInDriver
from tests.stand_in.streams import Event, Stream

__all__ = ["Event", "Logged", "StandInDriver", "Stream", "stand_in_gpus"]
