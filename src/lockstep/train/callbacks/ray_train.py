"""RayTrain reports numbers and checkpoints to Ray Train, and resumes where Ray restarts a train function.

fit begins -> Ray's newest checkpoint restored, if there is one -> batches -> checkpoint written -> ray.train.report
                                                                   ^ all workers        ^ all workers, a barrier of Ray
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, Literal, final

from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checks import check_path
from lockstep.collectives.communicator import run_on_chief
from lockstep.errors import CheckpointError, ConfigError
from lockstep.extras import require
from lockstep.train.callbacks.base import Logs
from lockstep.train.callbacks.checkpoints import SavingCallback


@final
class RayTrain(SavingCallback):
    """Reports to Ray Train: the logs of every epoch, and checkpoints of the whole training. Needs the extra ``ray``.

    Give it to the one fit of a train function, on every worker. When Ray runs the function again, after a failure that
    ``FailureConfig`` allows or on another number of workers, fit goes on from the newest checkpoint that was reported,
    with the same bits as without the failure on as many replicas; with ``replicas=`` of the strategy they are as many
    on any workers. Ray stops workers without a signal that a program could save on, so ``save_freq`` says how much work
    a failure costs at most.

    Args:
        save_freq: "epoch", or report a checkpoint every this many global batches, counted over all epochs; False
            reports no checkpoints. With gradient accumulation a checkpoint waits for the update.
        folder: where checkpoints are written before Ray copies them to its storage, in a temporary folder of its own
            that a killed process leaves there. None is the chief's folder for temporary files. For a model that is
            divided among workers of several hosts, give a folder that all of them see.

    Raises:
        ConfigError: it is made outside a train function of Ray Train.

    Example:
        >>> callback = RayTrain(save_freq=100)  # doctest: +SKIP
    """

    comes_after = 2

    def __init__(
        self,
        save_freq: Literal["epoch", False] | int = "epoch",
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(save_freq, "'epoch', a number of batches, or False")
        self._ray: Any = require("ray.train", "ray")
        try:
            self._ray.get_context()
        except RuntimeError as error:  # ray 2.60: "cannot be used outside of a Ray Train training function"
            raise ConfigError(
                "RayTrain reports to Ray Train, and was not made in a train function of it; make it in the function "
                "that is given to ray.train.torch.TorchTrainer, or leave it out"
            ) from error
        self.folder = None if folder is None else check_path(folder, "RayTrain(folder)")
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._has_reported = False

    def wants_batch_logs(self) -> bool:
        return type(self.save_freq) is int and self._is_due_at(self.model.training_state.position.step + 1)

    def on_train_begin(self, logs: Logs) -> None:
        self._due = False
        # What an earlier fit of this function has reported is not what this one goes on from.
        reported = None if self._has_reported else self._ray.get_checkpoint()
        if reported is not None:
            with reported.as_directory() as path:
                position = self.model.load_checkpoint(path)
            if self.params.get("verbose"):
                self._say(f"going on from {reported.path}: epoch {position.epoch + 1}, {position.batch} batches done")
        if self.save_freq is not False:
            run_on_chief(self.model.strategy.workers, "folder of checkpoints", self._make_folder)
            # Workers other than the chief learn of the folder when they write.
            place = tempfile.gettempdir() if self._temporary is None else self._temporary.name
            self._manager = CheckpointManager(self.model.checkpoint(), place, keep=1)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        state = self.model.training_state
        self._due = self._is_due_at(state.position.step)
        if self._due and state.at_update:
            self._report(logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._due = self._due or self.save_freq == "epoch"
        self._report(logs)

    def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.finish_writing()
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.cleanup()

    def _make_folder(self) -> None:
        """Makes a new folder for this fit: what an earlier process has left may be of another run."""
        try:
            self._temporary = tempfile.TemporaryDirectory(prefix="lockstep-ray-", dir=self.folder)
        except OSError as error:
            raise CheckpointError(
                f"RayTrain(folder) is {self.folder!r}, where no folder can be made: {error.strerror}; make it, or "
                "change its permissions"
            ) from error

    def _report(self, logs: Logs) -> None:
        """Reports the logs, and a checkpoint if one is due. Every worker must call it: Ray waits for all of them."""
        position = self.model.training_state.position
        checkpoint = None
        if self._due and self._manager is not None:
            path = self._manager.save(position.step)
            # One worker hands the files over: Ray copies those of all of them to one place.
            if self.model.strategy.workers.is_chief:
                checkpoint = self._ray.Checkpoint.from_directory(str(path))
        self._due = False
        numbers = {name: float(value) for name, value in logs.items()}
        self._ray.report({**numbers, "epoch": position.epoch, "step": position.step}, checkpoint=checkpoint)
        self._has_reported = True
