"""A command that divides a model among workers, and was started without any: it is run again in workers of its own.

    lockstep train mlm --pipeline 2 --tensor 2        one process: parses, and starts
        worker 0 ... worker 3                         the same words, as under lockstep run

The workers live in sessions of their own: Ctrl-C reaches this process, which ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.errors import ClusterError, LockstepError

# What every worker would import for itself, seconds each, is imported once in the process that they are forked from.
_PRELOADED = (
    "lockstep.cli.app",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchmetrics",
    "transformers.models.bert.modeling_bert",
)


@dataclass(frozen=True, kw_only=True)
class InWorkers:
    """What a command returns that is to be run again.

    Args:
        workers: in how many processes.
    """

    workers: int

    def run(self, again: Callable[[Sequence[str]], object], words: Sequence[str]) -> int:
        """Calls ``again(words)`` in all of them, of which the chief is heard; returns what it returned, an exit code.

        Raises:
            LockstepError: what a worker raised first.
            ClusterError: a worker failed with any other error, or was lost.
        """
        from lockstep.launch.agent import Limits  # torch's launcher takes 0.1 s to import
        from lockstep.launch.jobs import FunctionJob

        job = FunctionJob(workers=self.workers, limits=Limits(), preloaded=_PRELOADED)
        try:
            return int(job.run(again, (tuple(words),), {}))
        except ClusterError as error:
            ended = error.__cause__
            if isinstance(ended, SystemExit) and isinstance(ended.code, int):
                return ended.code  # as after SIGTERM to a worker: all have saved
            if isinstance(ended, LockstepError):  # which says all that there is to say
                raise ended  # noqa: B904 - its own cause is the worker's traceback
            raise
