"""The replicas' random numbers: begun from the arguments' seed, kept in a file of every checkpoint.

    rng_state.pth                transformers' own: Python's, numpy's and torch's, of the process
    lockstep_rng_state.pth       the replicas', from which dropout is drawn

So a training that goes on equals one that was not interrupted, bit for bit. On another number of replicas, or from a
checkpoint without the file, the numbers are derived from seed and step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerControl, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from lockstep.collectives.communicator import Communicator, all_gather_object, check_agreement
from lockstep.strategies.base import Strategy

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_ENDS_OF_STEPS = frozenset({"on_step_end", "on_substep_end", "on_epoch_end"})
# What may differ between workers: where each writes, and how much it says.
_OWN = (
    "output_dir",
    "logging_dir",
    "run_name",
    "report_to",
    "disable_tqdm",
    "log_level",
    "hub_",
    "local_rank",
    "push_",
)


class AgreeingCallbacks(CallbackHandler):
    """The callbacks of one worker, after whose steps all workers go on alike.

    Args:
        plain: the handler that transformers made of them.
        workers: all workers.
    """

    def __init__(self, plain: CallbackHandler, workers: Communicator) -> None:
        parts = (plain.callbacks, plain.model, plain.processing_class, plain.optimizer, plain.lr_scheduler)
        super().__init__(*parts)  # type: ignore[no-untyped-call]
        self._workers = workers

    def call_event(self, event: str, *args: Any, **named: Any) -> TrainerControl:
        """Calls all callbacks; at the end of a step every worker must come here."""
        control: TrainerControl = super().call_event(event, *args, **named)  # type: ignore[no-untyped-call]
        if event in _ENDS_OF_STEPS:
            agree_on_flags(self._workers, control)
        return control


def agree_on_flags(workers: Communicator, control: TrainerControl) -> None:
    """Sets what any worker has set. Every worker must call it."""
    if workers.size == 1:
        return
    everyones = workers.all_gather_numbers("what the callbacks ask for", [getattr(control, flag) for flag in FLAGS])
    for flag, asked in zip(FLAGS, zip(*everyones, strict=True), strict=True):
        setattr(control, flag, any(asked))


def agree_on_arguments(workers: Communicator, args: TrainingArguments) -> None:
    """Checks that all workers were given the same, but for what is each one's own.

    Raises:
        ClusterError: they were not; it names the first difference.
    """
    if workers.size > 1:
        settings = args.to_dict()  # type: ignore[no-untyped-call]
        check_agreement(
            workers,
            "the training arguments",
            [f"{name}={settings[name]!r}" for name in sorted(settings) if not name.startswith(_OWN)],
        )


def agree_on_checkpoint(workers: Communicator, folder: str | None) -> None:
    """Checks that all workers have the checkpoint, as files that all of them can read.

    Raises:
        ClusterError: some worker has other files, or none.
    """
    if workers.size > 1:
        files = sorted(Path(folder).glob("*")) if folder is not None else []
        lines = [f"{file.name} of {file.stat().st_size} bytes" for file in files if file.is_file()]
        check_agreement(workers, f"the checkpoint {folder}", [*lines, f"{len(lines)} files"])


FILE = "lockstep_rng_state.pth"


def begin_random_numbers(strategy: Strategy, seed: int) -> None:
    """Gives the replicas the numbers of ``seed``, as transformers' ``set_seed`` gives them to the process."""
    strategy.generators.begin(seed, strategy.workers.first_replica)


def save_random_numbers(strategy: Strategy, folder: Path) -> None:
    """Has the chief write where all replicas are. Every worker must call it."""
    everyones = all_gather_object(strategy.workers, "the replicas' random numbers", strategy.generators.states())
    if strategy.workers.is_chief:
        torch.save([state for states in everyones for state in states], folder / FILE)


def load_random_numbers(strategy: Strategy, folder: Path, *, seed: int, step: int) -> None:
    """Puts back what ``save`` wrote, or derives numbers for a training that goes on otherwise.

    Args:
        strategy: whose replicas they are.
        folder: a checkpoint.
        seed: of the training.
        step: how many updates it has had.
    """
    workers = strategy.workers
    states = _read(folder / FILE)
    if len(states) == workers.num_replicas:
        local = len(strategy.devices)
        strategy.generators.set_states(states[workers.first_replica :][:local])
    else:
        begin_random_numbers(strategy, seed)
        strategy.generators.derive(step)


def _read(file: Path) -> Sequence[Mapping[str, Tensor]]:
    if not file.is_file():
        return ()
    states: list[dict[str, Tensor]] = torch.load(file, map_location="cpu", weights_only=True)
    return states
