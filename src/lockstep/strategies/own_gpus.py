"""Which devices a worker takes where its program names none, and whether those of all workers suit NCCL."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cluster.local import place_here
from lockstep.cluster.spec import ClusterSpec
from lockstep.config import LogicalDevice, list_logical_devices, list_physical_devices
from lockstep.errors import ClusterError


def own_devices(cluster: ClusterSpec | None) -> tuple[LogicalDevice, ...]:
    """This worker's part of the GPUs that it sees, divided or not; without any, the CPU's logical devices.

    Args:
        cluster: who takes part; None is this process alone, which takes all.

    Raises:
        ClusterError: the launcher's variables are malformed.
    """
    gpus = list_physical_devices("GPU")
    if not gpus:
        return tuple(list_logical_devices("CPU"))
    own = {gpus[number].name for number in place_here(cluster).own_gpus(len(gpus))}
    return tuple(device for device in list_logical_devices("GPU") if device.physical.name in own)


def each_has_its_own(gpus: Sequence[int]) -> bool:
    """Whether every worker has a GPU, and no two the same one, as NCCL wants it.

    Args:
        gpus: a number for the GPU of each worker; 0 where it has a CPU.
    """
    return all(gpus) and len(set(gpus)) == len(gpus)


def check_gpus(names: Sequence[str], gpus: Sequence[int]) -> None:
    """Holds the workers of a divided model to a GPU each, or to none.

    Args:
        names: how the workers are called in messages.
        gpus: as for ``each_has_its_own``.

    Raises:
        ClusterError: some have a GPU and others none, or two have the same one.
    """
    if not any(gpus) or each_has_its_own(gpus):
        return
    if not all(gpus):
        with_one = next(name for name, gpu in zip(names, gpus, strict=True) if gpu)
        raise ClusterError(
            f"{with_one} has a GPU and {names[gpus.index(0)]} a CPU, and the workers that divide a model have devices "
            "of one kind; name one with device= on every worker"
        )
    second = next(worker for worker, gpu in enumerate(gpus) if gpu in gpus[:worker])
    different = len(set(gpus))
    raise ClusterError(
        f"{len(gpus)} workers have {different} GPU{'s' * (different != 1)}, and NCCL takes one worker per GPU: "
        f"{names[gpus.index(gpus[second])]} and {names[second]} have the same one; start {different}, or show each "
        "worker a GPU of its own, as lockstep run does"
    )
