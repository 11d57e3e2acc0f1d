"""CheckpointManager: saves checkpoints to a folder, keeps the last and the best ones, and restores the newest.

The chief alone writes the checkpoint of a model that every worker has whole. ``ShardedSave`` writes one of a model
that workers hold parts of, with all workers:

    begin      the chief makes a folder and sends its path to all workers
    write      each worker writes its own files, possibly in a thread
    complete   all workers report errors -> the chief writes the rest and the record, and renames the folder
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from lockstep.checkpoint.checkpoint import Checkpoint, Shards
from lockstep.checkpoint.folder import CheckpointFolder, step_name
from lockstep.checkpoint.format import Contents, Fill
from lockstep.checkpoint.sharded_io import write_shards
from lockstep.checks import check_choice, check_kind, check_number, check_path
from lockstep.collectives.communicator import (
    Communicator,
    error_text,
    raise_gathered_errors,
    refuse_to_save,
    run_on_chief,
)
from lockstep.errors import CheckpointError


class CheckpointManager:
    """Saves a Checkpoint repeatedly, each time to a folder of its own, and restores the newest.

    The chief writes, reads and removes; every worker must make the same calls. Of a divided model each worker writes
    and reads its own part, so all must see the folder. A checkpoint appears whole or not at all, even when its writer
    is killed. The next save removes what a killed writer left.

    Args:
        checkpoint: what is saved.
        folder: where to: one folder per step, ``step-00000120`` and so on. It is made.
        keep: the number of last checkpoints to keep; None keeps all.
        best: "min" or "max" also keeps the checkpoint with the best ``monitored`` number.
        asynchronous: ``save`` copies the state and returns; a thread writes it, and Python waits for it at exit. The
            next call waits for it and raises its error. Of a divided model each worker writes its part in a thread,
            and the checkpoint gets its name in the next call.

    Raises:
        ConfigError: ``keep`` or ``best`` is invalid.

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
        check_kind("checkpoint", checkpoint, Checkpoint, "a ls.Checkpoint of what is to be saved", optional=False)
        check_number("keep", keep, least=1, whole=True)
        check_choice("best", best, ("min", "max", None))
        self._checkpoint = checkpoint
        self._folder = CheckpointFolder(Path(check_path(folder, "CheckpointManager(folder)")))
        self._keep = keep
        self._best = best
        self._asynchronous = asynchronous
        self._writing: Future[None] | None = None
        self._sharded_save: tuple[ShardedSave, int] | None = None
        self.run = uuid.uuid4().hex

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return self._folder.path

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that this machine sees, oldest first."""
        return self._folder.paths()

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best monitored number that this machine sees."""
        return self._folder.best(maximise=self._best == "max")

    def save(self, step: int, *, monitored: float | None = None) -> Path:
        """Saves everything. Every worker must call it, outside replicas.

        Args:
            step: the number of the step, which names the folder. A checkpoint of the same step is replaced.
            monitored: the number that says which checkpoint is best, such as the validation loss.

        Returns:
            The checkpoint's folder, which exists when this returns, unless ``asynchronous``.

        Raises:
            CheckpointError: it cannot be written, or another run has left later checkpoints in the folder; or the
                previous save failed.
        """
        check_number("step", step, least=0, whole=True, optional=False)
        check_number("monitored", monitored)
        refuse_to_save(self._checkpoint.workers, "CheckpointManager.save")
        self.wait()
        with self._checkpoint.saving():
            self._save(step, monitored)
        return self._folder.path / step_name(step)

    def _save(self, step: int, monitored: float | None) -> None:
        workers, is_sharded = self._checkpoint.workers, self._checkpoint.is_sharded
        contents, shards = self._checkpoint.collect(step, run=self.run, monitored=monitored, copied=self._asynchronous)
        if is_sharded:
            save = ShardedSave(workers, self._folder, contents, shards)
            self._sharded_save = save, step
            if self._asynchronous:
                self._write_in_thread(save.write)
            else:
                self._complete_sharded_save()
        elif not self._asynchronous:
            run_on_chief(workers, "checkpoint written", lambda: self._write(contents))
        elif workers.is_chief:
            self._write_in_thread(lambda: self._write(contents))

    def restore_or_initialize(self) -> Path | None:
        """Restores the newest checkpoint that is not damaged, as the chief sees it. Every worker must call it.

        Returns:
            The checkpoint's folder; None, and everything stays as it is, if there is none.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest does not fit; then nothing is loaded.
        """
        self.wait()
        restored = self._checkpoint.restore_found(lambda read: self._folder.read_newest(read))
        if restored is None:
            return None
        self.run = restored[1].run
        return restored[0]

    def wait(self) -> None:
        """Waits for an asynchronous save. Every worker must call it. Raises CheckpointError if it failed."""
        if self._checkpoint.is_sharded:
            self._complete_sharded_save()
        elif self._asynchronous:
            run_on_chief(self._checkpoint.workers, "checkpoint written", self._finish_thread)

    def finish_writing(self) -> None:
        """Waits on this worker alone and raises nothing, for after an error, when others may be gone."""
        wait([self._writing] if self._writing is not None else [])
        pending, self._sharded_save = self._sharded_save, None
        if pending is not None:
            pending[0].abandon(CheckpointError("the training ended before all workers had written"))

    def remove_own(self, *, with_folder: bool) -> None:
        """Removes the checkpoints of this manager's run, and the folder if that leaves it empty. All must call it."""
        self.wait()
        remove = partial(self._folder.remove_all, run=self.run, with_folder=with_folder)
        run_on_chief(self._checkpoint.workers, "checkpoints removed", remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        else:
            self.finish_writing()

    def _complete_sharded_save(self) -> None:
        if self._sharded_save is None:
            return
        (save, step), self._sharded_save = self._sharded_save, None
        save.complete(error_text(self._finish_thread if self._asynchronous else save.write))
        run_on_chief(self._checkpoint.workers, "older checkpoints removed", lambda: self._prune(step))

    def _write_in_thread(self, write: Callable[[], None]) -> None:
        # Not a daemon thread: Python waits at exit for a checkpoint that was begun. It ends when this one is written.
        executor = ThreadPoolExecutor(1, thread_name_prefix="lockstep-checkpoint")
        self._writing = executor.submit(write)
        executor.shutdown(wait=False)

    def _finish_thread(self) -> None:
        """Waits for the thread and raises its error, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, contents: Contents) -> None:
        self._folder.write(contents)
        self._prune(contents.record.step)

    def _prune(self, step: int) -> None:
        self._folder.prune(self._keep, step, None if self._best is None else self.best, run=self.run)


class ShardedSave:
    """One checkpoint that all workers write: the chief ``contents``, each its ``shards``. Every worker must make it.

    Raises CheckpointError if it cannot be begun, or a worker does not see the folder; nothing is left behind.
    """

    def __init__(self, workers: Communicator, folder: CheckpointFolder, contents: Contents, shards: Shards) -> None:
        self._workers, self._contents, self._shards = workers.processes, contents, shards
        self._stack = ExitStack()
        self._partial = Path()
        self._fill: Fill | None = None
        begun = run_on_chief(
            self._workers, "checkpoint begun", lambda: self._stack.enter_context(folder.begin(contents.record))
        )
        if begun is not None:
            self._partial, self._fill = begun
        path = self._partial.absolute().as_posix() if self._workers.is_chief else ""
        self._partial = Path(self._workers.broadcast_bytes("the folder of the checkpoint", path.encode()).decode())
        try:
            raise_gathered_errors(self._workers, "the folder of the checkpoint seen", error_text(self._check_visible))
        except BaseException as error:
            self.abandon(error)
            raise

    def write(self) -> None:
        """Writes this worker's shards. Raises OSError or SafetensorError if they cannot be written."""
        for folder, shards in self._shards.items():
            if shards:
                write_shards(shards, self._partial / folder, prefix=f"shard-{self._workers.index + 1:05d}")

    def complete(self, error: str) -> None:
        """Gives the checkpoint its name, if no worker has an ``error``. Every worker must call it.

        Raises CheckpointError if one has, or the chief cannot write the rest; nothing is left behind.
        """
        try:
            raise_gathered_errors(self._workers, "checkpoint filled", error)
        except BaseException as raised:
            self.abandon(raised)
            raise
        run_on_chief(self._workers, "checkpoint written", self._finish)

    def abandon(self, error: BaseException) -> None:
        """Removes, on the chief, what has been written so far."""
        with suppress(type(error)), self._stack:
            raise error

    def _check_visible(self) -> None:
        if not self._partial.is_dir():
            raise CheckpointError(
                f"does not see the folder {self._partial.parent}, in which the chief has begun a checkpoint; keep the "
                "checkpoints of a model that is divided among workers in a folder that all workers share"
            )

    def _finish(self) -> None:
        with self._stack:
            if self._fill is not None:
                self._fill(self._contents)
