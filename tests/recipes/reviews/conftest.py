"""Reviews whose class is plain to see, as a file, and the config of a tiny run on them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lockstep_tools.recipes.reviews.config import ReviewsConfig

MakeConfig = Callable[..., ReviewsConfig]

THINGS = ("房间", "服务", "早餐", "书", "屏幕", "送货", "价格", "质量", "前台", "包装")
WORDS = {1: ("很好", "不错", "满意", "喜欢", "干净"), 0: ("很差", "失望", "糟糕", "难用", "太慢")}


@pytest.fixture(scope="session")
def rows() -> list[tuple[int, str]]:
    """100 different reviews, label first, classes in turn."""
    pairs = [[(label, f"{thing}{word}。") for thing, word in product(THINGS, WORDS[label])] for label in (0, 1)]
    return [row for both in zip(*pairs, strict=True) for row in both]


@pytest.fixture(scope="session")
def csv_file(rows: list[tuple[int, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those reviews as a CSV file."""
    path = tmp_path_factory.mktemp("reviews") / "reviews.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("label", "review"), *rows])
    return path


@pytest.fixture
def tiny(csv_file: Path) -> MakeConfig:
    """A function that makes the config of a tiny run on them, with the settings given."""

    def make(**settings: Any) -> ReviewsConfig:
        defaults: dict[str, Any] = {
            "data": csv_file,
            "vocabulary": 200,
            "layers": 1,
            "hidden": 16,
            "feed_forward": 32,
            "dropout": 0.0,
            "hide": 0.0,
            "max_tokens": 16,
            "per_device_train_batch_size": 5,
            "learning_rate": 0.02,
            "epochs": 2,
        }
        return ReviewsConfig(**{**defaults, **settings})

    return make
