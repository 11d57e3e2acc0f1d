"""What each worker of a host gets of its cores and its GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.errors import ConfigError


def visible_gpus(environment: Mapping[str, str], present: int) -> tuple[str, ...]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them.

    Args:
        environment: of the process.
        present: how many there are without that variable.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(str(number) for number in range(present))
    return tuple(name.strip() for name in named.split(",") if name.strip() and name.strip() != "-1")


def gpu_shares(gpus: Sequence[str], workers: int, gpus_per_worker: int | None = None) -> tuple[tuple[str, ...], ...]:
    """The GPUs of every worker of a host, in worker order: neighbours, each GPU at one worker only.

    Args:
        gpus: the names of those there are.
        workers: how many share them.
        gpus_per_worker: how many each gets, 0 for none; None divides all of them.

    Raises:
        ConfigError: there are too few.
    """
    if gpus_per_worker is None and gpus and workers > len(gpus):
        raise ConfigError(
            f"workers={workers} were asked for and there are {len(gpus)} GPUs; expected at least one GPU for each,"
            f" since NCCL takes one worker per GPU: start {len(gpus)} workers, or give gpus_per_worker=0 to train on"
            " the CPU"
        )
    each = len(gpus) // workers if gpus_per_worker is None else gpus_per_worker
    if each * workers > len(gpus):
        raise ConfigError(
            f"gpus_per_worker={each} for {workers} workers needs {each * workers} GPUs and there are {len(gpus)};"
            " start fewer workers or give each fewer"
        )
    return tuple(tuple(gpus[worker * each : (worker + 1) * each]) for worker in range(workers))


def gpu_variables(share: Sequence[str]) -> dict[str, str]:
    """The variables of a worker that is to see ``share`` alone.

    They are its GPUs 0 and on, so LOCAL_RANK is 0, as under torchrun's --virtual-local-rank: a program that takes GPU
    LOCAL_RANK takes its own.
    """
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(share)}
    return {**shown, "LOCAL_RANK": "0"} if share else shown


def threads_each(environment: Mapping[str, str], cores: int, workers: int) -> int:
    """The intra-op threads of each worker: its part of the cores, or what the user has set in OMP_NUM_THREADS."""
    wanted = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else max(1, cores // workers)
