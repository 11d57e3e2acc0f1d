"""The flags ``--resume`` and ``--backup``: what an interrupted training leaves behind, and how another goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.cli.output import check_folder
from lockstep.errors import ConfigError
from lockstep.train.callbacks import BackupAndRestore

ResumeFlag = Annotated[
    bool,
    typer.Option("--resume", help="Go on where an interrupted run with the same --output stopped, if there was one."),
]
BackupFlag = Annotated[
    str,
    typer.Option(
        metavar="epoch|BATCHES|none",
        help="How often to save what --resume goes on from: after each epoch, or every so many global batches.",
    ),
]
_FOLDER = "backup"


@dataclass(frozen=True, kw_only=True)
class BackupPlan:
    """How often a training is saved, and whether it goes on from what another has saved.

    Args:
        often: "epoch", a number of global batches, or "none".
        resume: go on, where there is something to go on from.

    Raises:
        ConfigError: ``often`` is none of these, or "none" with ``resume``.
    """

    often: str
    resume: bool

    def __post_init__(self) -> None:
        if self.often not in ("epoch", "none") and not (self.often.isdecimal() and int(self.often)):
            raise ConfigError(f"--backup {self.often} was given, expected epoch, none, or a number of global batches")
        if self.resume and self.often == "none":
            raise ConfigError("--resume goes on from a backup, and --backup none keeps none; leave one of them out")

    def check(self, output: Path) -> None:
        """Refuses to begin where an interrupted run could be gone on with, whose backup would be lost. Writes nothing.

        Raises:
            ConfigError: it could, and that was not asked for; or the folder cannot be written to.
        """
        if self.often == "none":
            return
        folder = output / _FOLDER
        check_folder(folder)
        kept = CheckpointFolder(folder).paths()
        if kept and not self.resume:
            raise ConfigError(
                f"--output has the backup of an interrupted run, {str(kept[-1])!r}; add --resume to go on with it, or"
                " remove it to begin anew"
            )

    def callbacks(self, output: Path) -> list[BackupAndRestore]:
        """What saves the training, and restores it where it was interrupted."""
        if self.often == "none":
            return []
        often: Literal["epoch"] | int = "epoch" if self.often == "epoch" else int(self.often)
        return [BackupAndRestore(output / _FOLDER, save_freq=often, delete_checkpoint=False)]

    def remove(self, output: Path) -> None:
        """Removes the backup: not before the results lie there, since the test may be interrupted too."""
        if self.often != "none":
            CheckpointFolder(output / _FOLDER).remove_all()


NO_BACKUP = BackupPlan(often="none", resume=False)
