"""What each worker of a host gets of its cores and GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.cluster.local import OWN_GPUS
from lockstep.errors import ConfigError


def visible_gpus(environment: Mapping[str, str], present: int) -> tuple[str, ...]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them; torch sees ``present``."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(str(number) for number in range(present))
    return tuple(name.strip() for name in named.split(",") if name.strip())[:present]


def divide_host(
    environment: Mapping[str, str], *, workers: int, cores: int, gpus: Sequence[str], gpus_per_worker: int | None
) -> tuple[dict[str, str], ...]:
    """The environment variables that give every worker of a host its resources, in worker order.

    OMP_NUM_THREADS: all cores divided by the workers, unless the user has set it. CUDA_VISIBLE_DEVICES: neighbouring
    GPUs, each GPU for one worker only. A worker sees its own GPUs as 0, 1, ..., so LOCAL_RANK is 0, as with torchrun's
    --virtual-local-rank: a program that takes GPU LOCAL_RANK takes one of its own.

    ``gpus_per_worker``: 0 for none; None divides all of them. Raises ConfigError if there are too few GPUs.
    """
    threads = {} if environment.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(max(1, cores // workers))}
    if not gpus and not gpus_per_worker:
        return tuple(dict(threads) for _ in range(workers))
    each = _gpus_each(len(gpus), workers, gpus_per_worker)
    shares = [gpus[worker * each : (worker + 1) * each] for worker in range(workers)]
    own = {"LOCAL_RANK": "0", OWN_GPUS: "1"} if each else {}
    return tuple({**threads, "CUDA_VISIBLE_DEVICES": ",".join(share), **own} for share in shares)


def _gpus_each(gpus: int, workers: int, gpus_per_worker: int | None) -> int:
    there = "is 1 GPU" if gpus == 1 else f"are {gpus} GPUs"
    if gpus_per_worker is None and workers > gpus:
        raise ConfigError(
            f"{workers} workers were given but there {there}, expected one GPU for each worker because NCCL takes one "
            f"worker per GPU; start {gpus} workers, or give 0 GPUs per worker to train on the CPU"
        )
    each = gpus // workers if gpus_per_worker is None else gpus_per_worker
    if each < 0 or each * workers > gpus:
        raise ConfigError(
            f"{each} GPUs were given for each of {workers} workers but there {there}; start fewer workers or give each "
            "fewer GPUs"
        )
    return each
