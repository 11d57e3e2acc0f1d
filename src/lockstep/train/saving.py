"""What a Model saves and loads: its module's weights in one file, or all state of its training in a checkpoint."""

from __future__ import annotations

import os

from torch import Tensor

from lockstep.checkpoint.checkpoint import Checkpoint
from lockstep.checkpoint.weights import check_fit, read_weights, write_weights
from lockstep.collectives.communicator import Workers, on_chief
from lockstep.errors import UsageError
from lockstep.mirroring.module import MirroredModule
from lockstep.train.job import Job
from lockstep.train.saving_parts import load_parts, save_parts
from lockstep.train.training_state import TrainingState


def save_weights(module: MirroredModule, workers: Workers, path: str | os.PathLike[str]) -> None:
    """Writes the module's state_dict to a safetensors file. Every worker must call it; the chief writes."""
    if module.is_part:
        save_parts(module, workers, path)
        return
    module.exchange_buffers()
    state = module.state_dict()
    on_chief(workers, "save the weights", lambda: write_weights(state, path))


def load_weights(module: MirroredModule, workers: Workers, path: str | os.PathLike[str]) -> None:
    """Loads a safetensors file into all copies, if everything fits. Every worker must call it; the chief reads."""
    if module.is_part:
        load_parts(module, workers, path)
        return
    state: dict[str, Tensor] = module.module.state_dict()

    def read() -> dict[str, Tensor]:
        weights = read_weights(path)
        check_fit(weights, state, path)
        return weights

    # The others go on from the chief's, which loading gives them.
    module.load_state_dict(on_chief(workers, "load the weights", read) or state)


def checkpoint_of(job: Job | None, training: TrainingState) -> Checkpoint:
    """All state of a training.

    Raises:
        UsageError: not compiled with an optimizer.
    """
    if job is None or job.optimizer is None:
        raise UsageError("a checkpoint needs an optimizer; call model.compile(optimizer=..., loss=...) first")
    things = {"model": job.module, "optimizer": job.optimizer, "scheduler": job.scheduler}
    things["precision"] = job.precision if job.precision.name == "fp16" else None
    return Checkpoint(**{name: thing for name, thing in things.items() if thing is not None}, training=training)
