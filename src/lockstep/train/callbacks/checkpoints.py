"""ModelCheckpoint saves weights or checkpoints during fit. BackupAndRestore resumes an interrupted fit.

fit begins -> newest backup restored, if there is one -> batches -> saved at save_freq -> fit ends -> program ends
                                                         |                                            `-- removed
                                                         `-- SIGTERM on any worker: all save, all exit
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal

from lockstep.checkpoint.folder import CheckpointFolder, check_can_make, step_name
from lockstep.checkpoint.format import RECORD, run_of
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checks import check_number, check_path, shown
from lockstep.collectives.communicator import Communicator, ControlFlags, run_on_chief
from lockstep.errors import CheckpointError, ConfigError
from lockstep.train.callbacks.base import Callback, Logs, Mode, Monitor
from lockstep.weights_formats import weights_format


class SavingCallback(Callback):
    """Saves at the end of epochs, or every ``save_freq`` global batches, counted over all epochs."""

    writes_files = True

    def __init__(self, save_freq: Literal["epoch", False] | int, expected: str) -> None:
        super().__init__()
        if save_freq is not False and save_freq != "epoch" and (type(save_freq) is not int or save_freq < 1):
            raise ConfigError(f"{type(self).__name__}(save_freq={shown(save_freq)}); give {expected}")
        self.save_freq = save_freq
        self._due = False
        self._manager: CheckpointManager | None = None

    def _is_due_at(self, step: int) -> bool:
        """Whether the save after this global batch, or one that waits for the update, is due."""
        return self._due or (type(self.save_freq) is int and step % self.save_freq == 0)


class ModelCheckpoint(SavingCallback):
    """Saves during fit, always or only the best. Arguments as in Keras. With several workers the chief writes.

    With ``save_weights_only`` it writes files as ``Model.save_weights`` does, in the format of the suffix; without it,
    checkpoints for ``model.load_checkpoint``.

    Args:
        filepath: the weights file, which may hold ``{epoch}`` (from 1), ``{batch}`` (from 1, with an integer
            ``save_freq``) and names of the logs, with formats: ``"weights-{epoch:02d}-{val_loss:.3f}.safetensors"``.
            For checkpoints, the folder that they are in.
        monitor: the name of the logs that says which is best.
        verbose: 1 writes a line for each save.
        save_best_only: save only when ``monitor`` has improved.
        save_weights_only: False saves checkpoints.
        mode: "min", "max", or "auto" to choose by the metric.
        save_freq: "epoch", or every this many global batches, counted over all epochs. With gradient accumulation a
            checkpoint waits for the update.
        initial_value_threshold: the value to beat first, with ``save_best_only``.
        keep: how many of the last checkpoints stay, beside the best by ``monitor`` if the logs have it; None keeps all.
        asynchronous: a thread writes checkpoints while training goes on; see ``CheckpointManager``.

    Example:
        >>> callback = ModelCheckpoint("best.safetensors", monitor="val_loss", save_best_only=True)
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = True,
        mode: Mode = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
        *,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        super().__init__(0 if save_freq is False else save_freq, "'epoch' or a number of batches")
        if save_weights_only and (keep is not None or asynchronous):
            raise ConfigError(
                f"ModelCheckpoint(keep={keep!r}, asynchronous={asynchronous!r}) is for whole checkpoints; give "
                "save_weights_only=False, or leave them out"
            )
        check_number("ModelCheckpoint(keep)", keep, least=1, whole=True)
        check_number("ModelCheckpoint(initial_value_threshold)", initial_value_threshold)
        self.filepath = check_path(filepath, "ModelCheckpoint(filepath)")
        if save_weights_only or Path(self.filepath).suffix.lower() in (".h5", ".keras"):
            weights_format(self.filepath, "ModelCheckpoint(filepath)")
        self.monitor, self.verbose = monitor, verbose
        self.save_best_only, self.save_weights_only = save_best_only, save_weights_only
        self.keep, self.asynchronous = keep, asynchronous
        self.best = initial_value_threshold
        if not save_weights_only:
            self.comes_after = 1  # so that it saves the states of the others after their hooks
        self._watch = Monitor(monitor, mode=mode, owner="ModelCheckpoint")
        self._epoch = 0

    def wants_batch_logs(self) -> bool:
        return self.save_freq != "epoch" and self._is_due_at(self.model.training_state.position.step + 1)

    def on_train_begin(self, logs: Logs) -> None:
        self._due = False
        validated = self.params.get("validated") and self.save_freq == "epoch"  # batches are not validated
        self._watch.begin(self.model.metrics, validated=validated if self.save_best_only else None)
        if not self.save_weights_only:
            best = self._watch.direction
            self._manager = CheckpointManager(
                self.model.checkpoint(), self.filepath, keep=self.keep, best=best, asynchronous=self.asynchronous
            )
        run_on_chief(self.model.strategy.workers, "folder to save to", self._check_folder)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        state = self.model.training_state
        self._due = self._is_due_at(state.position.step)
        if self._due and (self.save_weights_only or state.at_update):
            self._save({**logs, "batch": batch + 1}, logs, validated=False)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self.save_freq == "epoch" or self._due:
            self._save(logs, logs, validated=bool(self.params.get("validated")))

    def on_train_end(self, logs: Logs) -> None:
        if self._manager is not None:
            self._manager.wait()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]

    def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.finish_writing()

    def _check_folder(self) -> None:
        # The folder may depend on numbers that are not known yet; the part of it that does not can be checked before
        # anything is trained (test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_trained).
        beginning = self.filepath.partition("{")[0]
        folder = Path(f"{beginning}x").parent if self._manager is None else Path(self.filepath)
        check_can_make(folder, "ModelCheckpoint(filepath)")

    def _save(self, names: Logs, logs: Logs, *, validated: bool) -> None:
        self._due = False
        if self.save_best_only:
            value = self._watch.read(logs, validated=validated)
            if value is None or not self._watch.is_better(value, self.best):
                return
            self.best = value
        if self._manager is None:
            what, path = "the weights", self._path(names)
            with self.model.training_state.exchanging(averaged=True):
                self.model.save_weights(path)
        else:
            state = self.model.training_state
            self._manager.run = state.run
            what = "a checkpoint"
            path = self._manager.save(state.position.step, monitored=logs.get(self.monitor))
        if self.verbose:
            self._say(f"epoch {self._epoch + 1}: saved {what} to {path}")

    def _path(self, names: Logs) -> Path:
        values = {**names, "epoch": self._epoch + 1}
        try:
            return Path(self.filepath.format(**values))
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"ModelCheckpoint cannot fill in {self.filepath!r} ({error}); the names are: {', '.join(values)}"
            ) from error


SAVED_AND_STOPPED = 75
"""The exit code of a process that saved and ended on SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later"."""


class BackupAndRestore(SavingCallback):
    """Saves the state of training so that ``fit``, called again after any interruption, goes on where it stopped.

    On as many replicas the resumed training is bit-equal to one that was never interrupted; with ``replicas=`` of the
    strategy they are as many on any workers. On another number it goes on with the numbers of one device. On SIGTERM
    to any worker during fit, all workers save after the same batch and exit with ``exit_code``; a process that had no
    handler of its own ignores the signal from then on, so that a second one does not change the code. Arguments as in
    Keras.

    Args:
        backup_dir: the folder of the backups, for this callback and this training alone. Other files in it are neither
            replaced nor removed, and the folder is removed only if the callback made it.
        save_freq: "epoch", or every this many global batches, counted over all epochs; False saves on SIGTERM only.
            With gradient accumulation a save waits for the update.
        double_checkpoint: keep the backup before the last one too.
        delete_checkpoint: remove the backups once fit has ended by itself and its result can no longer be lost: when
            the program ends without an exception, when nothing refers to the module any more, or when the next fit with
            this folder begins; in an interactive session at the end of fit. A program that fails or is killed before it
            has saved its result, and is started again, trains nothing twice.

    Raises:
        CheckpointError: the folder can neither be written to nor made; raised when fit begins.

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
        *,
        exit_code: int = SAVED_AND_STOPPED,
    ) -> None:
        super().__init__(save_freq, "'epoch', a number of batches, or False")
        check_number("BackupAndRestore(exit_code)", exit_code, least=1, most=255, whole=True, optional=False)
        self.exit_code = exit_code
        self.backup_dir = check_path(backup_dir, "BackupAndRestore(backup_dir)")
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self._made_folder = False
        self._signal = Termination()
        self._ending = self._exits = self._ended = False

    def wants_batch_logs(self) -> bool:
        return False

    def on_train_begin(self, logs: Logs) -> None:
        self._due = self._ending = self._exits = self._ended = False
        keep = 2 if self.double_checkpoint else 1
        workers = self.model.strategy.workers
        run_on_chief(workers, "folder of the backup", self._take_folder)
        self._manager = CheckpointManager(self.model.checkpoint(), self.backup_dir, keep=keep)
        self._made_folder = not self._manager.folder.exists()  # a restored backup knows better
        restored = self._manager.restore_or_initialize()
        # Not the run's own name: ModelCheckpoint's checkpoints of the same run are not backups.
        self._manager.run = f"{self.model.training_state.run} backup"
        workers.all_gather_numbers("beginning of a fit with a backup")  # a signal that came too late for the fit before
        self._signal.listen(workers)
        if restored is not None and self.params.get("verbose"):
            self._say(f"going on from {restored}: {self._position()}")

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        state = self.model.training_state
        self._due = self._is_due_at(state.position.step)
        self._ending = self._signal.is_agreed()
        if (self._due or self._ending) and state.at_update:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self.model.strategy.workers.all_gather_numbers("end of an epoch with a backup")
        self._ending = self._signal.is_agreed()
        if self.save_freq == "epoch" or self._due or self._ending:
            self._save()

    def on_train_end(self, logs: Logs) -> None:
        self._ended = True
        if not self.delete_checkpoint or self._manager is None:
            return
        # Python sets ps1 in an interactive session alone.
        if hasattr(sys, "ps1"):  # an exception ends no interactive session, and the model stays
            self._manager.remove_own(with_folder=self._made_folder)
            return
        self._manager.wait()
        if self.model.strategy.workers.is_chief:
            _EndedBackup(self.model.module, self._manager.folder, self._manager.run, with_folder=self._made_folder)

    def state_dict(self) -> dict[str, Any]:
        return {"made_folder": self._made_folder}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made_folder = state["made_folder"]

    def close(self) -> None:
        self._manager = None
        self._signal.restore(again=self._ended, exits=self._exits)

    def _take_folder(self) -> None:
        """Removes what an earlier fit of this program has left, and checks that the folder can be written to."""
        _EndedBackup.remove_if_in(Path(self.backup_dir))
        check_can_make(Path(self.backup_dir), "BackupAndRestore(backup_dir)")

    def _save(self) -> None:
        if self._manager is None:
            return
        step, run = self.model.training_state.position.step, self._manager.run
        place = self._manager.folder / step_name(step)
        run_on_chief(self.model.strategy.workers, "place of the backup", lambda: _check_place(place, run))
        path = self._manager.save(step)
        self._due = False
        if self._ending:
            self._say(f"SIGTERM: saved {self._position()} to {path}; start again to go on")
            self._exits = True
            raise SystemExit(self.exit_code)

    def _position(self) -> str:
        position = self.model.training_state.position
        return f"epoch {position.epoch + 1}, {position.batch} batches done"


class _EndedBackup:
    """The backups of a fit that has ended in this process: removed when its result can no longer be lost.

    That is when ``module`` is collected, or the process ends without an exception. A process that was forked from this
    one removes nothing.
    """

    # By folder. Without this the next fit in the same process would take a finished fit's backup for one that an
    # interruption left (test_the_next_fit_does_not_take_an_ended_one_for_interrupted).
    _ended_backups: ClassVar[dict[Path, _EndedBackup]] = {}

    def __init__(self, module: object, folder: Path, run: str, *, with_folder: bool) -> None:
        self._folder = folder.absolute()  # the program may change its working directory
        self._run, self._with_folder = run, with_folder
        self._ended_backups[self._folder] = self
        # Not atexit, which processes of multiprocessing, such as the workers of ls.launch, do not call.
        self._finalize = Finalize(module, self._remove_unless_failing, exitpriority=0)

    @classmethod
    def remove_if_in(cls, folder: Path) -> None:
        """Removes the backups of the fit that ended with this folder, if there was one."""
        if (ended := cls._ended_backups.get(folder.absolute())) is not None:
            ended._finalize.cancel()
            ended._remove()

    def _remove_unless_failing(self) -> None:
        # At exit the exception that ended the program is no longer handled, but Python has left it in last_value when
        # it printed it. A program that fails before it has saved its result keeps its backup
        # (test_what_a_program_had_trained_when_it_failed_before_it_saved_is_not_lost).
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if error is None or (isinstance(error, SystemExit) and not error.code):
            with suppress(CheckpointError):  # nobody is left who could be told
                self._remove()

    def _remove(self) -> None:
        self._ended_backups.pop(self._folder, None)
        CheckpointFolder(self._folder).remove_all(run=self._run, with_folder=self._with_folder)


def _check_place(place: Path, run: str) -> None:
    """Refuses to replace a checkpoint that is not the callback's own. A damaged one may be replaced."""
    damaged = (place / RECORD).exists() and run_of(place) is None
    if place.exists() and not damaged and run_of(place) != run:
        raise CheckpointError(
            f"BackupAndRestore would replace {place}, which it did not write; give it a folder of its own as backup_dir"
        )


class Termination:
    """SIGTERM to any worker, for the length of a training. Only the main thread can handle it."""

    def __init__(self) -> None:
        self._came = self._agreed = self._listens = False
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        self._workers: Communicator

    def listen(self, workers: Communicator) -> None:
        """Handles the signal from now on. Every worker must call it at the same point of the program."""
        # A signal that came after the training before had ended is no reason to end this one.
        workers.clear_flags(ControlFlags.SAVE)
        self._workers, self._came, self._agreed = workers, False, False
        # signal.signal raises a ValueError in other threads
        # (test_another_thread_than_the_main_one_trains_without_listening).
        if threading.current_thread() is threading.main_thread() and not self._listens:
            self._previous = signal.signal(signal.SIGTERM, self._handle)
            self._listens = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        self._workers.set_flags(ControlFlags.SAVE)

    def is_agreed(self) -> bool:
        """Whether the signal had reached some worker at the last collective; equal on all, which must all call it."""
        if ControlFlags.SAVE in self._workers.agreed_flags:
            self._agreed = True
            self._workers.clear_flags(ControlFlags.SAVE)
        elif self._came and not self._agreed:
            # Once more: the signal may have come in the middle of an exchange, and its flag been lost.
            self._workers.set_flags(ControlFlags.SAVE)
        return self._agreed

    def restore(self, *, again: bool, exits: bool) -> None:
        """Restores the former handler (the default for one that is not Python's).

        Args:
            again: whether to send it a signal that has come.
            exits: whether the process exits with a code of its own, which the default handler would replace.
        """
        if not self._listens:
            return
        self._listens = False
        former = signal.SIG_DFL if self._previous is None else self._previous
        # A second SIGTERM would end the process by the default handler, with another exit code than the 75 that tells a
        # scheduler to start it again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if exits and former == signal.SIG_DFL else former)
        if self._came and again:
            signal.raise_signal(signal.SIGTERM)
