"""Samples, contenders and conditions for the tests of the benchmark's pure parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.conftest import (  # noqa: F401 - fixtures
    _leaks_nothing,
    forks,
    fresh_devices,
    one_core,
    python,
)
from tests.scaling.conftest import made_up_machine

from benchmarks.harness import Memory, Sample
from benchmarks.loops import train_ddp
from benchmarks.processes import SpawnedBody
from benchmarks.results import Figures
from benchmarks.trial import Conditions, Contender, Layout, Role


class Make:
    """Values with the parts filled in that a test does not care about."""

    def contender(
        self,
        name: str,
        *,
        role: Role = "baseline",
        replicas: int = 1,
        processes: int = 1,
        layout: Layout = "contiguous",
    ) -> Contender:
        return Contender(
            name=name,
            settings=f"settings of {name}",
            launcher=SpawnedBody(body=train_ddp),
            replicas=replicas,
            processes=processes,
            layout=layout,
            role=role,
            peer=name.partition("-")[0] if role == "peer" else "",
        )

    def sample(self, name: str, *step_ms: float, round_: int = 0, exchange_ms: tuple[float, ...] = ()) -> Sample:
        return Sample(
            workload="mlm",
            contender=name,
            round=round_,
            step_ms=step_ms,
            cpu_ms=2 * step_ms[0],
            exchange_ms=exchange_ms,
            first_step_s=3.0 + round_,
            first_step_cpu_s=6.0 + round_,
            loss=1.5,
            trained=1000,
            memory=Memory(peak_mb=100.0 + round_, pss_mb=98.0 + round_),
        )

    def figures(
        self,
        who: Contender,
        *,
        ratio: float | None = 1.0,
        median_ms: float = 10.0,
        peak_mb: float = 100.0,
        first_step_s: float = 2.0,
        share: float | None = None,
        trained: int = 1000,
    ) -> Figures:
        """One round of one step."""
        exchange_ms = () if share is None else (share * median_ms,)
        sample = replace(
            self.sample(who.name, median_ms, exchange_ms=exchange_ms),
            memory=Memory(peak_mb=peak_mb, pss_mb=peak_mb - 2),
            first_step_s=first_step_s,
            trained=trained,
        )
        return Figures(contender=who, samples=(sample,), ratio=ratio)

    def conditions(self) -> Conditions:
        machine = replace(made_up_machine(), processor="A processor", cores=2)
        return Conditions(
            date="2026-01-31", machine=machine, command="python -m benchmarks", warm_up=3, steps=10, rounds=2
        )


@pytest.fixture
def make() -> Make:
    """Builders of values for these tests."""
    return Make()
