"""CheckpointManager: a folder of checkpoints: saves, keeps the last and the best, restores the newest."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from lockstep.checkpoint.checkpoint import Checkpoint, Held
from lockstep.checkpoint.folder import CheckpointFolder, step_name
from lockstep.checkpoint.format import Contents, Fill
from lockstep.checkpoint.state_adapters import check_faults, fault_of, on_everyone
from lockstep.collectives.communicator import Communicator, run_on_chief
from lockstep.errors import CheckpointError, ConfigError


class BackgroundWriter:
    """Does one write at a time in a thread of its own.

    The thread is no daemon: it lives as long as one write takes, and the interpreter waits for it at its end, so that
    a checkpoint that was begun is finished.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins ``work``; what was begun before must be finished."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="lockstep-checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Waits for what was begun."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Waits for what was begun.

        Raises:
            BaseException: what it ended with, once.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - not swallowed: finish hands it on
            self._error = error


class ShardedSave:
    """The writing of one checkpoint. Every worker must make one, which begins it.

    Args:
        workers: all that write.
        folder: of the checkpoints.
        contents: complete on the chief but for what is held.
        held: what this worker writes.

    Raises:
        CheckpointError: it cannot be begun, or a worker does not see the folder; nothing is left behind.
    """

    def __init__(self, workers: Communicator, folder: CheckpointFolder, contents: Contents, held: Held) -> None:
        self._workers, self._contents, self._held = workers.processes, contents, held
        self._stack = ExitStack()
        self._partial = Path()
        self._fill: Fill | None = None
        run_on_chief(self._workers, "checkpoint begun", lambda: self._begin(folder))
        path = self._partial.absolute().as_posix() if self._workers.is_chief else ""
        self._partial = Path(self._workers.broadcast_bytes("the folder of the checkpoint", path.encode()).decode())
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
        from lockstep.checkpoint.sharded_io import write_shards

        for folder, held in self._held.items():
            if held:
                write_shards(held, self._partial / folder, number=self._workers.index, of=self._workers.size)

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
        run_on_chief(self._workers, "checkpoint written", self._finish)

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


class CheckpointManager:
    """Saves a Checkpoint again and again, each time to a folder of its own, and restores the newest.

    The chief writes, reads and removes; every worker must make the same calls. Of a model that is divided among workers
    each writes and reads its own part, so all must see the folder. A checkpoint appears whole or not at
    all, also when its writer is killed; what a killed one leaves is cleared away by the next save.

    Args:
        checkpoint: what is saved.
        folder: where to: one folder a step, ``step-00000120`` and so on. It is made.
        keep: how many of the last checkpoints stay; None keeps all.
        best: "min" or "max" keeps besides the one with the best ``monitored`` number.
        asynchronous: ``save`` copies the state and returns; a thread writes it. One is written at a time: the next save
            waits for it. An error is raised by the next call. The thread ends with the writing, and Python waits for it
            at its own end. Of a model that is divided among workers each writes its own in a thread, and the checkpoint
            gets its name in the next call, when all have told of theirs.

    Raises:
        ConfigError: a number to keep that cannot be.

    Example:
        >>> import tempfile, torch, lockstep as ls
        >>> strategy = ls.MirroredStrategy(["cpu:0"])
        >>> progress = {"step": 0}
        >>> checkpoint = ls.Checkpoint(model=strategy.mirror(torch.nn.Linear(2, 1)), progress=progress)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = ls.CheckpointManager(checkpoint, folder, keep=3)
        ...     manager.restore_or_initialize()
        ...     manager.save(step=1).name
        'step-00000001'
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        best: Literal["min", "max"] | None = None,
        asynchronous: bool = False,
    ) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r} is no number of checkpoints; give 1 or more, or None to keep all")
        if best not in (None, "min", "max"):
            raise ConfigError(f"best={best!r} is unknown; choose 'min', 'max' or None")
        self._checkpoint = checkpoint
        self._folder = CheckpointFolder(Path(folder))
        self._keep = keep
        self._best = best
        self._writer = BackgroundWriter() if asynchronous else None
        self._shared: tuple[ShardedSave, int] | None = None
        self.run = uuid.uuid4().hex

    @property
    def folder(self) -> Path:
        """Where the checkpoints are."""
        return self._folder.path

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that this machine sees, oldest first."""
        return self._folder.paths()

    @property
    def newest(self) -> Path | None:
        """The newest undamaged checkpoint that this machine sees."""
        return self._folder.newest()

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best monitored number that this machine sees."""
        return self._folder.best(maximise=self._best == "max")

    def save(self, step: int, *, monitored: float | None = None) -> Path:
        """Saves everything. Every worker must call it, outside replicas.

        Args:
            step: its number, which names the folder; a checkpoint of the same step is replaced.
            monitored: the number that says which is best, such as the validation loss.

        Returns:
            The checkpoint's folder, which is there when this returns, unless ``asynchronous``.

        Raises:
            CheckpointError: it cannot be written, on every worker; or another run has left later ones in the folder.
                Asynchronously: what became of the save before.
        """
        if type(step) is not int or step < 0:
            raise ConfigError(f"step={step!r} is no number of a step; give 0 or more")
        workers = self._checkpoint.workers
        if self._checkpoint.divided:
            self._begin_shared(step, monitored)
        elif self._writer is None:
            contents = self._checkpoint.contents(step, run=self.run, monitored=monitored)
            run_on_chief(workers, "checkpoint written", lambda: self._write(contents))
        else:
            self.wait()
            contents = self._checkpoint.contents(step, run=self.run, monitored=monitored, copied=True)
            if workers.is_chief:
                self._writer.start(lambda: self._write(contents))
        return self._folder.path / step_name(step)

    def restore_or_initialize(self) -> Path | None:
        """Restores the newest checkpoint, as the chief sees it. Every worker must call it, outside replicas.

        If the newest one is damaged, a warning names it and the one before is restored.

        Returns:
            The checkpoint's folder, or None if there is none: then everything stays as it is.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest does not fit; nothing is loaded then.
        """
        self.wait()
        restored = self._checkpoint.restore_found(lambda read: self._folder.read_newest(read))
        if restored is None:
            return None
        self.run = restored[1].run
        return restored[0]

    def wait(self) -> None:
        """Waits for the save under way, if it is asynchronous. Every worker must call it.

        Raises:
            CheckpointError: it has failed.
        """
        if self._shared is not None:
            self._complete_shared()
        elif self._writer is not None and not self._checkpoint.divided:
            run_on_chief(self._checkpoint.workers, "checkpoint written", self._writer.finish)

    def finish_writing(self) -> None:
        """Waits on this worker alone, and raises nothing: for the way out of an error, when others may not be there."""
        if self._writer is not None:
            self._writer.join()
        shared, self._shared = self._shared, None
        if shared is not None:
            shared[0].abandon(CheckpointError("the training ended before all workers had written"))

    def close(self) -> None:
        """``wait``, at the end. Every worker must call it."""
        self.wait()

    def remove_all(self) -> None:
        """Removes all checkpoints from the folder, and the folder if it is empty then. Every worker must call it."""
        self.wait()
        run_on_chief(self._checkpoint.workers, "checkpoints removed", self._folder.remove_all)

    def remove_own(self, *, with_folder: bool) -> None:
        """Removes the checkpoints of this manager's run, and no others. Every worker must call it.

        Args:
            with_folder: the folder too, if it is empty then.
        """

        def remove() -> None:
            self._folder.remove_run(self.run)
            if with_folder:
                self._folder.remove_if_empty()

        self.wait()
        run_on_chief(self._checkpoint.workers, "checkpoints removed", remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.finish_writing()

    def _begin_shared(self, step: int, monitored: float | None) -> None:
        """Of a model that workers hold parts of, each writes its own; the checkpoint has its name when all have."""
        self.wait()
        writer = self._writer
        contents, held = self._checkpoint.contents_and_held(
            step, run=self.run, monitored=monitored, copied=writer is not None
        )
        writing = ShardedSave(self._checkpoint.workers, self._folder, contents, held)
        self._shared = writing, step
        if writer is not None:
            writer.start(writing.write)
        else:
            self._complete_shared()

    def _complete_shared(self) -> None:
        if self._shared is None:
            return
        (writing, step), self._shared = self._shared, None
        writing.complete(fault_of(writing.write if self._writer is None else self._writer.finish))
        run_on_chief(self._checkpoint.workers, "older checkpoints removed", lambda: self._prune(step))

    def _write(self, contents: Contents) -> None:
        self._folder.write(contents)
        self._prune(contents.record.step)

    def _prune(self, step: int) -> None:
        best = None if self._best is None else self._folder.best(maximise=self._best == "max")
        self._folder.prune(self._keep, step, best, run=self.run)
