"""What each worker of a host gets of its cores and its GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.cluster.local import OWN_GPUS
from lockstep.errors import ConfigError


def visible_gpus(environment: Mapping[str, str], present: int) -> tuple[str, ...]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them.

    Args:
        environment: of the process.
        present: how many torch sees.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(str(number) for number in range(present))
    return tuple(name.strip() for name in named.split(",") if name.strip())[:present]


def share_host(
    environment: Mapping[str, str], *, workers: int, cores: int, gpus: Sequence[str], gpus_per_worker: int | None
) -> tuple[dict[str, str], ...]:
    """The variables that give every worker of a host its share, in worker order.

    Cores: OMP_NUM_THREADS, all cores divided by the workers, unless the user has set it. GPUs: CUDA_VISIBLE_DEVICES,
    neighbours, each GPU at one worker alone. A worker that sees only its own finds them as its GPUs 0 and on, so
    LOCAL_RANK is 0, as under torchrun's --virtual-local-rank: a program that takes GPU LOCAL_RANK takes its own.

    Args:
        environment: the launcher's.
        workers: how many share the host.
        cores: that the launcher may use.
        gpus: the names of those it may use.
        gpus_per_worker: how many each gets, 0 for none; None divides all of them.

    Raises:
        ConfigError: there are too few GPUs.
    """
    threads = {} if environment.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(max(1, cores // workers))}
    if not gpus and not gpus_per_worker:
        return tuple(dict(threads) for _ in range(workers))
    return tuple({**threads, **_gpu_variables(share)} for share in _divide(gpus, workers, gpus_per_worker))


def _divide(gpus: Sequence[str], workers: int, gpus_per_worker: int | None) -> list[Sequence[str]]:
    if gpus_per_worker is None and workers > len(gpus):
        raise ConfigError(
            f"{workers} workers were asked for and there {_are(len(gpus))}, expected one for each, since NCCL takes one"
            f" worker per GPU; start {len(gpus)}, or give 0 GPUs per worker to train on the CPU"
        )
    each = len(gpus) // workers if gpus_per_worker is None else gpus_per_worker
    if each < 0 or each * workers > len(gpus):
        raise ConfigError(
            f"{each} GPUs for each of {workers} workers were asked for and there {_are(len(gpus))}; start fewer workers"
            " or give each fewer"
        )
    return [gpus[worker * each : (worker + 1) * each] for worker in range(workers)]


def _are(gpus: int) -> str:
    return "is 1 GPU" if gpus == 1 else f"are {gpus} GPUs"


def _gpu_variables(share: Sequence[str]) -> dict[str, str]:
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(share)}
    return {**shown, "LOCAL_RANK": "0", OWN_GPUS: "1"} if share else shown
