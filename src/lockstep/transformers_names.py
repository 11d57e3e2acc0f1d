"""Arguments of transformers 4's ``TrainingArguments`` that transformers 5 lacks, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
_UNKNOWN = re.compile(r"TrainingArguments\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def note_of(error: BaseException) -> str | None:
    """What to write in place of an argument that ``TrainingArguments`` has refused; None for any other error."""
    unknown = _UNKNOWN.search(str(error)) if isinstance(error, TypeError) else None
    advice = None if unknown is None else TRAINING_ARGUMENTS.get(unknown[1])
    return None if unknown is None or advice is None else f"{unknown[1]} is of transformers 4; {advice}"
