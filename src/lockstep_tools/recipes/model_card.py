"""The model card: ``README.md`` beside the weights, as the Hugging Face hub shows it, with metadata in YAML.

Its code loads the model from the folder that it was written to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.extras import require
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.reviews.config import ReviewsConfig
from lockstep_tools.recipes.run_record import RunRecord, versions
from lockstep_tools.recipes.training import FEW_UPDATES


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What a card says of a model, besides the record of its run.

    Args:
        title: what the model is.
        task: its task, as the hub calls it, such as "fill-mask".
        language: language of the data, as the hub writes it; None if it is not known.
        code: Python that loads the model and uses it.
        notes: what a reader has to know before using it.
    """

    title: str
    task: str
    language: str | None = None
    code: str
    notes: str = ""

    def render(self, record: RunRecord) -> str:
        """The text of the file. Needs huggingface_hub, which transformers needs too."""
        result = record.result
        parts = [
            f"---\n{self._metadata(record)}\n---",
            f"# {self.title}",
            f"{result.parameters:,} parameters, trained with `lockstep train {record.recipe}` on {record.data}.",
            *([self.notes] if self.notes else []),
            *([_FEW.format(updates=result.updates)] if result.updates < FEW_UPDATES else []),
            f"## Use\n\n```python\n{self.code}\n```",
            f"## Results\n\n{_results(record)}",
            f"## Training\n\n{_training(record)}",
        ]
        return "\n\n".join(parts) + "\n"

    def _metadata(self, record: RunRecord) -> str:
        hub = require("huggingface_hub", "transformers")
        results = [
            hub.EvalResult(
                task_type=self.task,
                dataset_type="custom",
                dataset_name=record.data,
                dataset_split="test",
                metric_type=name,
                metric_value=round(value, 4),
            )
            for name, value in record.result.test_metrics.items()
        ]
        data = hub.ModelCardData(
            base_model=_base_model(record.config),
            language=self.language,
            library_name="transformers",
            pipeline_tag=self.task,
            tags=["lockstep"],
            metrics=[name for name in record.result.test_metrics if name != "loss"],
            model_name=self.title,
            eval_results=results,
        )
        text: str = data.to_yaml()
        return text.strip()


_FEW = "Number of updates: {updates}. These are few to learn from: take it for a trial, not for a model to use."


def quoted(value: Path | str | list[str]) -> str:
    """Text as Python writes it, in double quotes."""
    # JSON's strings and lists of strings are Python's too, so the card's code runs whatever is in a path or a class.
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def mlm_card(config: MlmConfig, folder: Path) -> ModelCard:
    """The card of a masked language model in ``folder``."""
    code = f"""
from transformers import pipeline

fill = pipeline("fill-mask", {quoted(folder)})
print(fill(f"the first {{fill.tokenizer.mask_token}} of a list")[0])"""
    language = "en" if config.data is None else None
    return ModelCard(title="BERT that fills in masked words", task="fill-mask", language=language, code=code.strip())


def reviews_card(config: ReviewsConfig, folder: Path, text: str) -> ModelCard:
    """The card of a review classifier in ``folder``; ``text`` is a review to classify."""
    code = f"""
from transformers import pipeline

classify = pipeline("text-classification", {quoted(folder)})
print(classify({quoted(text)}, truncation=True, max_length={config.max_tokens})[0])"""
    language = "zh" if config.data is None else None
    return ModelCard(
        title="BERT that classifies reviews", task="text-classification", language=language, code=code.strip()
    )


def images_card(config: ImagesConfig, classes: Sequence[str], folder: Path) -> ModelCard:
    """The card of an image classifier in ``folder``."""
    size = f"({config.side}, {config.side})"
    if config.hidden and not config.pretrained:
        notes = "transformers has no such head: the code below makes the model with Lockstep."
        sizes = f"hidden={config.hidden}, size={config.side}, width_multiplier={config.width_multiplier}"
        code = f"""
import torch
from safetensors.torch import load_file

from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.model import new_mobilenet

classes = {quoted(list(classes))}
config = ImagesConfig({sizes}, output_stride={config.output_stride})
model = new_mobilenet(config, classes)
model.load_state_dict(load_file({quoted(folder / "model.safetensors")}))
logits = model.eval()(torch.zeros(1, 3, *{size}))  # values from 0 to 1
print(classes[logits.argmax()])"""
    else:
        notes = ""
        code = f"""
from PIL import Image
from transformers import pipeline

classify = pipeline("image-classification", {quoted(folder)})
print(classify(Image.new("RGB", {size}))[0])"""
    title = "Image classifier" if config.pretrained else "MobileNetV2 that classifies images"
    return ModelCard(title=title, task="image-classification", code=code.strip(), notes=notes)


def _base_model(config: Any) -> str | None:
    """The name on the hub of the model that was trained further; None for random weights or a folder."""
    name: str | None = getattr(config, "pretrained", None)
    # A folder of the user's is no name on the hub.
    return None if name is None or Path(name).exists() else name


def _results(record: RunRecord) -> str:
    rows = [f"| {name} | {value:.4f} |" for name, value in record.result.test_metrics.items()]
    return "\n".join(["| test | |", "| --- | ---: |", *rows, "", f"Of epoch {record.tested_epoch}."])


def _training(record: RunRecord) -> str:
    """Settings, devices, versions and the fingerprint. Paths of the user are not repeated."""
    settings = [
        f"{name}={value}"
        for name, value in record.settings.items()
        if value is not None and name not in ("data", "pretrained")
    ]
    layout = record.layout
    workers = f" on each of {layout['workers']} workers" if layout["workers"] > 1 else ""
    devices = f"{layout['strategy']}, {layout['replicas']} replicas, {', '.join(layout['devices'])}{workers}"
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return "\n".join(
        [
            f"- settings: {', '.join(settings)}",
            f"- devices: {devices}",
            f"- versions: {packages}",
            f"- fingerprint of the training state: `{record.result.fingerprint}`",
        ]
    )
