"""A small text in the layout of wikitext, cut from the language reference that comes with Python, and a tiny run."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.text.corpus import paragraphs_of

MakeConfig = Callable[..., MlmConfig]


@pytest.fixture(scope="session")
def lines() -> list[str]:
    """140 real paragraphs."""
    topics = pydoc_data.topics.topics
    return [paragraph for name in sorted(topics) for paragraph in paragraphs_of(topics[name])][:140]


@pytest.fixture(scope="session")
def text_folder(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those paragraphs as a folder: 100 to train on, 20 to validate with, 20 to test with."""
    folder = tmp_path_factory.mktemp("text")
    for part, chosen in {"train": lines[:100], "valid": lines[100:120], "test": lines[120:]}.items():
        (folder / f"wiki.{part}.tokens").write_text("\n".join([" = A heading = ", "", *chosen]), encoding="utf-8")
    return folder


@pytest.fixture
def tiny(text_folder: Path) -> MakeConfig:
    """A function that makes the config of a tiny run on that text, with the settings given."""

    def make(**settings: Any) -> MlmConfig:
        defaults: dict[str, Any] = {
            "data": text_folder,
            "layers": 1,
            "hidden": 16,
            "heads": 2,
            "feed_forward": 32,
            "vocabulary": 400,
            "sequence_length": 48,
            "batch_size": 13,
            "epochs": 2,
            "learning_rate": 0.01,
        }
        return MlmConfig(**{**defaults, **settings})

    return make
