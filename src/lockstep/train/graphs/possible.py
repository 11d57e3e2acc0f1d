"""Whether the steps of a job can be recorded at all: what is known before the first of them."""

from __future__ import annotations

from torch import nn

from lockstep.replicas.device.driver import DeviceDriver, driver_of
from lockstep.strategies.base import Strategy
from lockstep.train.graphs.unfit import UnfitError
from lockstep.train.job import Job


def driver_for(strategy: Strategy) -> DeviceDriver | None:
    """The driver of the one device that all replicas are on; None where there is no device that records.

    Raises:
        UnfitError: there is one, but not one for all.
    """
    devices = strategy.devices
    driver = driver_of(devices[0])
    if driver is None:
        return None
    if not strategy.workers.alone:
        raise UnfitError("several workers exchange gradients, and a recorded step cannot wait for another process")
    if len({device.physical.name for device in devices}) > 1:
        raise UnfitError("the replicas are on several GPUs, and only those of one GPU are recorded together")
    return driver


def refuse(job: Job) -> None:
    """Finds what cannot be recorded in a job.

    Raises:
        UnfitError: there is something.
    """
    if job.config.precision == "fp16":
        raise UnfitError('precision="fp16" asks on the host whether gradients overflowed; "bf16" does not')
    if job.module.pipeline is not None or job.module.shares_weights:
        raise UnfitError("the model is divided among workers")
    for part in job.module.module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise UnfitError(
                f"a {type(part).__name__} with sparse=True has gradients of changing size; use sparse=False"
            )
