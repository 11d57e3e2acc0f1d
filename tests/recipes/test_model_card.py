"""The code of a model card where transformers has no class for the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.model import new_mobilenet
from lockstep_tools.recipes.model_card import images_card

pytest.importorskip("transformers")


def test_images_with_a_hidden_layer_are_loaded_with_lockstep(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_file = pytest.importorskip("safetensors.torch").save_file
    config = ImagesConfig(size=8, width_multiplier=0.1, output_stride=8, hidden=3)
    save_file(new_mobilenet(config, ["cat", "dog"]).state_dict(), tmp_path / "model.safetensors")
    exec(images_card(config, ["cat", "dog"], tmp_path).code, {})
    assert capsys.readouterr().out.strip() in ("cat", "dog")
