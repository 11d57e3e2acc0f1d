"""What the workers of a job agree on while transformers' loop runs in each of them, and the replicas' random states.

They compare arguments and the checkpoint to resume from; in each step one worker that wants to stop, save, evaluate or
log is enough. The replicas' random states are in ``lockstep_rng_state.pth``, beside transformers' own.
On another number of replicas, or without the file, they are derived from seed and step. What the bits depend on is in
``lockstep_conditions.json``, and what samplers and datasets hold from epoch to epoch in ``lockstep_data_state.pth``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from lockstep.checkpoint.conditions import all_conditions, warn_of_changes
from lockstep.collectives.communicator import Communicator, all_gather_object, check_agreement
from lockstep.data.attribute_state import Look, SourceAttributes
from lockstep.integrations.transformers.examples import count_examples
from lockstep.strategies.base import Strategy

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
FILE = "lockstep_rng_state.pth"
DATA_FILE = "lockstep_data_state.pth"
CONDITIONS = "lockstep_conditions.json"
_ENDS_OF_STEPS = frozenset({"on_step_end", "on_substep_end", "on_epoch_end"})
# What may differ between workers: folders and logging.
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
    """The callbacks of one worker, from ``plain``. At the end of a step all workers agree on what they ask for.

    ``attributes`` are those of the data of the training that runs, once it has begun.
    """

    def __init__(self, plain: CallbackHandler, workers: Communicator) -> None:
        parts = (plain.callbacks, plain.model, plain.processing_class, plain.optimizer, plain.lr_scheduler)
        super().__init__(*parts)  # type: ignore[no-untyped-call]
        self._workers = workers
        self.attributes: SourceAttributes | None = None
        self.resumed_from: Path | None = None
        self._begun: Look | None = None

    def call_event(self, event: str, *args: Any, **named: Any) -> TrainerControl:
        if event == "on_train_begin":
            count_examples(self.train_dataloader, self._workers.num_replicas)
            self.attributes, self._begun = SourceAttributes(self.train_dataloader), None
            load_data_state(self.attributes, self.resumed_from)
        elif event == "on_epoch_begin" and self.attributes is not None:
            self._begun = self.attributes.look()
        control: TrainerControl = super().call_event(event, *args, **named)  # type: ignore[no-untyped-call]
        if event in _ENDS_OF_STEPS:
            agree_on_flags(self._workers, control)
        return control

    def save_data_state(self, folder: Path, *, epoch_ended: bool) -> None:
        """Writes what the attributes of the data were when this epoch began, or are at its end; the chief writes."""
        if self.attributes is not None and self._workers.is_chief:
            state = self.attributes.state(None if epoch_ended else self._begun, rows="unknown")
            torch.save(state, folder / DATA_FILE)


def load_data_state(attributes: SourceAttributes, folder: Path | None) -> None:
    """Brings the attributes of the data to what they are in a checkpoint, if there is one."""
    attributes.look()
    if folder is not None and (file := folder / DATA_FILE).is_file():
        # weights_only, here and below: no code of a checkpoint runs.
        attributes.load(torch.load(file, map_location="cpu", weights_only=True))


def agree_on_flags(workers: Communicator, control: TrainerControl) -> None:
    """Sets every flag that any worker has set. Every worker must call it."""
    everyones = workers.all_gather_numbers("what the callbacks ask for", [getattr(control, flag) for flag in FLAGS])
    for flag, requests in zip(FLAGS, zip(*everyones, strict=True), strict=True):
        setattr(control, flag, any(requests))


def agree_on_arguments(workers: Communicator, args: TrainingArguments) -> None:
    """Raises a ClusterError if workers have other arguments than the chief, except for folders and logging."""
    if workers.size > 1:
        settings = sorted(args.to_dict().items())  # type: ignore[no-untyped-call]
        arguments = [f"{name}={value!r}" for name, value in settings if not name.startswith(_OWN)]
        check_agreement(workers, "the training arguments", arguments)


def agree_on_checkpoint(workers: Communicator, folder: str | None) -> None:
    """Raises a ClusterError if a worker cannot read the same files of a checkpoint as the chief."""
    if workers.size > 1:
        files = sorted(Path(folder).glob("*")) if folder is not None else []
        lines = [f"{file.name} of {file.stat().st_size} bytes" for file in files if file.is_file()]
        check_agreement(workers, f"the checkpoint {folder}", [*lines, f"{len(lines)} files"])


def begin_random_numbers(strategy: Strategy, seed: int) -> None:
    """Seeds the replicas, as transformers' ``set_seed`` seeds the process."""
    strategy.generators.begin(seed, strategy.workers.first_replica)


def save_random_numbers(strategy: Strategy, folder: Path) -> None:
    """Writes the random states of all replicas. Every worker must call it; the chief writes."""
    everyones = all_gather_object(strategy.workers, "the replicas' random numbers", strategy.generators.states())
    if strategy.workers.is_chief:
        torch.save([state for states in everyones for state in states], folder / FILE)


def load_random_numbers(strategy: Strategy, folder: Path, *, seed: int, step: int) -> None:
    """Restores the random states, or derives them from seed and step on another number of replicas."""
    workers, file = strategy.workers, folder / FILE
    states = torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else []
    if len(states) == workers.num_replicas:
        local = len(strategy.devices)
        strategy.generators.set_states(states[workers.first_replica :][:local])
    else:
        begin_random_numbers(strategy, seed)
        strategy.generators.derive(step)


def save_conditions(strategy: Strategy, folder: Path, args: TrainingArguments) -> None:
    """Writes what the bits of the training depend on. Every worker must call it; the chief writes."""
    conditions = all_conditions(strategy, _settings(args))
    if strategy.workers.is_chief:
        (folder / CONDITIONS).write_text(json.dumps(conditions, indent=2), encoding="utf-8")


def compare_conditions(strategy: Strategy, folder: Path, args: TrainingArguments) -> None:
    """Warns of what has changed since they were saved. Every worker must call it; the chief reads and warns."""
    now, file = all_conditions(strategy, _settings(args)), folder / CONDITIONS
    if strategy.workers.is_chief and file.is_file():
        warn_of_changes(folder, json.loads(file.read_text(encoding="utf-8")), now)


def _settings(args: TrainingArguments) -> dict[str, str]:
    return {"precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"}
