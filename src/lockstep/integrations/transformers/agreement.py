"""What the workers of a job must agree on while transformers' loop runs in each of them.

    before       the arguments, and that all see the checkpoint to resume from
    each step    what callbacks ask for: one worker that wants to stop, save, evaluate or log is enough
    evaluation   the chief's metrics are everyone's, and so are the decisions that rest on them

With one worker there is nothing to agree on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from lockstep.collectives.communicator import Workers, agree

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

    def __init__(self, plain: CallbackHandler, workers: Workers) -> None:
        parts = (plain.callbacks, plain.model, plain.processing_class, plain.optimizer, plain.lr_scheduler)
        super().__init__(*parts)  # type: ignore[no-untyped-call]
        self._workers = workers

    def call_event(self, event: str, *args: Any, **named: Any) -> TrainerControl:
        """Calls all callbacks; at the end of a step every worker must come here."""
        control: TrainerControl = super().call_event(event, *args, **named)  # type: ignore[no-untyped-call]
        if event in _ENDS_OF_STEPS:
            agree_on_flags(self._workers, control)
        return control


def agree_on_flags(workers: Workers, control: TrainerControl) -> None:
    """Sets what any worker has set. Every worker must call it."""
    if workers.size == 1:
        return
    everyones = workers.exchange("what the callbacks ask for", [getattr(control, flag) for flag in FLAGS])
    for flag, asked in zip(FLAGS, zip(*everyones, strict=True), strict=True):
        setattr(control, flag, any(asked))


def agree_on_arguments(workers: Workers, args: TrainingArguments) -> None:
    """Checks that all workers were given the same, but for what is each one's own.

    Raises:
        ClusterError: they were not; it names the first difference.
    """
    if workers.size > 1:
        settings = args.to_dict()  # type: ignore[no-untyped-call]
        agree(
            workers,
            "the training arguments",
            [f"{name}={settings[name]!r}" for name in sorted(settings) if not name.startswith(_OWN)],
        )


def agree_on_checkpoint(workers: Workers, folder: str | None) -> None:
    """Checks that all workers have the checkpoint, as files that all of them can read.

    Raises:
        ClusterError: some worker has other files, or none.
    """
    if workers.size > 1:
        files = sorted(Path(folder).glob("*")) if folder is not None else []
        lines = [f"{file.name} of {file.stat().st_size} bytes" for file in files if file.is_file()]
        agree(workers, f"the checkpoint {folder}", [*lines, f"{len(lines)} files"])
