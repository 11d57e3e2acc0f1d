"""The layouts of the weights: shared by all replicas, and each replica's own as on as many real devices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lockstep.config import LogicalDevice


def _each_alone(devices: Sequence[LogicalDevice]) -> tuple[tuple[int, ...], ...]:
    return tuple((replica,) for replica in range(len(devices)))


def _in_pairs(devices: Sequence[LogicalDevice]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(len(devices)))[start : start + 2] for start in range(0, len(devices), 2))


@pytest.fixture(params=["shared", "shared, in slices", "own", "pairs"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The storage of the weights. A CPU share has no memory limit, so what gives it weights of its own is forced."""
    if request.param == "shared, in slices":  # which only many weights are, and these tests have few
        monkeypatch.setattr("lockstep.mirroring.optim.update._FEW", 0)
    elif request.param != "shared":
        groups = _each_alone if request.param == "own" else _in_pairs
        monkeypatch.setattr("lockstep.mirroring.registry.storage_groups", groups)
        monkeypatch.setattr("lockstep.mirroring.module.module.storage_groups", groups)
    return str(request.param)
