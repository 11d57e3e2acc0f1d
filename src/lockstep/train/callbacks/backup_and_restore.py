"""BackupAndRestore: a fit that is started again goes on where it stopped, whatever stopped it.

fit begins -> newest backup restored, if there is one -> batches -> saved every epoch or so many batches -> removed
                                                             `-- SIGTERM on any worker: all save, all exit
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from lockstep.checkpoint.folder import step_name
from lockstep.checkpoint.format import RECORD, run_of
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.collectives.values import on_chief
from lockstep.collectives.workers import Wish
from lockstep.errors import CheckpointError, ConfigError
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.callbacks.given_path import given_path
from lockstep.train.callbacks.progress import write_line

SAVED_AND_STOPPED = 75
"""The exit code of a process that SIGTERM has made save and end: EX_TEMPFAIL of sysexits.h, "try again later".

Neither 0, since the training is not done, nor 143, which is what a process ends with that had no time to save: whoever
starts it can tell the three apart.
"""

Handler = Callable[[int, FrameType | None], Any] | int | None


class BackupAndRestore(Callback):
    """Saves the state of training so that ``fit``, called again after any interruption, goes on where it stopped.

    Weights, optimizer, scheduler, random numbers, the place in the data, history, and the other callbacks' states are
    in the backup: on the same replicas the resumed training is bit-equal to one that was never interrupted. It goes on
    with another number of workers or replicas too, with the numbers of one device. Arguments as in Keras.

    SIGTERM, on any worker, while fit runs: all workers save after the same batch and end with exit code 75.

    Args:
        backup_dir: the folder of the backups; for this callback and this training alone. What else is in it is neither
            replaced nor removed, and the folder itself is removed only if the callback has made it.
        save_freq: "epoch", or every this many global batches, counted over all epochs; False saves on SIGTERM only.
            With gradient accumulation a save waits for the update.
        double_checkpoint: keep the backup before the last one too.
        delete_checkpoint: remove the backups when fit ends by itself.

    Raises:
        ConfigError: ``backup_dir`` is empty, or ``save_freq`` is neither "epoch", nor a positive integer, nor False.

    Example:
        >>> callback = BackupAndRestore("backup", save_freq=100)
    """

    comes_after = 2

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch", False] | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        if save_freq is not False and save_freq != "epoch" and (type(save_freq) is not int or save_freq < 1):
            raise ConfigError(f"BackupAndRestore(save_freq={save_freq!r}); give 'epoch', a number of batches, or False")
        self.backup_dir = given_path(backup_dir, "BackupAndRestore(backup_dir)")
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self._manager: CheckpointManager | None = None
        self._made_folder = False
        self._signal = _Termination()
        self._due = self._ending = self._ended = False

    def wants_batch_logs(self) -> bool:
        """False: it looks at no number."""
        return False

    def on_train_begin(self, logs: Logs) -> None:
        """Restores the newest backup, if there is one, and begins to listen for SIGTERM."""
        self._due = self._ending = self._ended = False
        keep = 2 if self.double_checkpoint else 1
        self._manager = CheckpointManager(self.model.checkpoint(), self.backup_dir, keep=keep)
        self._made_folder = not self._manager.folder.exists()  # or as the backup says that is restored
        restored = self._manager.restore_or_initialize()
        # Another name than that of the training: ModelCheckpoint's checkpoints of it are not this callback's.
        self._manager.run = f"{self.model.training_state.run} backup"
        workers = self.model.strategy.workers
        workers.exchange("beginning of a fit with a backup")  # a signal that came too late for the fit before
        workers.settle(Wish.SAVE)
        self._signal.listen(lambda: workers.wish(Wish.SAVE))
        if restored is not None and self.params.get("verbose"):
            self._say(f"going on from {restored}: {self._place()}")

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Saves where ``save_freq`` is a number of batches and that many have passed, or where SIGTERM has come."""
        state = self.model.training_state
        self._due |= type(self.save_freq) is int and state.position.step % self.save_freq == 0
        self._hear()
        if (self._due or self._ending) and state.at_update:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Saves where ``save_freq`` is "epoch", or where SIGTERM has come since the last batch."""
        self.model.strategy.workers.exchange("end of an epoch with a backup")
        self._hear()
        if self.save_freq == "epoch" or self._due or self._ending:
            self._save()

    def on_train_end(self, logs: Logs) -> None:
        """Removes the backups, if it is to."""
        self._ended = True
        if self.delete_checkpoint and self._manager is not None:
            self._manager.remove_own(with_folder=self._made_folder)

    def state_dict(self) -> dict[str, Any]:
        """Whether the folder is the callback's own."""
        return {"made_folder": self._made_folder}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Knows the folder again that ``state_dict`` was of."""
        self._made_folder = state["made_folder"]

    def close(self) -> None:
        """Gives SIGTERM back to whom it belonged; one that came when training had ended is sent there once more."""
        self._manager = None
        self._signal.give_back(again=self._ended)

    def _hear(self) -> None:
        """Whether SIGTERM has come to some worker: all hear of it at the same point of the program."""
        workers = self.model.strategy.workers
        if Wish.SAVE in workers.granted:
            self._ending = True
            workers.settle(Wish.SAVE)
        elif self._signal.came and not self._ending:
            workers.wish(Wish.SAVE)  # once more: the first may have come in the middle of an exchange, and been lost

    def _save(self) -> None:
        if self._manager is None:
            return
        step, run = self.model.training_state.position.step, self._manager.run
        place = self._manager.folder / step_name(step)
        on_chief(self.model.strategy.workers, "place of the backup", lambda: _check_place(place, run))
        path = self._manager.save(step)
        self._due = False
        if self._ending:
            self._say(f"SIGTERM: saved {self._place()} to {path}; start again to go on")
            raise SystemExit(SAVED_AND_STOPPED)

    def _place(self) -> str:
        place = self.model.training_state.position
        return f"epoch {place.epoch + 1}, {place.batch} batches done"

    def _say(self, text: str) -> None:
        if self.model.strategy.workers.is_chief:
            write_line(text)


def _check_place(place: Path, run: str) -> None:
    """Refuses to replace what is not the callback's own; a checkpoint whose record is damaged can be nobody's."""
    damaged = (place / RECORD).exists() and run_of(place) is None
    if place.exists() and not damaged and run_of(place) != run:
        raise CheckpointError(
            f"BackupAndRestore would replace {place}, which it has not made; give it a folder of its own as backup_dir"
        )


class _Termination:
    """SIGTERM for the length of a fit. Only the main thread can listen."""

    def __init__(self) -> None:
        self.came = False
        self._listens = False
        self._former: Handler = None

    def listen(self, wish: Callable[[], None]) -> None:
        """Notes the signal from now on, and calls ``wish`` when it comes."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.came = True
            wish()

        self.came = False
        if threading.current_thread() is threading.main_thread() and not self._listens:
            self._former = signal.signal(signal.SIGTERM, handle)
            self._listens = True

    def give_back(self, *, again: bool) -> None:
        """Puts the former handler back; with ``again``, it gets the signal that came.

        A former handler that Python did not install cannot be put back; then the default one is.
        """
        if not self._listens:
            return
        self._listens = False
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._former is None else self._former)
        if self.came and again:
            signal.raise_signal(signal.SIGTERM)
