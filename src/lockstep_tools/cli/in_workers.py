"""What a command returns that is to run again in several workers, and the flag that continues an interrupted run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.errors import ClusterError, LockstepError

# Imported once in the process that the workers are forked from; in each worker they would take seconds.
_PRELOADED = (
    "lockstep_tools.cli.app",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.bert.modeling_bert",
)

ResumeFlag = Callable[[], str | None]
"""Finds the flag that continues an interrupted run, such as "--resume"; None if nothing was saved."""


def nothing_saved() -> None:
    """The ResumeFlag of what saves nothing."""


@contextmanager
def naming_what_resumes(find_flag: ResumeFlag) -> Iterator[None]:
    """After Ctrl-C in the block, the last line names the flag that continues the run, if there is one then."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if flag := find_flag():
            interrupt.add_note(f"the same command with {flag} continues it")
        raise


@dataclass(frozen=True, kw_only=True)
class InWorkers:
    """Returned by a job that is to run again in ``workers`` processes; ``resume_flag`` finds what resumes it.

    They are in sessions of their own: Ctrl-C reaches only this process, which ends them.
    """

    workers: int
    resume_flag: ResumeFlag = nothing_saved

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
            with naming_what_resumes(self.resume_flag):
                return int(job.run(command, (tuple(arguments),), {}))
        except ClusterError as error:
            cause = error.__cause__
            if isinstance(cause, SystemExit) and isinstance(cause.code, int):
                return cause.code  # as after SIGTERM to a worker: all have saved
            # The worker's error ends this command as if it had been raised here: in one line, without the launcher's
            # around it.
            if isinstance(cause, LockstepError):
                raise cause  # noqa: B904 - its own cause is the worker's traceback
            raise
