"""Where a run of the recipe writes, and where it goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders of a run; None writes none.

    Args:
        checkpoints: gets the Trainer's checkpoints, the last three; without it they are gone at the end.
        logs: gets the TensorBoard logs.
        model: gets weights, config and tokenizer at the end, as ``pipeline`` reads them.
        predictions: a CSV file that gets what was predicted for each review of the test.
        resume: a checkpoint to go on from.
    """

    checkpoints: Path | None = None
    logs: Path | None = None
    model: Path | None = None
    predictions: Path | None = None
    resume: Path | None = None

    def __post_init__(self) -> None:
        if self.resume is not None and not (self.resume / "trainer_state.json").is_file():
            raise ConfigError(
                f"resume={str(self.resume)!r} is no checkpoint of a Trainer: it has no trainer_state.json; give a"
                " folder such as runs/reviews/checkpoints/20260101-120000/checkpoint-109"
            )

    @contextmanager
    def for_checkpoints(self) -> Iterator[Path]:
        """The folder of the checkpoints, or one that is gone afterwards: the best epoch is read back from it."""
        if self.checkpoints is not None:
            yield self.checkpoints
        else:
            with TemporaryDirectory(prefix="lockstep-reviews-") as folder:
                yield Path(folder)
