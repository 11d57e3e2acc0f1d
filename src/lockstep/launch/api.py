"""``ls.launch``: a function in fresh worker processes of this host, from a notebook, a script or a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lockstep.checks import check_path, shown
from lockstep.errors import ConfigError

R = TypeVar("R")


def launch(
    fn: Callable[..., R],
    *,
    workers: int,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    gpus_per_worker: int | None = None,
    max_restarts: int = 0,
    timeout_s: float | None = None,
    log_dir: str | Path | None = None,
) -> R:
    """Runs ``fn`` in ``workers`` fresh processes on this host and returns the chief's result.

    In the function, ``MultiWorkerMirroredStrategy()`` finds the other workers by itself, and so does torch's
    ``init_process_group()``. The function and its arguments are pickled by value (cloudpickle), so a notebook cell or a
    script may define ``fn``, without ``if __name__ == "__main__"``. The chief's output is shown as it comes. The
    workers, and the processes that they started, end with this call, however it ends, and with this process.

    Args:
        fn: the function that every worker runs.
        workers: the number of processes.
        args: its arguments, the same on all workers.
        kwargs: its keyword arguments, the same on all workers.
        gpus_per_worker: how many GPUs each worker sees, 0 for none; None divides all of them.
        max_restarts: how often all workers are restarted after one has failed.
        timeout_s: seconds after which the workers are ended, with 30 s more for those that save; None for no limit.
        log_dir: a folder for a log file of each worker, ``worker-0.log`` and so on; None keeps none.

    Raises:
        ConfigError: ``workers`` is not positive, or there are fewer GPUs than asked for.
        ClusterError: a worker failed; the error names it, and its own exception is the cause. Or the workers took too
            long; a note says where each of them stood.
        SystemExit: SIGTERM came, which this process does not handle itself, and the workers ended with an exit code of
            their own, such as the 75 of ``BackupAndRestore``: that code.

    Example:
        >>> import os
        >>> import lockstep as ls
        >>> ls.launch(lambda: os.environ["RANK"], workers=2)
        '0'
    """
    if not callable(fn):
        raise ConfigError(f"fn is a {type(fn).__name__}, expected the function that every worker runs")
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping | None):
        arguments = f"args={shown(args)}, kwargs={shown(kwargs)}"
        raise ConfigError(
            f"{arguments} was given, expected a tuple of fn's arguments and a dict of its keyword arguments"
        )
    from lockstep.launch.agent import Limits  # torch's launcher takes 0.1 s to import
    from lockstep.launch.jobs import FunctionJob

    job = FunctionJob(
        workers=workers,
        gpus_per_worker=gpus_per_worker,
        max_restarts=max_restarts,
        limits=Limits(timeout_s=timeout_s),
        log_dir=None if log_dir is None else Path(check_path(log_dir, "log_dir")),
    )
    result: R = job.run(fn, tuple(args), dict(kwargs or {}))
    return result
