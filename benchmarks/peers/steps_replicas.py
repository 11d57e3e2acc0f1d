"""The strategy of our programs of the suite ``steps``."""

from __future__ import annotations

from program import Job

import lockstep as ls


def strategy_of(job: Job) -> ls.MirroredStrategy:
    """One replica on each part of the CPU."""
    (cpu,) = ls.config.list_physical_devices("CPU")
    parts = [ls.config.LogicalDeviceConfiguration() for _ in range(job.replicas)]
    ls.config.set_logical_device_configuration(cpu, parts)
    return ls.MirroredStrategy(seed=0)
