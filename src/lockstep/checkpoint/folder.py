"""A folder of checkpoints, one folder per step: which there are, which is the newest, which are kept.

No file names the newest one: it is the undamaged checkpoint with the highest step. Only the chief writes.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from lockstep.atomic_files import original_name, remove_folder, remove_leftovers, replaced_folders
from lockstep.checkpoint.format import (
    RECORD,
    CheckpointRecord,
    Contents,
    Fill,
    new_checkpoint,
    read_record,
    run_of,
)
from lockstep.checks import check_path
from lockstep.errors import CheckpointError

R = TypeVar("R")
_NAME = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Returns the name of a step's folder, such as "step-00000120". Names sort as steps do."""
    return f"step-{step:08d}"


def check_can_make(folder: Path, setting: str) -> None:
    """Raises a CheckpointError that names ``setting`` if ``folder`` can be neither written to nor made.

    It writes a file without a name where the folder is, or would be made: even a process that is killed leaves nothing.
    """
    try:
        present = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        raise CheckpointError(
            f"{setting} is {str(folder)!r}, which cannot be written to: {error.strerror}: {str(present)!r}; choose "
            "another folder, or change its permissions"
        ) from error


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Returns the newest checkpoint in ``folder`` that this machine sees and whose files are whole; None if none is.

    The checksums of its tensors are compared only when it is loaded.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return CheckpointFolder(Path(check_path(folder, "latest_checkpoint(folder)"))).newest()


class CheckpointFolder:
    """The checkpoints in the folder ``path``, which is made when the first one is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def paths(self) -> list[Path]:
        """Returns the checkpoints, oldest first, damaged or not. Raises CheckpointError if that fails."""
        return [path for _, path in self._by_step()]

    def records(self) -> list[tuple[Path, CheckpointRecord]]:
        """Returns the undamaged checkpoints with their records, oldest first."""
        readable: list[tuple[Path, CheckpointRecord]] = []
        for path in self.paths():
            with suppress(CheckpointError):
                readable.append((path, read_record(path)))
        return readable

    def newest(self) -> Path | None:
        """Returns the newest undamaged checkpoint; None if there is none."""
        readable = self.records()
        return readable[-1][0] if readable else None

    def read_newest(self, read: Callable[[Path], R]) -> tuple[Path, R] | None:
        """Reads the newest undamaged checkpoint, with a warning for each damaged one; None if there is none.

        Raises CheckpointError if all are damaged.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                return path, read(path)
            except CheckpointError as error:
                if path == paths[0]:
                    raise
                warnings.warn(f"{error}. Going back to an older checkpoint.", stacklevel=2)
        return None

    def write(self, contents: Contents) -> Path:
        """Writes a checkpoint, after removing what killed writers left; see ``begin``."""
        with self.begin(contents.record) as (_, fill):
            fill(contents)
        return self.path / step_name(contents.record.step)

    @contextmanager
    def begin(self, record: CheckpointRecord) -> Iterator[tuple[Path, Fill]]:
        """Begins a checkpoint to which other workers may write too; yields as ``new_checkpoint``.

        One of the same step is replaced, and later ones of the same run are removed: the run was set back. Raises
        CheckpointError if it cannot be written, or there is a later one of another run, which would be the newest.
        """
        self._clear()
        later = [(path, other.run) for path, other in self.records() if other.step > record.step]
        foreign = [path for path, run in later if run != record.run]
        if foreign:
            raise CheckpointError(
                f"cannot write step {record.step} to {self.path}: another run has left {foreign[-1].name} there, which "
                "would be taken for the newest; restore from it first, or choose an empty folder"
            )
        with new_checkpoint(self.path / step_name(record.step)) as (partial, fill):
            yield partial, fill
        for path, _ in later:
            self.remove(path)

    def prune(self, keep: int | None, step: int, best: Path | None, *, run: str | None = None) -> None:
        """Removes all checkpoints up to ``step`` but the last ``keep`` and the best, or those of ``run``."""
        if keep is None:
            return
        earlier = [path for number, path in self._by_step() if number <= step and run in (None, run_of(path))]
        for path in earlier[: max(0, len(earlier) - keep)]:
            if path != best:
                self.remove(path)

    def best(self, *, maximise: bool) -> Path | None:
        """Returns the checkpoint with the best monitored number, the newest of equals; None if none has a number."""
        numbers = [(path, record.monitored) for path, record in self.records() if record.monitored is not None]
        numbers = [(path, value) for path, value in numbers if value == value]  # NaN is not the best of anything
        best = (max if maximise else min)((value for _, value in numbers), default=None)
        return next((path for path, value in reversed(numbers) if value == best), None)

    def remove(self, path: Path) -> None:
        """Removes one checkpoint: first its name, in one step. Raises CheckpointError if it cannot be removed."""
        try:
            remove_folder(path)
        except OSError as error:
            raise CheckpointError(f"cannot remove {path}: {error.strerror}; check its permissions") from error

    def remove_all(self, *, run: str | None = None, with_folder: bool = True) -> None:
        """Removes all checkpoints, or those of ``run``, what killed writers left, and the folder if it is empty."""
        for path in self.paths():
            if run in (None, run_of(path)):
                self.remove(path)
        self._clear()
        if with_folder:
            with suppress(OSError):  # it is not empty, it is gone already, or it is the working directory
                self.path.rmdir()

    def _by_step(self) -> list[tuple[int, Path]]:
        try:
            entries = [(path.name, path) for path in self.path.iterdir()]
            entries += [(original_name(path), path) for path in replaced_folders(self.path)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"cannot look for checkpoints in {self.path}: {error.strerror}; give a folder that can be read"
            ) from error
        matches = [(_NAME.fullmatch(name), path) for name, path in entries]
        return sorted((int(match[1]), path) for match, path in matches if match is not None)

    def _clear(self) -> None:
        try:
            remove_leftovers(self.path, record=RECORD)
        except OSError as error:
            raise CheckpointError(
                f"cannot clear {self.path} of what a killed run left: {error.strerror}; see to its permissions"
            ) from error
