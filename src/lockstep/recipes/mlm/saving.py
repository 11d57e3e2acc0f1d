"""The folder of a trained model, as transformers and the recipe itself read it."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.atomic_files import atomic_write
from lockstep.collectives.values import on_chief
from lockstep.recipes.mlm.build import MlmTask
from lockstep.train.model import Model


def save_mlm(model: Model, task: MlmTask, folder: Path) -> None:
    """Writes a folder for ``--pretrained``, BertForMaskedLM and ``pipeline("fill-mask")``.

    The chief writes; every worker must call it.
    """
    model.save_weights(folder / "model.safetensors")
    on_chief(model.strategy.workers, "describe the model", lambda: _describe(task, folder))


def _describe(task: MlmTask, folder: Path) -> None:
    tokenizer = task.vocabulary.tokenizer
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": task.longest_line,
        **{f"{kind}_token": tokenizer.id_to_token(number) for kind, number in task.vocabulary.named_ids.items()},
    }
    config = {**json.loads(task.module.bert.config.to_json_string()), "architectures": ["BertForMaskedLM"]}
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")
    atomic_write(folder / "tokenizer.json", tokenizer.to_str())
    atomic_write(folder / "tokenizer_config.json", json.dumps(described))
