"""One checkpoint that all workers write: begun by the chief, filled by each, completed by the chief.

begin     chief: the folder aside -> its path to all
write     each: files of its own                               possibly in a thread
complete  all tell how that went -> chief: the rest, the record, the rename
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

from lockstep.checkpoint.checkpoint import Held
from lockstep.checkpoint.everyone import check_faults, on_everyone
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.record import Contents, Fill
from lockstep.collectives.communicator import Workers, on_chief
from lockstep.errors import CheckpointError


class SharedWriting:
    """The writing of one checkpoint. Every worker must make one, which begins it.

    Args:
        workers: all that write.
        folder: of the checkpoints.
        contents: complete on the chief but for what is held.
        held: what this worker writes.

    Raises:
        CheckpointError: it cannot be begun, or a worker does not see the folder; nothing is left behind.
    """

    def __init__(self, workers: Workers, folder: CheckpointFolder, contents: Contents, held: Held) -> None:
        self._workers, self._contents, self._held = workers.everyone, contents, held
        self._stack = ExitStack()
        self._partial = Path()
        self._fill: Fill | None = None
        on_chief(self._workers, "checkpoint begun", lambda: self._begin(folder))
        path = self._partial.absolute().as_posix() if self._workers.is_chief else ""
        self._partial = Path(self._workers.chiefs_bytes("the folder of the checkpoint", path.encode()).decode())
        try:
            on_everyone(self._workers, "the folder of the checkpoint seen", self._look)
        except BaseException as error:
            self.abandon(error)
            raise

    def write(self) -> None:
        """Writes what this worker holds.

        Raises:
            OSError: it cannot be written.
        """
        from lockstep.checkpoint.held_tensors import write_held

        for folder, held in self._held.items():
            if held:
                write_held(held, self._partial / folder, number=self._workers.index, of=self._workers.size)

    def complete(self, fault: str) -> None:
        """Gives the checkpoint its name, if all have written theirs. Every worker must call it.

        Args:
            fault: what went wrong with this worker's; empty where nothing did.

        Raises:
            CheckpointError: a worker could not write, or the chief cannot now; nothing is left behind.
        """
        try:
            check_faults(self._workers, "checkpoint filled", fault)
        except BaseException as error:
            self.abandon(error)
            raise
        on_chief(self._workers, "checkpoint written", self._finish)

    def abandon(self, error: BaseException) -> None:
        """Removes, on the chief, what has been written so far."""
        with suppress(type(error)), self._stack:
            raise error

    def _begin(self, folder: CheckpointFolder) -> None:
        self._partial, self._fill = self._stack.enter_context(folder.begin(self._contents.record))

    def _look(self) -> None:
        if not self._partial.is_dir():
            raise CheckpointError(
                f"does not see the folder {self._partial.parent}, in which the chief has begun a checkpoint; keep "
                "those of a model that is divided among workers in a folder that all of them share"
            )

    def _finish(self) -> None:
        with self._stack:
            if self._fill is not None:
                self._fill(self._contents)
