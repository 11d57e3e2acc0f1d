"""A command that divides a model among workers but was started without any: it runs again in workers of its own.

    lockstep train mlm --pipeline 2 --tensor 2        one process parses the arguments, and starts
        worker 0 ... worker 3                         which run with the same arguments, as under lockstep run

The workers are in sessions of their own: Ctrl-C reaches only this process, which ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.errors import ClusterError, LockstepError

# Imported once in the process that the workers are forked from; in each worker they would take seconds.
_PRELOADED = (
    "lockstep.cli.app",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchmetrics",
    "transformers.models.bert.modeling_bert",
)


@dataclass(frozen=True, kw_only=True)
class InWorkers:
    """Returned by a job that is to run again in ``workers`` processes."""

    workers: int

    def run(self, command: Callable[[Sequence[str]], object], arguments: Sequence[str]) -> int:
        """Calls ``command(arguments)`` in all workers, showing the chief's output, and returns the exit code.

        Raises:
            LockstepError: what a worker raised first.
            ClusterError: a worker failed with any other error, or was lost.
        """
        from lockstep.launch.agent import Limits  # torch's launcher takes 0.1 s to import
        from lockstep.launch.jobs import FunctionJob

        job = FunctionJob(workers=self.workers, limits=Limits(), preloaded=_PRELOADED)
        try:
            return int(job.run(command, (tuple(arguments),), {}))
        except ClusterError as error:
            cause = error.__cause__
            if isinstance(cause, SystemExit) and isinstance(cause.code, int):
                return cause.code  # as after SIGTERM to a worker: all have saved
            if isinstance(cause, LockstepError):
                raise cause  # noqa: B904 - its own cause is the worker's traceback
            raise
