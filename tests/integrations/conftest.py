"""A tiny task for a Trainer, strategies on shares of the CPU, and Keras on torch."""

from __future__ import annotations

import os
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")  # before any test imports Keras

PROGRAM = str(Path(__file__).parent / "programs" / "tiny.py")


@pytest.fixture(scope="session")
def tiny() -> Any:
    """What ``programs/tiny.py`` defines."""
    return SimpleNamespace(**runpy.run_path(PROGRAM, run_name="tiny"))


@pytest.fixture(autouse=True)
def _one_core_each(one_core: None) -> None:
    """Tiny models are faster so."""


@pytest.fixture(params=["shared", "own"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether replicas share one storage of the weights, or have their own as on several GPUs, which is forced here."""
    if request.param == "own":
        monkeypatch.setattr("lockstep.mirroring.registry.storage_groups", _each_alone)
        monkeypatch.setattr("lockstep.mirroring.module.module.storage_groups", _each_alone)
    return str(request.param)


def _each_alone(devices: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple((replica,) for replica in range(len(devices)))
