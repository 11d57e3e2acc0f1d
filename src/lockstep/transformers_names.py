"""Arguments of 2024 that transformers 5 and TRL lack, in ``TrainingArguments`` and the like, and what to write now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import TracebackType

TRAINING_ARGUMENTS: Mapping[str, str] = {
    "evaluation_strategy": "write eval_strategy=",
    "no_cuda": "write use_cpu=",
    "per_gpu_train_batch_size": "write per_device_train_batch_size=",
    "per_gpu_eval_batch_size": "write per_device_eval_batch_size=",
    "warmup_ratio": "write warmup_steps=, which takes a fraction too",
    "group_by_length": "write train_sampling_strategy='group_by_length'",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "overwrite_output_dir": "leave it out",
    "save_safetensors": "leave it out",
}
TRL_ARGUMENTS: Mapping[str, str] = {
    "max_seq_length": "write max_length=",
    "max_prompt_length": "leave it out: max_length is that of prompt and completion together",
    "max_target_length": "leave it out: max_length is that of prompt and completion together",
    "dataset_batch_size": "leave it out",
    "generate_during_eval": "leave it out; trl.LogCompletionsCallback generates texts in evaluations",
    "rpo_alpha": "write loss_type=['sigmoid', 'sft'] and loss_weights=[1.0, rpo_alpha]",
}
_UNKNOWN = re.compile(
    r"(?:TrainingArguments|(?:SFT|DPO|KTO|GRPO|Reward)Config)\.__init__\(\) got an unexpected keyword argument '(\w+)'"
)


def note_of(error: BaseException) -> str | None:
    """What to write in place of the arguments that such a class refuses; None for any other error.

    Python's message names the first of them alone. The others of the same call follow it, a line each.
    """
    unknown = _UNKNOWN.search(str(error)) if isinstance(error, TypeError) else None
    answers = {name: f"{name} is of transformers 4; {advice}" for name, advice in TRAINING_ARGUMENTS.items()}
    if unknown is not None and "Config." in unknown[0]:
        answers |= {name: f"{name} is of an older TRL; {advice}" for name, advice in TRL_ARGUMENTS.items()}
    if unknown is None or unknown[1] not in answers:
        return None
    refused, passed = unknown[1], _names_in_call(error.__traceback__, unknown[1])
    return "\n".join(answers[name] for name in [refused, *(name for name in answers if name in passed - {refused})])


def _names_in_call(traceback: TracebackType | None, name: str) -> set[object]:
    """The names of the arguments of the call that failed because of ``name``; too many where they cannot be told apart.

    Python raises before the called function has a frame, so the last frame of the traceback is that of the call. The
    names are the keys of a dict of the caller's that it may pass with ``**``, or constants of the caller's code: one
    tuple for a call, or one by one where a call has more than 15 (Python 3.11 to 3.13, Python/compile.c).
    """
    if traceback is None:
        return set()
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    values, constants = traceback.tb_frame.f_locals.values(), traceback.tb_frame.f_code.co_consts
    groups: list[Iterable[object]] = [value for value in values if isinstance(value, dict) and name in value]
    groups = groups or [value for value in constants if isinstance(value, tuple) and name in value] or [constants]
    return set().union(*groups)
